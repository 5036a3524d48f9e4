"""Dense files seen as block-scaled float8 ones: quantised while they are read.

A scale is a block's largest absolute value / 448, in float32; a value is weight / scale, rounded to
float8_e4m3fn. Blocks are those of the files' own matrices, so the result is what a float8 release
of them with float32 scales would hold, and everything that reads files reads it.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from dflash_jax.weights.block_scaled import FP8_DTYPE, SUFFIX
from dflash_jax.weights.files import TensorFiles, WeightsError

LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)  # 448
# A smaller scale would be a subnormal, which devices take for zero.
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
# Elements quantised at a time, unless one band of blocks has more.
_PIECE = 1 << 24


class QuantisedFiles:
    """`TensorFiles` with some matrices in float8, each with a scale tensor that no file has.

    derived: the names of those scales.
    """

    def __init__(self, files: TensorFiles, matrices: frozenset[str], block: tuple[int, int]):
        """`matrices`: stored names of the tensors [..., out, in]; `block`: its rows and columns."""
        self._files, self._matrices, self._block = files, matrices, block
        self.folder, self.headers, self.faults = files.folder, files.headers, files.faults
        self.unreadable, self.blind = files.unreadable, files.blind
        self.derived = frozenset(name + SUFFIX for name in matrices)
        self._scales: dict[str, np.ndarray] = {}  # of matrices that were read, until they are asked

    @property
    def names(self) -> tuple[str, ...]:
        """Stored names and those of the scales, sorted."""
        return tuple(sorted((*self._files.names, *self.derived)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Extents, row-major."""
        if name not in self.derived:
            return self._files.shape(name)
        *lead, out, inner = self._files.shape(name.removesuffix(SUFFIX))
        return (*lead, -(-out // self._block[0]), -(-inner // self._block[1]))

    def dtype(self, name: str) -> str:
        """Safetensors' name of the element type."""
        if name in self._matrices:
            return FP8_DTYPE
        return "F32" if name in self.derived else self._files.dtype(name)

    def is_sound(self, name: str) -> bool:
        """Whether nothing is wrong with the tensor's file, so that it may be read."""
        return self._files.is_sound(name.removesuffix(SUFFIX) if name in self.derived else name)

    def num_bytes(self, name: str) -> int:
        """Bytes that are read for it."""
        return 0 if name in self.derived else self._files.num_bytes(name)

    def read(self, name: str) -> np.ndarray:
        """The values, in memory of their own; of a scale those that the matrix gave when read.

        Raises: WeightsError if the file has become shorter, or for weights that are not finite.
        """
        if name in self._matrices:
            pieces = list(self._quantised(name))
            return np.concatenate(pieces).reshape(self.shape(name))
        if name not in self.derived:
            return self._files.read(name)
        matrix = name.removesuffix(SUFFIX)
        if matrix not in self._scales:
            for _ in self._quantised(matrix):
                pass
        return self._scales.pop(matrix)

    def pieces(self, name: str, elements: int) -> Iterator[np.ndarray]:
        """The values in order, flat, a piece at a time; see `read`."""
        if name in self._matrices:
            return self._quantised(name)
        return self._files.pieces(name, elements)

    def _quantised(self, name: str) -> Iterator[np.ndarray]:
        """Flat float8 pieces of a matrix; its scales are kept when it is through."""
        *_, out, inner = self._files.shape(name)
        rows = self._block[0]
        # Whole bands of blocks of one matrix, or whole matrices.
        band = max(1, _PIECE // inner // rows) * rows
        if band >= out or self._files.num_elements(name) != out * inner:
            band = max(1, _PIECE // (out * inner)) * out
        scales = []
        for piece in self._files.pieces(name, band * inner):
            height = min(out, piece.size // inner)
            weights = piece.astype(np.float32).reshape(-1, height, inner)
            values, scale = quantise(weights, self._block)
            if not np.isfinite(scale).all():
                fault = f"{name}: expected finite weights to quantise, got others"
                raise WeightsError(self.folder, [fault])
            scales.append(scale.reshape(-1, scale.shape[-1]))
            yield values.reshape(-1)
        self._scales[name] = np.concatenate(scales).reshape(self.shape(name + SUFFIX))


def quantise(weights: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Float8 values and scales of matrices [n, out, in] float32.

    Returns:
      [n, out, in] float8_e4m3fn and [n, ceil(out / rows), ceil(in / columns)] float32; a block of
      zeros has scale one. Weights that are not finite give scales that are not.
    """
    largest = np.abs(weights)
    for axis, extent in ((1, block[0]), (2, block[1])):
        starts = np.arange(0, weights.shape[axis], extent)
        largest = np.maximum.reduceat(largest, starts, axis=axis)
    scale = largest / np.float32(LARGEST)
    scale = np.where(largest == 0, np.float32(1), np.maximum(scale, np.float32(_SMALLEST_SCALE)))
    wide = np.repeat(np.repeat(scale, block[0], axis=1), block[1], axis=2)
    wide = wide[:, : weights.shape[1], : weights.shape[2]]
    with np.errstate(invalid="ignore"):
        values = np.clip(weights / wide, -LARGEST, LARGEST)
        return values.astype(ml_dtypes.float8_e4m3fn), scale
