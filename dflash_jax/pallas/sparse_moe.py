"""The experts of a few tokens, every active expert read once.

Implements: ops/sparse_moe.py, the expert outputs of `expert_mlp`.
Matches when: at most 128 tokens; hidden and inner are multiples of 16.

A grid row belongs to one choice (token, rank). It works for its expert if no earlier choice names
the same one, and ends at once otherwise: no sort, no list of active experts. All tokens are the
rows of its products; a row counts where its token chose the expert. Two launches: gate and up with
SwiGLU into [choices, tokens, inner], then down into the rows [token, rank] of the result.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, dot, gpu_call, load, store

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
    def of(cls, rows: int, hidden: int, inner: int) -> "Tiles":
        """For `rows` tokens of width `hidden` and experts of width `inner`."""
        longest = 128 if rows <= 32 else 64
        return cls(
            inner=_divisor(inner, 32), hidden=_divisor(hidden, 128),
            inner_step=_divisor(inner, longest), hidden_step=_divisor(hidden, longest),
        )


def supports(tokens: int, hidden: int, inner: int) -> bool:
    """Whether the kernels take these sizes."""
    return 0 < tokens <= MAX_TOKENS and hidden % 16 == 0 and inner % 16 == 0


def expert_outputs(x, experts, gate_up, down, *, interpret: bool, tiles=None):
    """What every chosen expert makes of its token.

    Args:
      x: [T, H]. experts: [T, k] int32, distinct within a token.
      gate_up: [E, 2I, H]. down: [E, H, I].
    Returns:
      [T, k, H] fp32; the SwiGLU product is rounded to x's dtype.
    """
    (tokens, hidden), k, inner = x.shape, experts.shape[1], down.shape[2]
    rows = max(16, pl.next_power_of_2(tokens))
    tiles = tiles or Tiles.of(rows, hidden, inner)
    choices = tokens * k
    shared = dict(interpret=interpret, num_warps=tiles.num_warps, num_stages=tiles.num_stages)
    flat = experts.reshape(-1)
    mixed = gpu_call(
        _gate_up_kernel(tiles, rows, tokens, inner),
        name="sparse_moe_gate_up",
        out_shape=jax.ShapeDtypeStruct((choices, rows, inner), x.dtype),
        grid=(choices, inner // tiles.inner),
        in_specs=[WHOLE] * 3,
        out_specs=WHOLE,
        **shared,
    )(x, flat, gate_up)
    outputs = gpu_call(
        _down_kernel(tiles, rows, tokens, k),
        name="sparse_moe_down",
        out_shape=jax.ShapeDtypeStruct((choices, hidden), jnp.float32),
        grid=(choices, hidden // tiles.hidden),
        in_specs=[WHOLE] * 3,
        out_specs=WHOLE,
        **shared,
    )(mixed, flat, down)
    return outputs.reshape(tokens, k, hidden)


def _gate_up_kernel(tiles: Tiles, rows: int, tokens: int, inner: int):
    def kernel(x, experts, gate_up, out):
        choice, block = pl.program_id(0), pl.program_id(1)
        expert = experts[choice]
        token = jnp.arange(rows, dtype=jnp.int32)
        columns = jnp.arange(tiles.hidden_step, dtype=jnp.int32)

        @pl.when(_is_first(experts, choice, expert))
        def _():
            def step(index, sums):
                first = index * tiles.hidden_step
                at = _places(token, first + columns)
                part = load(x.at[at], mask=at[0] < tokens, other=0.0)
                place = pl.ds(first, tiles.hidden_step)
                gate, up = (
                    gate_up[expert, pl.ds(start + block * tiles.inner, tiles.inner), place]
                    for start in (0, inner)
                )
                return sums[0] + dot(part, gate.T), sums[1] + dot(part, up.T)

            empty = jnp.zeros((rows, tiles.inner), jnp.float32)
            steps = x.shape[1] // tiles.hidden_step
            gate, up = lax.fori_loop(0, steps, step, (empty, empty))
            mixed = gate * jax.nn.sigmoid(gate) * up
            out[choice, :, pl.ds(block * tiles.inner, tiles.inner)] = mixed.astype(out.dtype)

    return kernel


def _down_kernel(tiles: Tiles, rows: int, tokens: int, k: int):
    wide = pl.next_power_of_2(k)

    def kernel(mixed, experts, down, out):
        choice, block = pl.program_id(0), pl.program_id(1)
        expert = experts[choice]
        token = jnp.arange(rows, dtype=jnp.int32)
        rank = jnp.arange(wide, dtype=jnp.int32)

        @pl.when(_is_first(experts, choice, expert))
        def _():
            def step(index, total):
                place = pl.ds(index * tiles.inner_step, tiles.inner_step)
                kernel_rows = pl.ds(block * tiles.hidden, tiles.hidden)
                return total + dot(mixed[choice, :, place], down[expert, kernel_rows, place].T)

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
            store(out.at[_places(row, column)], total, mask=mask)

    return kernel


def _places(rows, columns):
    """Two index arrays [rows, columns] of a rectangle of entries."""
    shape = (rows.shape[0], columns.shape[0])
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def _is_first(experts, choice, expert):
    """Whether no choice before this one names the same expert."""
    count = experts.shape[0]
    index = jnp.arange(max(16, pl.next_power_of_2(count)), dtype=jnp.int32)
    others = load(experts.at[index], mask=index < jnp.minimum(choice, count), other=-1)
    return jnp.sum((others == expert).astype(jnp.int32)) == 0


def _divisor(number: int, most: int) -> int:
    """The largest power of two that divides a number, at most `most`."""
    return min(most, number & -number)
