"""The experts of a few tokens, every active expert read once.

Implements: ops/sparse_moe.py, the expert outputs of `expert_mlp`.
Matches when: at most 128 tokens; hidden and inner are multiples of 16, and float8 blocks have
columns in multiples of 16, or one block a row.

A grid row belongs to one choice (token, rank). It works for its expert if no earlier choice names
the same one, and ends at once otherwise: no sort, no list of active experts. All tokens are the
rows of its products; a row counts where its token chose the expert. Two launches: gate and up with
SwiGLU into [choices, tokens, inner], then down into the rows [token, rank] of the result. Float8
values become x's dtype in registers, and the fp32 sum over each block is scaled.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import (
    WHOLE,
    dot,
    gpu_call,
    load,
    places,
    shared,
    step_within,
    store,
    widened,
)

MAX_TOKENS = 128


@dataclass(frozen=True)
class Tiles:
    """Matrix rows of a program, and the stretch of a product's sum that a step takes."""

    inner: int
    hidden: int
    inner_step: int
    hidden_step: int
    num_warps: int = 4
    num_stages: int = 4

    @classmethod
    def of(cls, rows: int, hidden: int, inner: int, columns=()) -> "Tiles":
        """For `rows` tokens of width `hidden`, experts of width `inner`, and the columns of a block
        of those matrices that have blocks."""
        longest = 128 if rows <= 32 else 64
        return cls(
            inner=step_within(inner, (), 32), hidden=step_within(hidden, (), 128),
            inner_step=step_within(inner, columns, longest),
            hidden_step=step_within(hidden, columns, longest),
        )


def supports(tokens: int, hidden: int, inner: int, columns=()) -> bool:
    """Whether the kernels, here and in sparse_moe_tiles.py, take these sizes; `columns` of a block
    where there are blocks."""
    return tokens > 0 and all(step_within(width, columns, 16) == 16 for width in (hidden, inner))


@shared("interpret", "columns", "tiles")
def expert_outputs(
    x, experts, gate_up, down, *, interpret: bool, scales=(None, None), columns=(0, 0), tiles=None
):
    """What every chosen expert makes of its token.

    Args:
      x: [T, H]. experts: [T, k] int32, distinct within a token.
      gate_up: [E, 2I, H]. down: [E, H, I].
      scales: of gate_up and of down, None or [E, out / rows, ceil(in / columns)] fp32.
      columns: of a block of each, read where there are scales. Static.
    Returns:
      [T, k, H] fp32; the SwiGLU product is rounded to x's dtype.
    """
    (tokens, hidden), k, inner = x.shape, experts.shape[1], down.shape[2]
    rows = max(16, pl.next_power_of_2(tokens))
    used = tuple(c for c, scale in zip(columns, scales, strict=True) if scale is not None)
    tiles = tiles or Tiles.of(rows, hidden, inner, used)
    choices = tokens * k
    common = dict(
        out_specs=WHOLE, interpret=interpret, num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )
    flat = experts.reshape(-1)
    blocks, values = blocks_of(gate_up, scales[0], columns[0])
    mixed = gpu_call(
        _gate_up_kernel(tiles, rows, tokens, inner, blocks, interpret),
        name="sparse_moe_gate_up",
        out_shape=jax.ShapeDtypeStruct((choices, rows, inner), x.dtype),
        grid=(choices, inner // tiles.inner),
        in_specs=[WHOLE] * (3 + len(values)),
        **common,
    )(x, flat, gate_up, *values)
    blocks, values = blocks_of(down, scales[1], columns[1])
    outputs = gpu_call(
        _down_kernel(tiles, rows, tokens, k, blocks, interpret),
        name="sparse_moe_down",
        out_shape=jax.ShapeDtypeStruct((choices, hidden), jnp.float32),
        grid=(choices, hidden // tiles.hidden),
        in_specs=[WHOLE] * (3 + len(values)),
        **common,
    )(mixed, flat, down, *values)
    return outputs.reshape(tokens, k, hidden)


def blocks_of(matrices, scale, columns):
    """Rows and columns of a block and the operands that hold the scales; None and () if dense."""
    if scale is None:
        return None, ()
    return (matrices.shape[1] // scale.shape[1], columns), (scale,)


def product(left, matrices, scale, blocks, at, interpret):
    """left [m, step] times an expert's matrix rows, transposed: [m, rows] fp32.

    at: the expert, the first row, the number of rows, the first column.
    """
    expert, first, count, column = at
    right = matrices[expert, pl.ds(first, count), pl.ds(column, left.shape[1])]
    if blocks is None:
        return dot(left, right.T)
    row = (first + jnp.arange(count, dtype=jnp.int32)) // blocks[0]
    expert, column = (jnp.broadcast_to(i, row.shape) for i in (expert, column // blocks[1]))
    factor = load(scale[0].at[expert, row, column])
    return dot(left, widened(right, left.dtype, interpret=interpret).T) * factor[None, :]


def _gate_up_kernel(tiles: Tiles, rows: int, tokens: int, inner: int, blocks, interpret):
    def kernel(x, experts, gate_up, *scale_and_out):
        *scale, out = scale_and_out
        choice, block = pl.program_id(0), pl.program_id(1)
        expert = experts[choice]
        token = jnp.arange(rows, dtype=jnp.int32)
        columns = jnp.arange(tiles.hidden_step, dtype=jnp.int32)

        @pl.when(_is_first(experts, choice, expert))
        def _():
            def step(index, sums):
                first = index * tiles.hidden_step
                at = places(token, first + columns)
                part = load(x.at[at], mask=at[0] < tokens, other=0.0)
                starts = (start + block * tiles.inner for start in (0, inner))
                gate, up = (
                    product(
                        part, gate_up, scale, blocks, (expert, start, tiles.inner, first), interpret
                    )
                    for start in starts
                )
                return sums[0] + gate, sums[1] + up

            empty = jnp.zeros((rows, tiles.inner), jnp.float32)
            steps = x.shape[1] // tiles.hidden_step
            gate, up = lax.fori_loop(0, steps, step, (empty, empty))
            mixed = gate * jax.nn.sigmoid(gate) * up
            out[choice, :, pl.ds(block * tiles.inner, tiles.inner)] = mixed.astype(out.dtype)

    return kernel


def _down_kernel(tiles: Tiles, rows: int, tokens: int, k: int, blocks, interpret):
    wide = pl.next_power_of_2(k)

    def kernel(mixed, experts, down, *scale_and_out):
        *scale, out = scale_and_out
        choice, block = pl.program_id(0), pl.program_id(1)
        expert = experts[choice]
        token = jnp.arange(rows, dtype=jnp.int32)
        rank = jnp.arange(wide, dtype=jnp.int32)

        @pl.when(_is_first(experts, choice, expert))
        def _():
            def step(index, total):
                first = index * tiles.inner_step
                at = expert, block * tiles.hidden, tiles.hidden, first
                part = mixed[choice, :, pl.ds(first, tiles.inner_step)]
                return total + product(part, down, scale, blocks, at, interpret)

            steps = mixed.shape[2] // tiles.inner_step
            empty = jnp.zeros((rows, tiles.hidden), jnp.float32)
            total = lax.fori_loop(0, steps, step, empty)
            known = (token < tokens)[:, None] & (rank < k)[None, :]
            chosen = load(experts.at[token[:, None] * k + rank[None, :]], mask=known, other=-1)
            named = known & (chosen == expert)
            row = token * k + jnp.sum(jnp.where(named, rank[None, :], 0), axis=1)
            takes = jnp.sum(named.astype(jnp.int32), axis=1) > 0
            column = block * tiles.hidden + jnp.arange(tiles.hidden, dtype=jnp.int32)
            mask = jnp.broadcast_to(takes[:, None], total.shape)
            store(out.at[places(row, column)], total, mask=mask)

    return kernel


def _is_first(experts, choice, expert):
    """Whether no choice before this one names the same expert."""
    count = experts.shape[0]
    index = jnp.arange(max(16, pl.next_power_of_2(count)), dtype=jnp.int32)
    others = load(experts.at[index], mask=index < jnp.minimum(choice, count), other=-1)
    return jnp.sum((others == expert).astype(jnp.int32)) == 0
