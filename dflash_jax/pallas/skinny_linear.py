"""A product of a few rows with a large matrix, whose rows are the tile's large side.

Implements: ops/skinny_linear.py; linear_topk.py builds on `product`, routing.py on `parts`.
Matches when: any rows of x, in tiles of up to 128; Mosaic GPU as in mosaic.py.

Where the matrix has too few tiles for the processors, its shared axis is split and the parts are
added afterwards, by whoever reads them (`skinny_parts`) or by XLA.
"""

import dataclasses
import functools
import math
import operator
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
FEW_TOKENS = 16  # which leave room for long steps
_LONG = 128  # entries of a long step
_PARTS = (1, 2, 3, 4)
_BEST_PROGRAMS = 260
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

    Both are a whole tile's, or none of them is past the end. Numbers past the end give zeros, and
    load nothing: reads of one row by all of them would meet in one place of the cache. Without
    first_step and steps, the whole shared axis.
    """
    return products(x, matrix, (rows,), tokens, tiles, first_step, steps)[0]


def products(x, matrix, groups, tokens, tiles: Tiles, first_step=0, steps=None):
    """`product` of every group of matrix rows, which share what is loaded of x."""
    lane, width = jnp.arange(tiles.step, dtype=jnp.int32), x.shape[1]

    def piece(ref, numbers, column, inside):
        at = places(numbers, column)
        mask = [] if ref.shape[0] % len(numbers) == 0 else [at[0] < ref.shape[0]]
        mask += [] if inside else [at[1] < width]
        if not mask:
            return ref[at]
        return load(ref.at[at], mask=functools.reduce(operator.and_, mask), other=0.0)

    def add(totals, column, inside):
        left = [piece(matrix, rows, column, inside) for rows in groups]
        right = piece(x, tokens, column, inside)
        return tuple(
            total + dot(rows, right.T) for total, rows in zip(totals, left, strict=True)
        )

    totals = tuple(jnp.zeros((len(rows), len(tokens)), jnp.float32) for rows in groups)
    totals = lax.fori_loop(
        0, width // tiles.step if steps is None else steps,
        lambda index, sums: add(sums, (first_step + index) * tiles.step + lane, True), totals,
    )
    if steps is None and width % tiles.step:
        totals = add(totals, width // tiles.step * tiles.step + lane, False)
    return totals


@dataclass(frozen=True)
class Plan:
    """Matrix rows of a tile, parts of the shared axis, and the loop over it; turned: the tokens are
    the left side of its products, the side that is to be the larger one; together: halves are
    multiplied in one loop over x."""

    rows: int
    parts: int
    tiles: Tiles
    turned: bool = False
    together: bool = False

    @classmethod
    def of(cls, tokens: int, rows: int, width: int, dtype) -> "Plan":
        """For [tokens, width] times [rows, width]^T: about two programs a processor, as measured
        best on an H200, from 2048 x 4096 to 16480 x 5120 and 5120 x 25600. Every part that is
        spared is one less to write and to add. With more tokens, whose programs are larger, parts
        may differ by a step, so that all programs run at once.
        """
        tiles = Tiles.of(tokens, 128, dtype)
        if jnp.dtype(dtype).itemsize > 2 or tokens > MOST_MEASURED:
            count, parts = cut(
                rows, width, tokens, step=tiles.step, slots=_PROGRAMS, tiles=(128, TILE)
            )
            return cls(rows=count, parts=parts, tiles=tiles)
        steps = width // _LONG if width % _LONG == 0 else 1
        few = tokens <= FEW_TOKENS
        choices = [
            n for n in _PARTS if n == 1 or steps >= 2 * n and (steps % n == 0 or not few)
        ]
        programs = {n: n * pl.cdiv(rows, TILE) for n in choices}
        parts = min(choices, key=lambda n: abs(math.log(programs[n] / _BEST_PROGRAMS)))
        # Very few tokens leave room for long steps, and so do programs that all run at once.
        long = width % _LONG == 0 and (few or programs[parts] <= _PROGRAMS)
        deep = not long or few and parts == 1 or programs[parts] <= PROCESSORS
        tiles = dataclasses.replace(
            tiles, step=_LONG if long else 64, num_warps=4, num_stages=4 if deep else 3
        )
        return cls(rows=TILE, parts=parts, tiles=tiles)

    @classmethod
    def of_halves(cls, tokens: int, inner: int, width: int, dtype) -> "Plan":
        """For [tokens, width] times both halves [inner, width]^T, `rows` of each, as measured best
        on an H200 with 2 x 17408 x 5120: very few tokens in a loop for each half. More of them,
        which the cache has to hand to every program, in one loop for both, of small steps, so that
        all programs run at once.
        """
        tiles = Tiles.of(tokens, 128, dtype)
        if jnp.dtype(dtype).itemsize > 2 or tokens > MOST_MEASURED:
            rows, parts = cut(
                inner, 2 * width, tokens, step=tiles.step, slots=_PROGRAMS,
                tiles=(TILE, TILE // 2), split=False,
            )
            return cls(rows=rows, parts=parts, tiles=tiles)
        few = tokens <= FEW_TOKENS
        step, stages = (_LONG, 3) if few and width % _LONG == 0 else (64, 4 if few else 3)
        tiles = dataclasses.replace(tiles, step=step, num_warps=4, num_stages=stages)
        return cls(rows=TILE, parts=1, tiles=tiles, together=not few)


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
    steps = width // tiles.step

    def kernel(x, matrix, *refs):
        row, token = _numbers(plan.rows, tiles)
        token += pl.program_id(2) * tiles.tokens
        number = pl.program_id(1)
        part = {}
        if plan.parts > 1:
            first, end = (i * steps // plan.parts for i in (number, number + 1))
            part = dict(first_step=first, steps=end - first)
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


@shared("rounded", "interpret")
def swiglu(x, matrix, *, rounded: bool, interpret: bool):
    """[T, rows / 2] in x's dtype: SiLU of the first half's product times the second half's."""
    tokens, inner = x.shape[0], matrix.shape[0] // 2
    plan = Plan.of_halves(tokens, inner, x.shape[1], x.dtype)
    tiles = plan.tiles

    def kernel(x, matrix, out):
        row, token = _numbers(plan.rows, tiles)
        token += pl.program_id(1) * tiles.tokens
        halves = [jnp.minimum(row, inner - 1) + first for first in (0, inner)]
        if plan.together:
            gate, up = products(x, matrix, halves, token, tiles)
        else:
            gate, up = (product(x, matrix, half, token, tiles) for half in halves)
        made = mixed(gate, up, x.dtype if rounded else None)
        mask = (token < tokens)[:, None] & (row < inner)[None, :]
        store(out.at[places(token, row)], made.T.astype(out.dtype), mask=mask)

    return gpu_call(
        kernel,
        name="skinny_swiglu",
        out_shape=jax.ShapeDtypeStruct((tokens, inner), x.dtype),
        grid=(pl.cdiv(inner, plan.rows), pl.cdiv(tokens, tiles.tokens)), in_specs=[WHOLE] * 2,
        out_specs=WHOLE, interpret=interpret, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
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
