"""A product of a few rows with a large matrix, whose rows are the tile's large side.

Implements: ops/skinny_linear.py; linear_topk.py builds on `product`, routing.py on `parts`.
Matches when: any rows of x, in tiles of up to 128; SwiGLU at most 128; Mosaic GPU as in mosaic.py.

Where the matrix has too few tiles for the processors, its shared axis is split and the parts are
added afterwards, by whoever reads them (`skinny_parts`) or by XLA.
"""

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas import mosaic
from dflash_jax.pallas.common import (
    WHOLE,
    broadcast,
    dot,
    gpu_call,
    load,
    places,
    shared,
    store,
)
from dflash_jax.pallas.tiling import PROCESSORS, cut

MAX_TOKENS = 128  # of a tile
MOST_MEASURED = 64  # tokens up to which it was compared with XLA's products
TILE = 64  # matrix rows of the smaller tile
_MANY_ROWS = 12288  # enough for a larger tile a processor in one part or two
_FEW_TOKENS = 16
_LONG = 128  # entries of a long step
_PARTS = (1, 2, 3, 4, 8)
_BEST_PROGRAMS = 260
_LEAST_PROGRAMS = 0.8 * PROCESSORS
_PROGRAMS = 2 * PROCESSORS  # that run at once


@dataclass(frozen=True)
class Tiles:
    """Tokens of a tile, stretch of the shared axis a step, warps, and steps loaded ahead."""

    tokens: int
    step: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, tokens: int, rows: int, dtype) -> "Tiles":
        """For so many tokens and tiles of so many matrix rows."""
        padded = min(MAX_TOKENS, max(16, pl.next_power_of_2(tokens)))
        wide = jnp.dtype(dtype).itemsize > 2
        return cls(
            tokens=padded, step=32 if wide else 64,
            num_warps=8 if rows * padded > 128 * 64 else 4,
            num_stages=2 if wide else 8 if padded <= 32 else 4,
        )


def product(x, matrix, rows, tokens, tiles: Tiles, first_step=0, steps=None):
    """[len(rows), len(tokens)] fp32: the named matrix rows times the named rows of x.

    Numbers past the end read the last row: what they give means nothing. Without first_step and
    steps, the whole shared axis.
    """
    rows = jnp.minimum(rows, matrix.shape[0] - 1)
    tokens = jnp.minimum(tokens, x.shape[0] - 1)
    lane, width = jnp.arange(tiles.step, dtype=jnp.int32), x.shape[1]

    def add(index, total):
        column = (first_step + index) * tiles.step + lane
        left, right = matrix[places(rows, column)], x[places(tokens, column)]
        return total + dot(left, right.T)

    total = jnp.zeros((rows.shape[0], tokens.shape[0]), jnp.float32)
    total = lax.fori_loop(0, width // tiles.step if steps is None else steps, add, total)
    if steps is None and width % tiles.step:
        column = width // tiles.step * tiles.step + lane
        left, right = (
            load(ref.at[at], mask=at[1] < width, other=0.0)
            for ref, at in ((matrix, places(rows, column)), (x, places(tokens, column)))
        )
        total = total + dot(left, right.T)
    return total


@dataclass(frozen=True)
class Plan:
    """Matrix rows of a tile, parts of the shared axis, and the loop over it; turned: the tokens are
    the left side of its products, the side that is to be the larger one."""

    rows: int
    parts: int
    tiles: Tiles
    turned: bool = False

    @classmethod
    def of(cls, tokens: int, rows: int, width: int, dtype) -> "Plan":
        """For [tokens, width] times [rows, width]^T, as measured best on an H200, from 2048 x 4096
        to 16480 x 5120 and 5120 x 25600."""
        tiles = Tiles.of(tokens, 128, dtype)
        if jnp.dtype(dtype).itemsize > 2 or tokens > MOST_MEASURED:
            count, parts = cut(
                rows, width, tokens, step=tiles.step, slots=_PROGRAMS, tiles=(128, TILE)
            )
            return cls(rows=count, parts=parts, tiles=tiles)
        count, parts = _measured(tokens, rows, width)
        programs = pl.cdiv(rows, count) * parts
        # Very few tokens leave room for long steps, and so do programs that all run at once.
        long = width % _LONG == 0 and (tokens <= _FEW_TOKENS or programs <= _PROGRAMS)
        alone = tokens <= _FEW_TOKENS and programs <= PROCESSORS
        tiles = dataclasses.replace(
            tiles, step=_LONG if long else 64, num_stages=3 if long and not alone else 4,
            num_warps=4,
        )
        return cls(rows=count, parts=parts, tiles=tiles)


def _measured(tokens: int, rows: int, width: int) -> tuple[int, int]:
    """Rows of a tile, and parts.

    A large tile halves the reads of x. One a processor is then enough, and every part that is
    spared is one less to write and to add; but one token's sums are better split. Small tiles:
    about two a processor.
    """
    steps = width // _LONG if width % _LONG == 0 else 1
    choices = [n for n in _PARTS if n == 1 or steps % n == 0 and steps >= 2 * n]
    if tokens == 1 or tokens <= _FEW_TOKENS and rows >= _MANY_ROWS:
        programs = pl.cdiv(rows, 2 * TILE)
        enough = [n for n in choices if n > (tokens == 1) and n * programs >= _LEAST_PROGRAMS]
        return 2 * TILE, (enough or choices[-1:])[0]
    programs = pl.cdiv(rows, TILE)
    return TILE, min(choices, key=lambda n: abs(math.log(n * programs / _BEST_PROGRAMS)))


def linear(x, matrix, *, residual=None, out_dtype, interpret: bool, plan: Plan | None = None):
    """[T, rows] out_dtype of x [T, H] and matrix [rows, H], plus residual [T, rows] if given."""
    plan = plan or Plan.of(x.shape[0], *matrix.shape, x.dtype)
    if plan.parts == 1:
        options = dict(plan=plan, out_dtype=out_dtype, interpret=interpret)
        return _products(x, matrix, residual, **options)[0]
    summands = parts(x, matrix, interpret=interpret, plan=plan)
    return plus(jnp.sum(summands, axis=0), residual, out_dtype)


def parts(x, matrix, *, interpret: bool, plan: Plan | None = None, name="skinny_linear"):
    """[parts, T, rows] fp32, whose sum is x times the transposed matrix; name: of the kernel."""
    plan = plan or Plan.of(x.shape[0], *matrix.shape, x.dtype)
    options = dict(plan=plan, out_dtype=jnp.dtype("float32"), interpret=interpret)
    return _products(x, matrix, None, **options, name=name)


@shared("plan", "out_dtype", "interpret", "name")
def _products(
    x, matrix, residual, *, plan: Plan, out_dtype, interpret: bool, name="skinny_linear"
):
    """[parts, T, rows] out_dtype; with a residual, which allows one part only, the sum."""
    (tokens, width), rows, tiles = x.shape, matrix.shape[0], plan.tiles
    steps = width // tiles.step // plan.parts

    def kernel(x, matrix, *refs):
        row, token = _numbers(plan.rows, tiles)
        token += pl.program_id(2) * tiles.tokens
        number = pl.program_id(1)
        part = {} if plan.parts == 1 else dict(first_step=number * steps, steps=steps)
        if plan.turned:
            made = product(matrix, x, token, row, tiles, **part)
        else:
            made = product(x, matrix, row, token, tiles, **part).T
        at = places(token, row)
        mask = (token < tokens)[:, None] & (row < rows)[None, :]
        *residual, out = refs
        if residual:
            before = load(residual[0].at[at], mask=mask, other=0.0)
            made = before.astype(jnp.float32) + made.astype(before.dtype).astype(jnp.float32)
        store(out.at[broadcast(number, *at)], made.astype(out.dtype), mask=mask)

    operands = (x, matrix, *([] if residual is None else [residual]))
    return gpu_call(
        kernel,
        name=name,
        out_shape=jax.ShapeDtypeStruct((plan.parts, tokens, rows), out_dtype),
        grid=(pl.cdiv(rows, plan.rows), plan.parts, pl.cdiv(tokens, tiles.tokens)),
        in_specs=[WHOLE] * len(operands), out_specs=WHOLE, interpret=interpret,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )(*operands)


def swiglu(x, matrix, *, rounded: bool, interpret: bool, tiles=None):
    """[T, rows / 2] in x's dtype: SiLU of the first half's product times the second half's."""
    tokens, inner = x.shape[0], matrix.shape[0] // 2
    tiles = tiles or Tiles.of(tokens, 128, x.dtype)
    count, _ = cut(
        inner, 2 * x.shape[1], tokens, step=tiles.step, slots=_PROGRAMS, tiles=(64, 32),
        split=False,
    )

    def kernel(x, matrix, out):
        row, token = _numbers(count, tiles)
        gate, up = (
            product(x, matrix, jnp.minimum(row, inner - 1) + first, token, tiles)
            for first in (0, inner)
        )
        made = mixed(gate, up, x.dtype if rounded else None)
        mask = (token < tokens)[:, None] & (row < inner)[None, :]
        store(out.at[places(token, row)], made.T.astype(out.dtype), mask=mask)

    return gpu_call(
        kernel,
        name="skinny_swiglu",
        out_shape=jax.ShapeDtypeStruct((tokens, inner), x.dtype),
        grid=(pl.cdiv(inner, count),), in_specs=[WHOLE] * 2, out_specs=WHOLE, interpret=interpret,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )(x, matrix)


def stream_linear(x, matrix, *, residual=None, out_dtype, shape=None):
    """`linear` through Mosaic GPU; XLA adds parts and residual."""
    return plus(_streamed(x, matrix, "skinny_linear", shape).T, residual, out_dtype)


def stream_swiglu(x, matrix, *, rounded: bool, shape=None):
    """`swiglu` through Mosaic GPU; XLA adds parts and mixes the halves."""
    gate, up = jnp.split(_streamed(x, matrix, "skinny_swiglu", shape), 2)
    # Mixed before it is turned, so that XLA does both in one launch.
    return mixed(gate, up, x.dtype if rounded else None).astype(x.dtype).T


def _streamed(x, matrix, name: str, shape):
    """The product [rows, T] fp32."""
    tokens, rows = x.shape[0], matrix.shape[0]
    shape = shape or mosaic.Stream.of(rows, x.shape[1], tokens)
    extent = pl.cdiv(rows, shape.rows) * shape.rows, mosaic.padded_tokens(tokens)

    def epilogue(tile, split, sums, outs):
        outs[0][split, pl.ds(tile * shape.rows, shape.rows), :] = sums

    (parts,) = mosaic.stream(
        x, matrix, name=name, rows=rows, epilogue=epilogue,
        out_type=(jax.ShapeDtypeStruct((shape.splits, *extent), jnp.float32),), shape=shape,
    )
    return jnp.sum(parts, axis=0)[:rows, :tokens]


def mixed(gate, up, dtype=None):
    """SiLU(gate) * up in fp32, of values rounded to dtype first if one is given."""
    if dtype is not None:
        gate, up = (x.astype(dtype).astype(jnp.float32) for x in (gate, up))
    return gate / (1.0 + jnp.exp(-gate)) * up


def plus(product, residual, out_dtype):
    """The fp32 product in out_dtype; it is rounded to the residual's dtype before the two meet."""
    if residual is None:
        return product.astype(out_dtype)
    info = jnp.finfo(residual.dtype)
    rounded = lax.reduce_precision(product, info.nexp, info.nmant)
    return (residual.astype(jnp.float32) + rounded).astype(out_dtype)


def _numbers(count: int, tiles: Tiles):
    """Matrix rows of this program's tile, and tokens."""
    row = pl.program_id(0) * count + jnp.arange(count, dtype=jnp.int32)
    return row, jnp.arange(tiles.tokens, dtype=jnp.int32)
