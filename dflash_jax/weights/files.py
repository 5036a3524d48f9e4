"""The safetensors files of a model folder as one read-only table of named tensors.

Opening reads headers only. A tensor is read by plain file reads, never through a mapping, so that
the host holds what was asked for and no more. Source: `checkpoints.md` 2.2 and 4.2 (single files
and sharded ones), `pitfalls.md` J17.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dflash_jax.config import ConfigError
from dflash_jax.config.folder import read_json
from dflash_jax.weights.header import DTYPES, Entry, Header, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightsError(ValueError):
    """Files that do not hold exactly the model's tensors; `faults` lists every fault found."""

    def __init__(self, folder: Path, faults: list[str]):
        self.faults = tuple(dict.fromkeys(faults))
        listing = "".join(f"\n  {fault}" for fault in self.faults)
        super().__init__(f"{folder}: {len(self.faults)} fault(s) in the weights{listing}")


class TensorFiles:
    """Tensors by stored name: `names`, `shape`, `dtype` without reading, `read` for the values.

    faults: what is wrong with the files themselves, for the caller to raise with what it finds:
      shards that the index names but that are absent, damaged or truncated files, index entries
      that lead out of the folder, tensors in two shards, tensors that only the index knows.
    unreadable: names that an index promises and no file holds; a fault of their file already.
    blind: the only file has no header that can be read, so nothing is known of the names.
    headers: the header of each file by its name, sorted.
    derived: names that are computed and in no file: none.
    """

    derived: frozenset[str] = frozenset()

    def __init__(self, folder: str | Path):
        """Reads the header of every file of the folder.

        Raises: WeightsError without files and for an index that cannot be used at all: no JSON
          object, or one that maps no names to files.
        """
        self.folder = Path(folder)
        self.headers: dict[str, Header] = {}
        self._where: dict[str, Entry] = {}
        weight_map, self.faults = _weight_map(self.folder)
        for file in sorted(set(weight_map.values())):
            self._open(file)
        single = weight_map.keys() == {SINGLE}
        ghosts = set() if single else weight_map.keys() - self._where.keys()
        self.blind = single and not self._where and bool(self.faults)
        self.unreadable = frozenset(ghosts)
        self.faults += [
            f"{name}: named by the index, in no shard"
            for name in sorted(ghosts)
            if weight_map[name] in self.headers
        ]

    def _open(self, file: str) -> None:
        if not is_plain(file):
            self.faults.append(f"{INDEX}: expected names of files in the folder, got {file!r}")
            return
        path = self.folder / file
        if not path.is_file():
            self.faults.append(f"{file}: named by the index, absent")
            return
        header = read_header(path)
        self.headers[file] = header
        self.faults += header.faults
        for name, entry in header.entries.items():
            if name in self._where:
                self.faults.append(f"{name}: in two shards")
            self._where[name] = entry

    @property
    def names(self) -> tuple[str, ...]:
        """Stored names, sorted."""
        return tuple(sorted(self._where))

    def shape(self, name: str) -> tuple[int, ...]:
        """Extents, row-major."""
        return self._where[name].shape

    def dtype(self, name: str) -> str:
        """Safetensors' name of the element type, e.g. "BF16"."""
        return self._where[name].dtype

    def num_bytes(self, name: str) -> int:
        """Bytes of the tensor in its file."""
        return self._where[name].num_bytes

    def num_elements(self, name: str) -> int:
        """Elements of the tensor."""
        return self._where[name].size

    def is_sound(self, name: str) -> bool:
        """Whether nothing is wrong with the tensor's file, so that it may be read."""
        return not self.headers[self._where[name].file.name].faults

    def read(self, name: str) -> np.ndarray:
        """The values, in memory of their own.

        Raises: WeightsError if the file has become shorter since it was opened.
        """
        entry = self._where[name]
        values = np.empty(entry.shape, DTYPES[entry.dtype])
        for _ in self._fill(entry, values.reshape(-1)):
            pass
        return values

    def pieces(self, name: str, elements: int) -> Iterator[np.ndarray]:
        """The values in order, flat, at most `elements` at a time; the memory is used again.

        Raises: WeightsError if the file has become shorter since it was opened.
        """
        entry = self._where[name]
        return self._fill(entry, np.empty(min(elements, entry.size), DTYPES[entry.dtype]))

    def _fill(self, entry: Entry, buffer: np.ndarray) -> Iterator[np.ndarray]:
        left = entry.size
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.start)
            while left:
                part = buffer[: min(left, buffer.size)]
                memory, got = memoryview(part.view(np.uint8)), 0
                while got < part.nbytes:
                    count = stream.readinto(memory[got:])
                    if not count:
                        fault = f"{entry.file.name}: became shorter while it was read"
                        raise WeightsError(self.folder, [fault])
                    got += count
                left -= part.size
                yield part


def is_plain(file: str) -> bool:
    """A file name and nothing else: no folder, no parent, no root, no byte a path cannot hold."""
    return file not in ("", ".", "..") and not any(c in file for c in "/\\\0:")


def _weight_map(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Tensor -> file by the index, and faults. A single file wins over an index."""
    if (folder / SINGLE).is_file():
        return {SINGLE: SINGLE}, []
    if not (folder / INDEX).is_file():
        raise WeightsError(folder, [f"{SINGLE}: absent, and no {INDEX}"])
    try:
        weight_map = read_json(folder / INDEX).get("weight_map")
    except ConfigError as error:
        raise WeightsError(folder, [str(error)]) from error
    if not isinstance(weight_map, dict) or not weight_map:
        got = "an empty one" if weight_map == {} else repr(weight_map)
        raise WeightsError(folder, [f"{INDEX}: expected weight_map to be an object, got {got}"])
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            expected = f"weight_map[{name!r}] to be a file name"
            raise WeightsError(folder, [f"{INDEX}: expected {expected}, got {shard!r}"])
    return weight_map, []
