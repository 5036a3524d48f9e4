"""A few rows times a float8 matrix with one scale a block, the matrix read once as float8.

Implements: ops/block_scaled_linear.py.
Matches when: at most 128 rows of bfloat16; the inputs divide into steps of 16 or more columns that
lie within one block.

A program owns some rows of the matrix and a share of its columns, and takes one step of columns
after another: float8 values become bfloat16 in registers, which is exact, all rows of x are
multiplied, and the fp32 partial sum is scaled by the block's scale of each matrix row. Shares of
the columns are left to whoever reads them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import (
    WHOLE,
    broadcast,
    dot,
    gpu_call,
    load,
    places,
    shared,
    step_within,
    store,
    widened,
)
from dflash_jax.pallas.tiling import PROCESSORS

MAX_TOKENS = 128
_ENOUGH = 1.8  # programs of a processor that keep its loads in flight
_MOST_SHARES = 32  # each is written and read once more


@dataclass(frozen=True)
class Tiles:
    """Matrix rows of a program, columns of a step, and shares of the columns."""

    rows: int
    step: int
    shares: int
    num_warps: int = 4
    num_stages: int = 4

    @classmethod
    def of(cls, tokens: int, out: int, inner: int, columns: int) -> "Tiles":
        """For `tokens` rows of x and a matrix [out, inner].

        A processor holds few of these programs, so that they come in turns: the cost of a choice is
        that of the busiest processor, in steps, two of which fill and drain a program's loads. Too
        few programs leave memory waiting.
        """
        rows, step = 128 if tokens <= 64 else 64, step_within(inner, (columns,), 128)
        tiles, steps = pl.cdiv(out, rows), inner // step

        def cost(shares: int) -> float:
            programs = tiles * shares
            turns = pl.cdiv(programs, PROCESSORS)
            return turns * (steps / shares + 2) * max(1.0, _ENOUGH * PROCESSORS / programs)

        divisors = [n for n in range(1, min(steps, _MOST_SHARES) + 1) if steps % n == 0]
        return cls(
            rows=rows, step=step, shares=min(divisors, key=cost),
            num_warps=4 if tokens <= 32 else 8,
        )


def supports(tokens: int, dtype, inner: int, columns: int) -> bool:
    """Whether the kernel takes these sizes."""
    fits = 0 < tokens <= MAX_TOKENS and dtype == jnp.bfloat16
    return fits and step_within(inner, (columns,), 16) == 16


@shared("columns", "interpret", "tiles")
def parts(x, kernel, scale, *, columns: int, interpret: bool, tiles: Tiles | None = None):
    """Shares of x times the transposed matrix.

    Args:
      x: [T, in] bf16. kernel: [out, in] float8_e4m3fn.
      scale: [out / rows of a block, ceil(in / columns)] fp32.
    Returns:
      [shares, T, out] fp32; the product is their sum.
    """
    (tokens, inner), out = x.shape, kernel.shape[0]
    tiles = tiles or Tiles.of(tokens, out, inner, columns)
    return gpu_call(
        _kernel(tiles, tokens, out, inner, out // scale.shape[0], columns, interpret),
        name="block_scaled_linear",
        out_shape=jax.ShapeDtypeStruct((tiles.shares, tokens, out), jnp.float32),
        grid=(-(-out // tiles.rows), tiles.shares),
        in_specs=[WHOLE] * 3,
        out_specs=WHOLE,
        interpret=interpret,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(x, kernel, scale)


def _kernel(
    tiles: Tiles, tokens: int, out: int, inner: int, block_rows: int, columns: int, interpret: bool
):
    padded = max(16, pl.next_power_of_2(tokens))
    steps = inner // tiles.step // tiles.shares

    def kernel(x, weights, scale, parts):
        share = pl.program_id(1)
        own = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
        every = jnp.arange(padded, dtype=jnp.int32)
        row = jnp.minimum(own, out - 1)  # rows past the last repeat it and are not stored
        place = jnp.arange(tiles.step, dtype=jnp.int32)
        # Dead rows of x are not read: all programs together read x as often as there are tiles.
        live = places(every, place)[0] < tokens

        def factor_of(first):
            column = jnp.minimum(first, inner - 1) // columns
            return load(scale.at[row // block_rows, jnp.broadcast_to(column, row.shape)])

        def step(index, carry):
            total, factor = carry
            first = (share * steps + index) * tiles.step
            ahead = factor_of(first + tiles.step)  # on its way while this step multiplies
            values = load(weights.at[places(row, first + place)])
            wide = widened(values, x.dtype, interpret=interpret)
            part = load(x.at[places(every, first + place)], mask=live, other=0.0)
            return total + dot(part, wide.T) * factor[None, :], ahead

        empty = jnp.zeros((padded, tiles.rows), jnp.float32)
        start = (empty, factor_of(share * steps * tiles.step))
        total, _ = lax.fori_loop(0, steps, step, start)
        at = places(every, own)
        mask = (at[0] < tokens) & (at[1] < out)
        store(parts.at[broadcast(share, *at)], total, mask=mask)

    return kernel
