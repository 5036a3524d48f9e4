"""Converted weights: the library's fused leaves in orbax checkpoints under a manifest of our own.

A folder holds the model's small files as they were (config.json, tokenizer), `manifest.json`,
`sizes.json`, and `items/NAME`, one orbax checkpoint a layer and one each for what is beside them
(`item_of`). The manifest is written last and says which leaves there are, their shapes, dtypes and
SHA-256, and where they came from; it holds no times, so equal sources give equal manifests.
`sizes.json` has the bytes of every file under `items`, whose names orbax draws at random.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from dflash_jax.config import ConfigError, Fp8Config, TargetConfig
from dflash_jax.config.folder import read_json
from dflash_jax.weights.files import WeightsError, is_plain
from dflash_jax.weights.header import DTYPES
from dflash_jax.weights.leaves import PlannedLeaf, Storage

FORMAT = "dflash_jax weights 1"
LIBRARY = "dflash_jax 0.1.0"  # who wrote it; the version of pyproject.toml
MANIFEST, SIZES, ITEMS = "manifest.json", "sizes.json", "items"
OWN_HEAD_ITEM = "own_head"  # a draft's own head and id map, by canonical name, as stored
# Bytes of one chunk of a leaf on disk. The most bounds what orbax holds beside the leaves; smaller
# ones than the least are slow.
CHUNK, SMALLEST_CHUNK = 64 << 20, 1 << 20


def is_converted(folder: str | Path) -> bool:
    """Whether a folder holds converted weights rather than Hugging Face files."""
    manifest = Path(folder) / MANIFEST
    return manifest.is_file() and (Path(folder) / ITEMS).is_dir()


def item_of(path: tuple[str, ...]) -> str:
    """The item that holds a leaf: its layer's, "embedding", "context", or "head" with the rest."""
    first = path[0]
    alone = first.startswith("layers_") or first in ("embedding", "context")
    return first if alone else "head"


def fingerprint(values: np.ndarray) -> dict:
    """What the manifest says of a leaf: shape, dtype, and SHA-256 of its bytes in C order."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    digest = hashlib.sha256(memoryview(flat)).hexdigest()
    return {"shape": list(values.shape), "dtype": str(values.dtype), "sha256": digest}


def save_item(folder: Path, leaves: dict[str, np.ndarray], shards: int = 1) -> None:
    """Writes one item; `leaves` by path, joined with "/". Whole or absent: orbax renames it.

    Args:
      shards: chunks, at least, in which a leaf lies that has a MiB for each.
    """
    args = {
        name: ocp.SaveArgs(
            chunk_byte_size=min(CHUNK, max(SMALLEST_CHUNK, values.nbytes // shards))
        )
        for name, values in leaves.items()
    }
    tree = {name: values.view(_Uncopied) for name, values in leaves.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree, save_args=args))


class _Uncopied(np.ndarray):
    """An array that orbax writes from where it is: it copies arrays against changes while it works,
    which would be a second item in memory, and nothing changes these."""

    def __deepcopy__(self, memo: dict) -> _Uncopied:
        return self


def restore_item(folder: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Reads one item into host memory, by path.

    Raises: WeightsError naming the item if it is absent or damaged.
    """
    args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(
                folder.absolute(), args=ocp.args.PyTreeRestore(restore_args=args)
            )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise WeightsError(folder.parent.parent, [f"{folder.name}: damaged ({error})"]) from error


class ConvertedFolder:
    """An opened folder: `manifest` parsed; nothing but the small files was read."""

    def __init__(self, folder: str | Path, kind: str):
        """Opens a folder of a "target" or a "draft".

        Raises: WeightsError for a manifest that is none, or of another format or kind.
        """
        self.folder, self.kind = Path(folder), kind
        try:
            self.manifest = read_json(self.folder / MANIFEST)
        except ConfigError as error:
            raise WeightsError(self.folder, [str(error)]) from error
        faults = []
        for key, expected in (("format", FORMAT), ("kind", kind)):
            if (got := self.manifest.get(key)) != expected:
                faults.append(f"{MANIFEST}: {key}: expected {expected!r}, got {got!r}")
        keys = ("items", "small_files", "dtype", "rounded")
        faults += [
            f"{MANIFEST}: {key}: expected a value, got none"
            for key in keys
            if self.manifest.get(key) is None
        ]
        for key in ("items", "small_files", "headers"):
            named = self.manifest.get(key) or {}
            if not isinstance(named, dict) or not all(map(is_plain, named)):
                faults.append(f"{MANIFEST}: {key}: expected names of files in the folder")
        if not faults:
            faults += _entry_faults(self.manifest)
        if faults:
            raise WeightsError(self.folder, faults)

    def check(self, leaves: list[PlannedLeaf], param_dtype: np.dtype) -> None:
        """Raises WeightsError listing every difference between plan, manifest and files.

        Args:
          leaves: every leaf of the model, an own head excepted.
          param_dtype: in which matrices will be used.
        """
        faults = [*self._file_faults(), *self._leaf_faults(leaves)]
        stored = np.dtype(self.manifest["dtype"])
        if self.manifest["rounded"] and np.dtype(param_dtype).itemsize > stored.itemsize:
            faults.append(
                f"{MANIFEST}: dtype: expected {np.dtype(param_dtype)}, got {stored}, to which the "
                "conversion rounded; convert again or load in that dtype"
            )
        if faults:
            raise WeightsError(self.folder, faults)

    def with_fp8(self, config: TargetConfig) -> TargetConfig:
        """A target's config with the block-scaled matrices that the manifest states.

        Raises: WeightsError if it states something else there.
        """
        try:
            # Folders from before there was float8 do not have the key.
            stated = self.manifest["geometry"].get("fp8")
            if stated is None:
                return config
            layers = tuple(map(tuple, stated["layers"]))
            fp8 = Fp8Config(**{**stated, "layers": layers})
            return dataclasses.replace(config, fp8=fp8)
        except (ConfigError, TypeError, KeyError, AttributeError) as error:
            raise WeightsError(self.folder, [f"{MANIFEST}: geometry: fp8: {error}"]) from error

    def has(self, path: str) -> bool:
        """Whether a leaf is stored, an own head excepted."""
        items = self.manifest["items"].items()
        return any(path in leaves for item, leaves in items if item != OWN_HEAD_ITEM)

    def check_causality(self, flags: tuple[bool, ...]) -> None:
        """Raises WeightsError unless the flags are those that the conversion resolved."""
        stated = self.manifest.get("causality", {})
        if stated.get("flags") != list(flags):
            fault = f"{MANIFEST}: causality: expected {list(flags)} as config.json says, got "
            raise WeightsError(self.folder, [fault + str(stated)])

    def read(self) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
        """Path and values of every leaf, item after item; one item is held at a time.

        Raises: WeightsError for an item that is damaged.
        """
        for item, leaves in self.manifest["items"].items():
            if item == OWN_HEAD_ITEM:
                continue
            values = self.read_item(item)
            for path in leaves:
                yield tuple(path.split("/")), values.pop(path)

    def read_item(self, item: str) -> dict[str, np.ndarray]:
        """The leaves of one item by path, compared with the manifest in shape and dtype."""
        expected = self.manifest["items"][item]
        values = restore_item(self.folder / ITEMS / item, expected)
        for path, stated in expected.items():
            got = values[path]
            if list(got.shape) != stated["shape"] or str(got.dtype) != stated["dtype"]:
                fault = f"{path}: expected {stated}, got {got.dtype} {got.shape}"
                raise WeightsError(self.folder, [fault])
        return values

    def own_head(self) -> StoredTensors | None:
        """A draft's own head with its maps, or None."""
        if OWN_HEAD_ITEM not in self.manifest["items"]:
            return None
        return StoredTensors(self.read_item(OWN_HEAD_ITEM))

    def _file_faults(self) -> Iterator[str]:
        for name, digest in self.manifest["small_files"].items():
            file = self.folder / name
            if not file.is_file():
                yield f"{name}: absent"
            elif file_digest(file) != digest:
                yield f"{name}: changed since the conversion"
        try:
            sizes = read_json(self.folder / SIZES)
        except ConfigError as error:
            yield str(error)
            return
        for name, size in sizes.items():
            file = self.folder / ITEMS / name
            if not file.is_file():
                yield f"{ITEMS}/{name}: absent"
            elif (got := file.stat().st_size) != size:
                yield f"{ITEMS}/{name}: expected {size} bytes, got {got}"

    def _leaf_faults(self, leaves: list[PlannedLeaf]) -> Iterator[str]:
        stored = {
            path: (item, stated)
            for item, entries in self.manifest["items"].items()
            if item != OWN_HEAD_ITEM
            for path, stated in entries.items()
        }
        for leaf in leaves:
            path = "/".join(leaf.path)
            item, stated = stored.pop(path, (None, None))
            if stated is None:
                yield f"{path}: missing"
                continue
            dtype = {
                Storage.MATRIX: self.manifest["dtype"], Storage.FP8: "float8_e4m3fn"
            }.get(leaf.storage, "float32")  # fmt: skip
            expected, got = ([*leaf.shape], dtype), (stated["shape"], stated["dtype"])
            if got != expected:
                yield f"{path}: expected {expected}, got {got}"
            if item != item_of(leaf.path):
                yield f"{path}: expected in item {item_of(leaf.path)}, got {item}"
        yield from (f"{path}: unmapped, no parameter takes it" for path in stored)


def _entry_faults(manifest: dict) -> Iterator[str]:
    """What is not as the loader reads it below the manifest's first level."""
    if (dtype := manifest["dtype"]) not in (known := [*map(str, DTYPES.values())]):
        yield f"{MANIFEST}: dtype: expected one of {known}, got {dtype!r}"
    for key in ("causality", "geometry"):
        if not isinstance(manifest.get(key, {}), dict):
            yield f"{MANIFEST}: {key}: expected an object, got {manifest[key]!r}"
    for item, leaves in manifest["items"].items():
        entries = leaves.values() if isinstance(leaves, dict) else [None]
        if not all(isinstance(e, dict) and {"shape", "dtype"} <= e.keys() for e in entries):
            yield f"{MANIFEST}: items: {item}: expected shape and dtype of each leaf"


class StoredTensors:
    """Tensors in memory with the interface of `TensorFiles` that proposal heads need."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self._tensors = tensors
        self.names = tuple(sorted(tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Extents, row-major."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """Safetensors' name of the element type."""
        wanted = self._tensors[name].dtype
        return next(text for text, dtype in DTYPES.items() if dtype == wanted)

    def is_sound(self, name: str) -> bool:
        """Always: they have been read."""
        return True

    def read(self, name: str) -> np.ndarray:
        """The values."""
        return self._tensors[name]


def file_digest(file: Path) -> str:
    """SHA-256 of a small file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def dump(content: dict) -> str:
    """The text of a manifest or record: sorted nowhere, so that order is the writer's."""
    return json.dumps(content, indent=1) + "\n"
