"""A converted draft back to its Hugging Face files, bit for bit.

The manifest keeps the headers of the source files as text; the leaves give every tensor its bytes.
A draft whose matrices were rounded by the conversion cannot be written back and is refused.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.config.folder import replacing
from dflash_jax.weights import names
from dflash_jax.weights.converted import MANIFEST, OWN_HEAD_ITEM, ConvertedFolder
from dflash_jax.weights.files import INDEX, WeightsError
from dflash_jax.weights.header import DTYPES
from dflash_jax.weights.hf_draft_config import read_draft_config
from dflash_jax.weights.leaves import PlannedLeaf
from dflash_jax.weights.source import draft_name
from dflash_jax.weights.transforms import VIEWS, Sizes, split_rows


def draft_to_hf(folder: str | Path, out: str | Path, target: TargetConfig) -> None:
    """Writes the files that a converted draft came from; the same bytes.

    Args:
      folder: the converted draft.
      out: a new folder; whole or absent.
      target: the draft's target.
    Raises: ValueError if `out` exists; WeightsError for a damaged folder, or one whose matrices the
      conversion rounded.
    """
    stored, out = ConvertedFolder(folder, "draft"), Path(out)
    if out.exists():
        raise ValueError(f"{out}: expected a new folder, got one that exists")
    if stored.manifest["rounded"]:
        fault = f"{MANIFEST}: expected matrices as in the files, got ones rounded to "
        raise WeightsError(stored.folder, [fault + stored.manifest["dtype"]])
    config = read_draft_config(folder, target)
    headers = _headers(stored)
    where = {
        draft_name(name): (file, entry)
        for file, (_, _, entries) in headers.items()
        for name, entry in entries.items()
    }
    leaves, sizes = names.draft_plan(_with_embedding(config, stored))
    stored.check(leaves, np.dtype(stored.manifest["dtype"]))
    size = sum(entry["bytes"] for entry in stored.manifest["sources"])
    with replacing(out, need_bytes=size) as partial:
        for name in stored.manifest["small_files"]:
            shutil.copyfile(stored.folder / name, partial / name)
        if stored.manifest["index"] is not None:
            (partial / INDEX).write_text(stored.manifest["index"], encoding="utf-8")
        for file, (text, _, _) in headers.items():
            (partial / file).write_bytes(len(text).to_bytes(8, "little") + text)
        for name, values in _tensors(stored, leaves, sizes, frozenset(where)):
            file, entry = where.pop(name)
            with open(partial / file, "r+b") as stream:
                stream.seek(headers[file][1] + entry["data_offsets"][0])
                stream.write(values.astype(DTYPES[entry["dtype"]], copy=False).tobytes())
        if where:
            raise WeightsError(stored.folder, [f"{name}: missing" for name in where])


def _with_embedding(config: DraftConfig, stored: ConvertedFolder) -> DraftConfig:
    return dataclasses.replace(config, own_embedding=stored.has("embedding"))


def _headers(stored: ConvertedFolder) -> dict[str, tuple[bytes, int, dict]]:
    """Text, first byte of the data, and entries of every source file."""
    headers = {}
    for file, text in stored.manifest["headers"].items():
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        raw = text.encode()
        headers[file] = (raw, 8 + len(raw), entries)
    return headers


def _tensors(
    stored: ConvertedFolder, leaves: list[PlannedLeaf], sizes: Sizes, had: frozenset[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """File tensors by canonical name, in the layout that the files had."""
    plans = {leaf.path: leaf for leaf in leaves}
    for path, values in stored.read():
        leaf = plans[path]
        if leaf.copy:
            continue
        layout = next(parts for parts in leaf.layouts if any(part.name in had for part in parts))
        tensors = {part.name: np.empty(part.shape, values.dtype) for part in layout}
        split_rows(values, (VIEWS[part.view](tensors[part.name], sizes) for part in layout))
        yield from tensors.items()
    if OWN_HEAD_ITEM in stored.manifest["items"]:
        yield from stored.read_item(OWN_HEAD_ITEM).items()
