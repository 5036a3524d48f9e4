"""The header of a safetensors file, read and checked without its tensors.

Layout: a little-endian 64-bit length n, n bytes of JSON (name -> dtype, shape, data_offsets), then
the tensors back to back. Everything is checked against the size of the file, so a file that was cut
short is known before a tensor is read. Source: the safetensors format; `checkpoints.md` 2.2.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

# A header names thousands of tensors at most; a length beyond this is a damaged file.
MAX_HEADER = 100_000_000
DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    file: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    num_bytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What one file holds.

    text: the JSON as stored; `entries` by stored name; `faults`, one line each, empty if sound.
    """

    text: bytes
    entries: dict[str, Entry]
    faults: tuple[str, ...]


def read_header(path: Path) -> Header:
    """Reads and checks the header of one file; what is wrong with it is in `faults`.

    Raises: OSError if the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > MAX_HEADER or 8 + length > size:
            fault = f"{path.name}: not a safetensors file (a header of {length} bytes in {size})"
            return Header(b"", {}, (fault,))
        text = stream.read(length)
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        return Header(text, {}, (f"{path.name}: not a safetensors file ({error})",))
    if not isinstance(pairs, _Pairs):
        return Header(text, {}, (f"{path.name}: not a safetensors file (no object)",))
    entries, faults = {}, []
    for name, value in pairs:
        if name == "__metadata__":
            continue
        try:
            entry = _entry(path, value, 8 + length)
        except (KeyError, TypeError, ValueError) as error:
            faults.append(f"{name}: a damaged entry in {path.name} ({error})")
            continue
        if name in entries:
            faults.append(f"{name}: doubled in {path.name}")
        entries[name] = entry
    faults += _place_faults(path, entries, 8 + length, size)
    return Header(text, entries, tuple(faults))


class _Pairs(list):
    """An object as pairs, so that a name given twice is seen."""


def _entry(path: Path, value: object, base: int) -> Entry:
    if not isinstance(value, _Pairs):
        raise TypeError("expected an object")
    fields = dict(value)
    dtype, shape, (start, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    if isinstance(shape, _Pairs) or not isinstance(dtype, str):
        raise TypeError("expected dtype and shape")
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)) or end < start:
        raise ValueError("expected counts >= 0")
    entry = Entry(path, dtype, tuple(shape), base + start, end - start)
    if dtype in DTYPES and (expected := entry.size * DTYPES[dtype].itemsize) != entry.num_bytes:
        raise ValueError(f"{dtype} {entry.shape} takes {expected} bytes, not {entry.num_bytes}")
    return entry


def _place_faults(path: Path, entries: dict[str, Entry], base: int, size: int) -> list[str]:
    """Tensors must fill the file from `base` to its end without holes or overlaps."""
    faults, end = [], base
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].start):
        if entry.start != end:
            faults.append(f"{name}: expected at byte {end} of {path.name}, got {entry.start}")
        end = max(end, entry.start + entry.num_bytes)
    if size < end:
        faults.append(f"{path.name}: truncated, expected {end} bytes, got {size}")
    elif size > end:
        faults.append(f"{path.name}: expected {end} bytes, got {size}")
    return faults
