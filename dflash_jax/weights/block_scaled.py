"""Block-scaled float8 targets: which matrices the files hold so, and the plan of their scales.

In a file X.weight is F8_E4M3 and X.weight_scale_inv has one scale a block; fused experts have a
bare name and the same suffix. The tensors decide, matrix by matrix. A leaf joins tensors whose rows
need not end with a block, so its own blocks have gcd(block rows, rows of every piece) rows: those
of official releases keep 128. Source: `checkpoints.md` 4.3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from dflash_jax.config import ConfigError, Fp8Config, TargetConfig
from dflash_jax.config.rules import is_int
from dflash_jax.weights.keys import subsection
from dflash_jax.weights.leaves import Blocks, PlannedLeaf, PlannedPart, Storage
from dflash_jax.weights.transforms import VIEWS, Sizes

SUFFIX = "_scale_inv"
FP8_DTYPE = "F8_E4M3"
DEFAULT_BLOCK = (128, 128)
_NAN = np.uint8(0x7F)  # of either sign
_PIECE = 1 << 24  # elements looked at together
_BY_HEAD = ("query", "gate")
# The last parts of the delta net's in_proj, a and b: beside float8 ones they are a leaf alone.
_GATES = 2


def stated_block(raw: Mapping) -> tuple[int, int]:
    """Rows and columns of a block by a parsed config.json; 128 x 128 where it does not say.

    Raises: ConfigError for anything but two positive integers.
    """
    section = subsection(raw, "quantization_config") or {}
    block = section.get("weight_block_size")
    if block is None:
        return DEFAULT_BLOCK
    legal = isinstance(block, list) and len(block) == 2
    if not legal or not all(is_int(extent) and extent > 0 for extent in block):
        expected = "two positive integers"
        raise ConfigError(f"weight_block_size: expected {expected}, got {block!r}")
    return tuple(block)


def scaled_matrices(
    leaves: list[PlannedLeaf], config: TargetConfig, dtypes: Mapping[str, str]
) -> tuple[tuple[str, ...], ...]:
    """Per layer, the matrices of which the files hold a part in float8.

    Args:
      leaves: the plan of the dense target.
      dtypes: safetensors' dtype by canonical name.
    """
    by_path = {leaf.path: leaf for leaf in leaves}
    found = []
    for layer in range(config.num_layers):
        found.append(
            tuple(
                matrix
                for matrix in config.scalable(layer)
                if any(dtypes.get(name) == FP8_DTYPE for name in _names(by_path, layer, matrix))
            )
        )
    return tuple(found)


def scalable_parts(leaves: list[PlannedLeaf], config: TargetConfig) -> Iterator[str]:
    """Canonical names of the file tensors of every matrix that may be block-scaled."""
    by_path = {leaf.path: leaf for leaf in leaves}
    for layer in range(config.num_layers):
        for matrix in config.scalable(layer):
            yield from _names(by_path, layer, matrix)


def scaled_plan(
    leaves: list[PlannedLeaf], sizes: Sizes, config: TargetConfig
) -> list[PlannedLeaf]:
    """The plan of a dense target with the leaves of `config.fp8` in float8, each with its scale."""
    if config.fp8 is None:
        return leaves
    scaled = {
        _path(layer, matrix)
        for layer, matrices in enumerate(config.fp8.layers)
        for matrix in matrices
    }
    planned = []
    for leaf in leaves:
        if leaf.path in scaled:
            planned += _scaled(leaf, sizes, config.fp8)
        else:
            planned.append(leaf)
    return planned


def scale_rows(values: np.ndarray, part: PlannedPart, sizes: Sizes) -> np.ndarray:
    """The scales that a part gives to its leaf, from those in the file."""
    blocks = part.blocks
    rows = np.repeat(values, blocks.repeat, axis=-2)[..., : blocks.rows, :]
    return VIEWS[part.view](rows, {**sizes, "D": blocks.head})


def count_nan(values: np.ndarray) -> int:
    """Values of a float8_e4m3fn array that are not numbers; it has no infinities."""
    flat = values.reshape(-1).view(np.uint8)
    pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
    return sum(int(((piece & _NAN) == _NAN).sum()) for piece in pieces)


def _path(layer: int, matrix: str) -> tuple[str, ...]:
    """Where the matrix is; experts are leaves by themselves, others the kernel of a module."""
    experts = matrix in ("moe/gate_up", "moe/down")
    return (f"layers_{layer}", *matrix.split("/"), *(() if experts else ("kernel",)))


def _names(by_path: dict, layer: int, matrix: str) -> list[str]:
    layouts = by_path[_path(layer, matrix)].layouts
    return [part.name for layout in map(_wide, layouts) for part in layout]


def _wide(layout: tuple[PlannedPart, ...]) -> tuple[PlannedPart, ...]:
    """The parts that may be float8: all but a and b rows."""
    return layout[:-_GATES] if _is_in_proj(layout) else layout


def _is_in_proj(layout: tuple[PlannedPart, ...]) -> bool:
    return layout[0].name.endswith("in_proj_qkv.weight")


def _scaled(leaf: PlannedLeaf, sizes: Sizes, fp8: Fp8Config) -> list[PlannedLeaf]:
    """The float8 leaf and its scale; of the delta net's in_proj also the dense rows a and b."""
    beside = []
    if _is_in_proj(leaf.layouts[0]):
        gates = leaf.layouts[0][-_GATES:]
        rows = sum(part.shape[0] for part in gates)
        path = (*leaf.path[:-2], "gates", "kernel")
        shape = (rows, leaf.shape[1])
        beside = [dataclasses.replace(leaf, path=path, shape=shape, layouts=(gates,))]
        leaf = dataclasses.replace(
            leaf, shape=(leaf.shape[0] - rows, leaf.shape[1]),
            layouts=tuple(map(_wide, leaf.layouts)),
        )  # fmt: skip
    pieces = {
        sizes["D"] if part.view in _BY_HEAD else part.shape[-2]
        for layout in leaf.layouts
        for part in layout
    }
    rows = math.gcd(fp8.block_rows, leaf.shape[-2], *pieces)
    columns = -(-leaf.shape[-1] // fp8.block_columns)
    *stem, last = leaf.path
    scale = PlannedLeaf(
        path=(*stem, "scale" if last == "kernel" else f"{last}_scale"),
        shape=(*leaf.shape[:-2], leaf.shape[-2] // rows, columns),
        layouts=tuple(
            tuple(_scale_part(part, fp8, rows, sizes) for part in layout)
            for layout in leaf.layouts
        ),
        storage=Storage.SCALE,
        copy=False,
    )
    return [dataclasses.replace(leaf, storage=Storage.FP8), scale, *beside]


def _scale_part(part: PlannedPart, fp8: Fp8Config, rows: int, sizes: Sizes) -> PlannedPart:
    *lead, out, inner = part.shape
    shape = (*lead, -(-out // fp8.block_rows), -(-inner // fp8.block_columns))
    head = sizes["D"] // rows if part.view in _BY_HEAD else 0
    blocks = Blocks(repeat=fp8.block_rows // rows, rows=out // rows, head=head)
    return PlannedPart(part.name + SUFFIX, shape, part.view, blocks)
