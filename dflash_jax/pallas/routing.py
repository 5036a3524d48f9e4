"""The experts of every token and their weights: the router's product, and the choice.

Implements: ops/sparse_moe.py, `route` and `choose_experts`.
Matches when: at most 1024 experts, of which a token takes at most 16; the product: at most 128
tokens, their width a multiple of 16.

The product of a few tokens with few rows is cut along its shared axis, so that every processor
loads a little; the choice adds the parts. There a program owns a token: all its logits are in
registers, and each rank takes the largest key left.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import (
    WHOLE,
    added,
    broadcast,
    dot,
    gpu_call,
    load,
    places,
    shared,
    step_within,
    store,
)
from dflash_jax.pallas.vocab import LOWEST, first_largest, key, score

MAX_EXPERTS, MAX_CHOSEN, MAX_TOKENS = 1024, 16, 128


@dataclass(frozen=True)
class Tiles:
    """Matrix rows of a program of the product, the stretch of the shared axis that a step takes,
    parts of that axis, warps and steps in flight."""

    rows: int
    step: int
    parts: int
    num_warps: int = 4
    num_stages: int = 4

    @classmethod
    def of(cls, width: int) -> "Tiles":
        """More parts multiply sooner, but the choice adds them: 5.6 us together for four parts of
        2048 entries on an H200, 5.8 for eight, 6.5 for sixteen."""
        step = step_within(width, (), 128)
        return cls(rows=16, step=step, parts=step_within(width // step, (), 4))


def supports(experts: int, chosen: int) -> bool:
    """Whether the choice takes so many experts and so many of them a token."""
    return experts <= MAX_EXPERTS and chosen <= MAX_CHOSEN


def supports_product(tokens: int, width: int) -> bool:
    """Whether the product takes so many tokens of this width."""
    return 0 < tokens <= MAX_TOKENS and width % 16 == 0


@shared("interpret", "tiles")
def scores(x, matrix, *, interpret: bool, tiles=None):
    """Args: x [T, H], matrix [E, H]. Returns: [parts, T, E] fp32, whose sum is x times matrix."""
    (tokens, width), count = x.shape, matrix.shape[0]
    tiles = tiles or Tiles.of(width)
    lines, steps = max(16, pl.next_power_of_2(tokens)), width // tiles.step // tiles.parts

    def kernel(x, matrix, out):
        row = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
        token, part = jnp.arange(lines, dtype=jnp.int32), pl.program_id(1)
        lane = jnp.arange(tiles.step, dtype=jnp.int32)

        def add(index, total):
            column = (part * steps + index) * tiles.step + lane
            # Past the end the last row is read, whose product is not stored.
            left = x[places(jnp.minimum(token, tokens - 1), column)]
            right = matrix[places(jnp.minimum(row, count - 1), column)]
            return total + dot(left, right.T)

        total = lax.fori_loop(0, steps, add, jnp.zeros((lines, tiles.rows), jnp.float32))
        at = places(token, row)
        mask = (at[0] < tokens) & (at[1] < count)
        store(out.at[broadcast(part, *at)], total, mask=mask)

    return gpu_call(
        kernel,
        name="router",
        out_shape=jax.ShapeDtypeStruct((tiles.parts, tokens, count), jnp.float32),
        grid=(pl.cdiv(count, tiles.rows), tiles.parts),
        in_specs=[WHOLE] * 2,
        out_specs=WHOLE,
        interpret=interpret,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(x, matrix)


@shared("experts", "chosen", "gated", "interpret")
def route(logits, *, experts: int, chosen: int, gated: bool, interpret: bool):
    """Chooses by the sum of logits [parts, T, >= experts] fp32.

    Returns: ids [T, chosen] int32 and weights fp32; if `gated` also [T] fp32, the sigmoid of the
    column behind the experts'.
    """
    tokens = logits.shape[1]
    shapes = (
        jax.ShapeDtypeStruct((tokens, chosen), jnp.int32),
        jax.ShapeDtypeStruct((tokens, chosen), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )[: 2 + gated]
    return gpu_call(
        _kernel(experts, chosen),
        name="route",
        out_shape=shapes,
        grid=(tokens,),
        in_specs=[WHOLE],
        out_specs=(WHOLE,) * len(shapes),
        interpret=interpret,
        num_warps=1,
    )(logits)


def _kernel(experts: int, chosen: int):
    def kernel(logits, ids, weights, *gate):
        row, slot = pl.program_id(0), jnp.arange(MAX_CHOSEN, dtype=jnp.int32)
        index = jnp.arange(max(16, pl.next_power_of_2(experts)), dtype=jnp.int32)
        inside = index < experts
        values = added(
            load(logits.at[broadcast(part, row, index)], mask=inside, other=0.0)
            for part in range(logits.shape[0])
        )
        left = jnp.where(inside, key(values), LOWEST)
        found, best = (jnp.zeros((MAX_CHOSEN,), jnp.int32) for _ in range(2))
        for rank in range(chosen):
            largest, place = first_largest(left, index)
            found, best = (
                jnp.where(slot == rank, new, old) for new, old in ((place, found), (largest, best))
            )
            left = jnp.where(index == place, LOWEST, left)
        known = slot < chosen
        best = jnp.where(known, score(best), -jnp.inf)
        share = jnp.exp(best - jnp.max(best))
        at = broadcast(row, jnp.where(known, slot, chosen))
        store(ids.at[at], found, mask=known)
        store(weights.at[at], share / jnp.sum(share), mask=known)
        for out in gate:
            own = added(logits[part, row, experts] for part in range(logits.shape[0]))
            out[row] = jax.nn.sigmoid(own)

    return kernel
