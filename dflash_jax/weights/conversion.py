"""Writes converted weights (`converted.py`): streamed, resumable, whole or absent.

Work happens in `.NAME.partial` beside the destination, item by item; an item counts when its record
has been written, after it has been read back and compared. The manifest and the renaming come last.
A run that finds a partial folder of the same sources goes on with the first item without a record;
one of other sources is refused. Host memory: one item, and while orbax writes it the chunks under
way; never two items.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_jax.config import ConfigError, TargetConfig
from dflash_jax.config.folder import read_json, write_text
from dflash_jax.config.rules import is_int
from dflash_jax.weights import block_scaled
from dflash_jax.weights.converted import (
    FORMAT,
    ITEMS,
    LIBRARY,
    MANIFEST,
    OWN_HEAD_ITEM,
    SIZES,
    dump,
    file_digest,
    fingerprint,
    item_of,
    restore_item,
    save_item,
)
from dflash_jax.weights.files import INDEX, WeightsError
from dflash_jax.weights.header import DTYPES
from dflash_jax.weights.hf_config import read_target_config
from dflash_jax.weights.hf_draft_config import draft_causality, read_draft_config
from dflash_jax.weights.leaves import Storage
from dflash_jax.weights.source import ChosenLeaf, Source, draft_source, target_source

MATRIX_DTYPES = {"bfloat16": DTYPES["BF16"], "float32": DTYPES["F32"]}
FP8 = "fp8"  # of a target: layer matrices in float8, other matrices in bfloat16
MAX_SHARDS = 1024
_PLAN, _RECORDS, _LOCK = "plan.json", "records", "lock"
_SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".md")
_SMALL_BYTES = 64 << 20
_HEADROOM = 64 << 20  # for manifests and what a file system needs beside the data


@dataclass(frozen=True)
class ItemPlan:
    """One orbax item to be written."""

    name: str
    leaves: tuple[ChosenLeaf, ...]  # empty for a draft's own head
    num_bytes: int


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion will write.

    identity: everything of the manifest but the items; equal for equal sources.
    """

    source: Source
    out: Path
    dtype: str
    items: tuple[ItemPlan, ...]
    identity: dict

    @property
    def num_bytes(self) -> int:
        """Bytes of all leaves."""
        return sum(item.num_bytes for item in self.items)

    @property
    def largest(self) -> int:
        """Bytes of the largest item."""
        return max(item.num_bytes for item in self.items)

    @property
    def partial(self) -> Path:
        """Where the work happens."""
        return self.out.with_name(f".{self.out.name}.partial")

    def __str__(self) -> str:
        files = self.identity["sources"]
        lines = [
            f"{self.source.files.folder} -> {self.out}: {self.identity['kind']}, matrices "
            f"{self.dtype}",
            f"  from {len(files)} files, {sum(f['bytes'] for f in files) / 1e9:.3f} GB; "
            f"{len(self.source.ignored)} tensors ignored",
            f"  to {len(self.items)} items, {self.num_bytes / 1e9:.3f} GB, the largest "
            f"{self.largest / 1e9:.3f} GB",
        ]
        if quantised := self.identity.get("quantised"):
            lines.append(f"  {quantised} tensors quantised to float8")
        if "causality" in self.identity:
            causality = self.identity["causality"]
            lines.append(f"  causality {causality['flags']}, decided by {causality['reason']}")
        lines += [
            f"  {item.name}: {len(item.leaves)} leaves, {item.num_bytes / 1e9:.3f} GB"
            for item in self.items
        ]
        return "\n".join(lines)


def plan_target(
    folder: str | Path, out: str | Path, dtype: str, *, shards: int = 1
) -> ConversionPlan:
    """Plans a target's conversion; reads headers and small vectors.

    Args:
      folder: Hugging Face folder.
      out: the folder that will hold the converted weights.
      dtype: of dense matrices, "bfloat16" or "float32"; or "fp8", which quantises the matrices that
        official FP8 releases have in float8. Those that the files have so stay so.
      shards: chunks, at least, of each large leaf on disk, for as many readers of a part each.
    Raises: ConfigError for config.json, dtype or shards; WeightsError listing all faults of the
      tensors.
    """
    config, quantised = read_target_config(folder), dtype == FP8
    source = target_source(folder, config, quantised_to_fp8=quantised)
    source.check()
    more = {"quantised": len(source.files.derived)}
    return _plan("target", source, out, "bfloat16" if quantised else dtype, shards, more)


def plan_draft(
    folder: str | Path, out: str | Path, dtype: str, target: TargetConfig, *, shards: int = 1
) -> ConversionPlan:
    """Plans a draft's conversion for a target; see `plan_target`."""
    config = read_draft_config(folder, target)
    source = draft_source(folder, config, target.public_vocab)
    source.check()  # first of all: no header of a faulty file is kept
    causality = draft_causality(read_json(Path(folder) / "config.json"))
    # To write the files back bit for bit: the headers as stored, and the index.
    index = Path(folder) / INDEX
    more = {
        "causality": {"flags": list(causality.flags), "reason": causality.reason},
        "headers": {file: header.text.decode() for file, header in source.files.headers.items()},
        "index": index.read_text("utf-8") if len(source.files.headers) > 1 else None,
    }
    return _plan("draft", source, out, dtype, shards, more)


def convert(plan: ConversionPlan, on_bytes: Callable[[int, int], None] | None = None) -> bool:
    """Writes what the plan says, going on where an earlier run was stopped.

    Args:
      on_bytes: called with the bytes done so far, and all bytes, after each item.
    Returns:
      False if the destination already holds exactly this.
    Raises: ValueError for a destination or a partial folder of something else; OSError naming the
      folder when the disk is too full; WeightsError when files change under the reader, and for the
      float8 tensors of an item that hold NaN or the dense one that cannot be quantised.
    """
    if plan.out.exists():
        if _is_done(plan):
            _tidy(plan.out)
            return False
        raise ValueError(f"{plan.out}: expected a new folder, got one that holds something else")
    plan.out.parent.mkdir(parents=True, exist_ok=True)
    with _claimed(plan) as partial:
        done = {item.name for item in plan.items if _record(partial, item.name).is_file()}
        finished = sum(item.num_bytes for item in plan.items if item.name in done)
        _check_space(plan, plan.num_bytes - finished)
        for item in plan.items:
            if item.name in done:
                continue
            _write_item(plan, item, partial)
            finished += item.num_bytes
            if on_bytes is not None:
                on_bytes(finished, plan.num_bytes)
        _finish(plan, partial)
    return True


def _plan(
    kind: str, source: Source, out: str | Path, dtype: str, shards: int, more: dict
) -> ConversionPlan:
    if dtype not in MATRIX_DTYPES:
        raise ConfigError(f"dtype: expected one of {[*MATRIX_DTYPES, FP8]}, got {dtype!r}")
    if not is_int(shards) or not 1 <= shards <= MAX_SHARDS:
        raise ConfigError(f"shards: expected 1..{MAX_SHARDS}, got {shards!r}")
    groups: dict[str, list[ChosenLeaf]] = {}
    for entry in source.chosen:
        groups.setdefault(item_of(entry.leaf.path), []).append(entry)
    items = [
        ItemPlan(name, tuple(leaves), sum(_leaf_bytes(entry, dtype) for entry in leaves))
        for name, leaves in groups.items()
    ]
    if source.head is not None:
        names = [source.stored[name] for name in source.head.names]
        items.append(ItemPlan(OWN_HEAD_ITEM, (), sum(map(source.files.num_bytes, names))))
    folder = source.files.folder
    files = [
        {
            "file": file,
            "bytes": (folder / file).stat().st_size,
            "header_sha256": hashlib.sha256(header.text).hexdigest(),
        }
        for file, header in source.files.headers.items()
    ]
    small = _small_files(folder)
    identity = {
        "format": FORMAT,
        "library": LIBRARY,
        "kind": kind,
        "dtype": dtype,
        "rounded": _rounds(source, dtype),
        "shards": shards,
        "config_sha256": small["config.json"],
        "sources": files,
        "small_files": small,
        "ignored": list(source.ignored),
        "geometry": dataclasses.asdict(source.config),
        **more,
    }
    # As it will be read back: enums are strings and tuples lists.
    return ConversionPlan(source, Path(out).absolute(), dtype, tuple(items), _plain(identity))


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, str) else value


def _leaf_bytes(entry: ChosenLeaf, dtype: str) -> int:
    return int(np.prod(entry.leaf.shape)) * _dtype_of(entry, dtype).itemsize


def _dtype_of(entry: ChosenLeaf, dtype: str) -> np.dtype:
    if entry.leaf.storage is Storage.FP8:
        return DTYPES["F8_E4M3"]
    return MATRIX_DTYPES[dtype] if entry.leaf.storage is Storage.MATRIX else DTYPES["F32"]


def _rounds(source: Source, dtype: str) -> bool:
    """Whether a matrix of the files has values that the matrices' dtype may not hold."""
    exact = {"bfloat16": ("BF16",), "float32": ("BF16", "F16", "F32")}[dtype]
    return any(
        source.files.dtype(source.stored[part.name]) not in exact
        for entry in source.chosen
        if entry.leaf.storage is Storage.MATRIX
        for part in entry.layout
    )


def _small_files(folder: Path) -> dict[str, str]:
    """Names and digests of the files that are kept as they are."""
    kept = {}
    for file in sorted(folder.iterdir()):
        small = file.is_file() and file.stat().st_size <= _SMALL_BYTES
        if small and file.suffix in _SMALL_SUFFIXES and file.name not in (INDEX, MANIFEST, SIZES):
            kept[file.name] = file_digest(file)
    return kept


def _is_done(plan: ConversionPlan) -> bool:
    try:
        manifest = read_json(plan.out / MANIFEST)
    except (ConfigError, OSError):
        return False
    manifest.pop("items", None)
    return manifest == plan.identity


@contextlib.contextmanager
def _claimed(plan: ConversionPlan) -> Iterator[Path]:
    """The partial folder of this plan, held against a second run; kept if the block raises."""
    partial = plan.partial
    partial.mkdir(exist_ok=True)
    with open(partial / _LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{partial}: another conversion is writing to it") from error
        if not (partial / _PLAN).is_file():
            write_text(partial / _PLAN, dump(plan.identity))
        elif read_json(partial / _PLAN) != plan.identity:
            raise ValueError(
                f"{partial}: expected the unfinished conversion of these files, got that of others;"
                " remove it to start anew"
            )
        yield partial


def _check_space(plan: ConversionPlan, num_bytes: int) -> None:
    free = shutil.disk_usage(plan.out.parent).free
    if free < num_bytes + _HEADROOM:
        expected = f"{num_bytes + _HEADROOM} bytes free"
        raise OSError(28, f"disk full: expected {expected}, got {free}", str(plan.out))


def _record(partial: Path, name: str) -> Path:
    return partial / _RECORDS / f"{name}.json"


def _write_item(plan: ConversionPlan, item: ItemPlan, partial: Path) -> None:
    """Saves an item, reads it back, and records its fingerprints and file sizes."""
    place = partial / ITEMS / item.name
    place.parent.mkdir(exist_ok=True)
    for left in place.parent.glob(f"{item.name}*"):
        # What a killed run left of this item; "layers_1*" is also "layers_10": keep recorded ones.
        if left.name.split(".")[0] == item.name:
            shutil.rmtree(left)
    leaves = _read_item(plan, item)
    prints = {path: fingerprint(values) for path, values in leaves.items()}
    save_item(place, leaves, plan.identity["shards"])
    leaves.clear()
    back = restore_item(place, prints)
    for path, expected in prints.items():
        if (got := fingerprint(back[path])) != expected:
            raise WeightsError(partial, [f"{path}: expected {expected}, got {got}"])
    files = sorted(file for file in place.rglob("*") if file.is_file())
    sizes = {str(file.relative_to(place.parent)): file.stat().st_size for file in files}
    write_text(_record(partial, item.name), dump({"leaves": prints, "sizes": sizes}))


def _read_item(plan: ConversionPlan, item: ItemPlan) -> dict[str, np.ndarray]:
    source = plan.source
    if item.name == OWN_HEAD_ITEM:
        return {name: source.files.read(source.stored[name]) for name in source.head.names}
    leaves, faults = {}, []
    for entry in item.leaves:
        values = source.read(entry, _dtype_of(entry, plan.dtype))
        leaves["/".join(entry.leaf.path)] = values
        # A device may take NaN of float8 for a number.
        if entry.leaf.storage is Storage.FP8 and block_scaled.count_nan(values):
            faults += source.nan_faults(entry)
    if faults:
        raise WeightsError(source.files.folder, faults)
    return leaves


def _finish(plan: ConversionPlan, partial: Path) -> None:
    """Small files, sizes, the manifest, and at last the name."""
    records = {item.name: read_json(_record(partial, item.name)) for item in plan.items}
    for name, digest in plan.identity["small_files"].items():
        shutil.copyfile(plan.source.files.folder / name, partial / name)
        if file_digest(partial / name) != digest:
            raise WeightsError(plan.source.files.folder, [f"{name}: changed while converting"])
    sizes = {}
    for record in records.values():
        sizes |= record["sizes"]
    write_text(partial / SIZES, dump(sizes))
    items = {name: record["leaves"] for name, record in records.items()}
    write_text(partial / MANIFEST, dump(plan.identity | {"items": items}))
    partial.rename(plan.out)
    _tidy(plan.out)


def _tidy(folder: Path) -> None:
    """Removes what served the conversion alone; a kill before this leaves it, and nobody minds."""
    shutil.rmtree(folder / _RECORDS, ignore_errors=True)
    for file in (folder / _PLAN, folder / _LOCK, *folder.glob(".*.partial-*")):
        file.unlink(missing_ok=True)
