"""The safetensors files of a model folder as one read-only table of named tensors.

Reading maps the file and copies one tensor at a time, so the host never holds a whole model.
Source: `checkpoints.md` 2.2 and 4.2 (single files and sharded ones), `pitfalls.md` J17.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy before safetensors reads
import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_jax.config import ConfigError
from dflash_jax.config.folder import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightsError(ValueError):
    """Files that do not hold exactly the model's tensors; `faults` lists every fault found."""

    def __init__(self, folder: Path, faults: list[str]):
        self.faults = tuple(dict.fromkeys(faults))
        listing = "".join(f"\n  {fault}" for fault in self.faults)
        super().__init__(f"{folder}: {len(self.faults)} fault(s) in the weights{listing}")


class TensorFiles:
    """Tensors by stored name: `names`, `shape`, `dtype` without reading, `read` for the values.

    A context manager; a tensor read stays valid after it closes.
    """

    def __init__(self, folder: str | Path):
        """Opens every file of the folder.

        Raises: WeightsError without files, for an index that is no JSON object or maps no names to
          files, for shards that the index names but that are absent, for a tensor that is in two
          shards or that only the index knows.
        """
        self.folder = Path(folder)
        self._files, self._where = [], {}
        paths, listed, faults = _file_list(self.folder)
        for path in paths:
            if not path.is_file():
                faults.append(f"{path.name}: named by the index, absent")
                continue
            try:
                opened = safe_open(path, framework="numpy")
            except SafetensorError as error:
                faults.append(f"{path.name}: not a safetensors file ({error})")
                continue
            self._files.append(opened.__enter__())
            for name in opened.keys():
                if name in self._where:
                    faults.append(f"{name}: in two shards")
                self._where[name] = opened
        faults += [f"{name}: named by the index, in no shard" for name in listed - set(self._where)]
        if faults:
            self.close()
            raise WeightsError(self.folder, faults)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the files."""
        while self._files:
            self._files.pop().__exit__(None, None, None)

    @property
    def names(self) -> tuple[str, ...]:
        """Stored names, sorted."""
        return tuple(sorted(self._where))

    def shape(self, name: str) -> tuple[int, ...]:
        """Extents, row-major."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Safetensors' name of the element type, e.g. "BF16"."""
        return self._where[name].get_slice(name).get_dtype()

    def read(self, name: str) -> np.ndarray:
        """The values, copied out of the file."""
        return self._where[name].get_tensor(name)


def _file_list(folder: Path) -> tuple[list[Path], set[str], list[str]]:
    """Files to open, the names an index promises, and faults. A single file wins over an index."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE], set(), []
    if not (folder / INDEX).is_file():
        return [], set(), [f"{SINGLE}: absent, and no {INDEX}"]
    try:
        weight_map = read_json(folder / INDEX).get("weight_map")
    except ConfigError as error:
        return [], set(), [str(error)]
    if not isinstance(weight_map, dict) or not weight_map:
        got = "an empty one" if weight_map == {} else repr(weight_map)
        return [], set(), [f"{INDEX}: expected weight_map to be an object, got {got}"]
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            expected = f"weight_map[{name!r}] to be a file name"
            return [], set(), [f"{INDEX}: expected {expected}, got {shard!r}"]
    return [folder / name for name in sorted(set(weight_map.values()))], set(weight_map), []
