"""The experts of every token and their weights, one launch.

Implements: ops/sparse_moe.py, `route`.
Matches when: at most 1024 experts, of which a token takes at most 16.

A program owns a token: all its logits are in registers, and each rank takes the largest key left.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, broadcast, gpu_call, load, shared, store
from dflash_jax.pallas.vocab import LOWEST, first_largest, key

MAX_EXPERTS, MAX_CHOSEN = 1024, 16


def supports(experts: int, chosen: int) -> bool:
    """Whether the kernel takes so many experts and so many of them a token."""
    return experts <= MAX_EXPERTS and chosen <= MAX_CHOSEN


@shared("experts", "chosen", "interpret")
def route(logits, *, experts: int, chosen: int, interpret: bool):
    """Args: logits [T, >= experts] fp32. Returns: ids [T, chosen] int32 and weights fp32."""
    tokens = logits.shape[0]
    return gpu_call(
        _kernel(experts, chosen),
        name="route",
        out_shape=(
            jax.ShapeDtypeStruct((tokens, chosen), jnp.int32),
            jax.ShapeDtypeStruct((tokens, chosen), jnp.float32),
        ),
        grid=(tokens,),
        in_specs=[WHOLE],
        out_specs=(WHOLE,) * 2,
        interpret=interpret,
        num_warps=1,
    )(logits)


def _kernel(experts: int, chosen: int):
    def kernel(logits, ids, weights):
        row, slot = pl.program_id(0), jnp.arange(MAX_CHOSEN, dtype=jnp.int32)
        index = jnp.arange(max(16, pl.next_power_of_2(experts)), dtype=jnp.int32)
        inside = index < experts
        values = load(logits.at[broadcast(row, index)], mask=inside, other=0.0)
        left = jnp.where(inside, key(values), LOWEST)
        found = jnp.zeros((MAX_CHOSEN,), jnp.int32)
        best = jnp.full((MAX_CHOSEN,), -jnp.inf, jnp.float32)
        for rank in range(chosen):
            _, place = first_largest(left, index)
            value = jnp.sum(jnp.where(index == place, values, 0.0))
            found, best = (
                jnp.where(slot == rank, new, old) for new, old in ((place, found), (value, best))
            )
            left = jnp.where(index == place, LOWEST, left)
        share = jnp.exp(best - jnp.max(best))
        known = slot < chosen
        at = broadcast(row, jnp.where(known, slot, chosen))
        store(ids.at[at], found, mask=known)
        store(weights.at[at], share / jnp.sum(share), mask=known)

    return kernel
