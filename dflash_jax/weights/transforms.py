"""How file tensors become fused leaves, and back.

A view names the piece of a file tensor that one leaf uses, as a NumPy view: reading copies out of
it, exporting assigns into it, so both directions share one definition. A leaf is the concatenation
of its pieces in memory order (`fuse_rows`), which covers fused rows, stacked experts and stacked
norms alike. Source: `checkpoints.md` 3 and 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

Sizes = Mapping[str, int]  # symbol -> extent, e.g. {"Hq": 32, "D": 128}


def _whole(tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
    return tensor


def _query(tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Query rows of a target's q_proj [2*Hq*D, H]: per head D query rows, then D gate rows."""
    return tensor.reshape(sizes["Hq"], 2, sizes["D"], -1)[:, 0]


def _gate(tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Gate rows of a target's q_proj."""
    return tensor.reshape(sizes["Hq"], 2, sizes["D"], -1)[:, 1]


def _conv_taps(tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Depthwise kernel [C, 1, kernel] -> [C, kernel], oldest tap first."""
    return tensor[:, 0, :]


def _fused_key(tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Key rows of a fused qkv_proj [(Hq+2*Hkv)*D, H]."""
    start = sizes["Hq"] * sizes["D"]
    return tensor[start : start + sizes["Hkv"] * sizes["D"]]


def _fused_value(tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Value rows of a fused qkv_proj."""
    return tensor[(sizes["Hq"] + sizes["Hkv"]) * sizes["D"] :]


VIEWS: dict[str, Callable[[np.ndarray, Sizes], np.ndarray]] = {
    "whole": _whole,
    "query": _query,
    "gate": _gate,
    "conv_taps": _conv_taps,
    "fused_key": _fused_key,
    "fused_value": _fused_value,
}


def fuse_rows(pieces: Iterable[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Concatenates pieces in memory order into one array, holding one piece at a time.

    Args:
      pieces: arrays whose sizes sum to the size of `shape`; consumed lazily.
      shape: extents of the result.
      dtype: of the result; each piece is cast on its own (bf16 to fp32 is exact).
    Returns:
      A new C-contiguous array that shares no memory with the pieces.
    """
    fused = np.empty(shape, dtype)
    flat, start = fused.reshape(-1), 0
    for piece in pieces:
        flat[start : start + piece.size].reshape(piece.shape)[...] = piece.astype(dtype, copy=False)
        start += piece.size
    if start != flat.size:
        raise AssertionError(f"pieces fill {start} of {flat.size} elements")
    return fused


def split_rows(leaf: np.ndarray, views: Iterable[np.ndarray]) -> None:
    """Inverse of `fuse_rows`: assigns the leaf's elements, in order, into the given views."""
    flat, start = leaf.reshape(-1), 0
    for view in views:
        view[...] = flat[start : start + view.size].reshape(view.shape)
        start += view.size
    if start != flat.size:
        raise AssertionError(f"views take {start} of {flat.size} elements")
