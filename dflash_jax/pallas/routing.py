"""The experts of every token and their weights: the router's product, and the choice.

Implements: ops/sparse_moe.py, `route` and `choose_experts`.
Matches when: at least one token; the choice: at most 1024 experts, of which a token takes at most
16.

The product of a few tokens with few rows is cut along its shared axis, so that every processor
loads a little; the choice adds the parts. There a program owns a token: all its logits are in
registers, and each rank takes the largest key left.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import (
    WHOLE,
    added,
    broadcast,
    gpu_call,
    load,
    shared,
    step_within,
    store,
)
from dflash_jax.pallas.skinny_linear import MAX_TOKENS, Plan, Tiles, parts
from dflash_jax.pallas.vocab import LOWEST, first_largest, key, score

MAX_EXPERTS, MAX_CHOSEN = 1024, 16


def supports(tokens: int, experts: int, chosen: int) -> bool:
    """Whether the choice takes so many tokens and experts, and so many of them a token."""
    return tokens > 0 and experts <= MAX_EXPERTS and chosen <= MAX_CHOSEN


def scores(x, matrix, *, interpret: bool):
    """Args: x [T, H], matrix [E, H]. Returns: [parts, T, E] fp32, whose sum is x times matrix.

    By the kernel of skinny_linear.py in tiles of few rows. More parts multiply sooner, but the
    choice adds them: 5.6 us together for four parts of 2048 entries on an H200, 5.8 for eight, 6.5
    for sixteen.
    """
    tokens, width = x.shape
    step = max(16, step_within(width, (), 128))
    tiles = Tiles(
        tokens=min(MAX_TOKENS, max(16, pl.next_power_of_2(tokens))), step=step, num_warps=4,
        num_stages=4,
    )
    # What is left of an odd width is masked, which is not done in parts.
    count = 1 if width % step else step_within(width // step, (), 4)
    plan = Plan(rows=16, parts=count, tiles=tiles, turned=True)
    return parts(x, matrix, interpret=interpret, plan=plan, name="router")


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
