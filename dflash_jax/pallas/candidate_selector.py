"""The selector's walk in one launch: only the edges of the candidates that were chosen.

Implements: ops/candidate_selector.py, `select`.
Matches when: candidates and rank are powers of two.

A program walks one row of the batch in one warp. A step reads the codebook row of the token chosen
before, the rows of its candidates, and leaves the law it drew from.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, gpu_call, is_power_of_two

_FAR = np.int32(2**31 - 1)


def supports(num_candidates: int, rank: int) -> bool:
    """Whether the kernel takes lattices of these sizes."""
    return is_power_of_two(num_candidates) and is_power_of_two(rank)


def walk(
    unary, candidates, anchor, query, predecessor, successor, temperature, uniforms, *,
    interpret: bool,
):
    """Args: as in the op. Returns: ranks [B, K] int32, tokens [B, K] int32, q [B, K, C] fp32."""
    batch, positions, num_candidates = candidates.shape
    operands = (unary, candidates, anchor, query, predecessor, successor, temperature, uniforms)
    return gpu_call(
        _kernel,
        name="candidate_selector",
        out_shape=(
            jax.ShapeDtypeStruct((batch, positions), jnp.int32),
            jax.ShapeDtypeStruct((batch, positions), jnp.int32),
            jax.ShapeDtypeStruct((batch, positions, num_candidates), jnp.float32),
        ),
        grid=(batch,),
        in_specs=[WHOLE] * len(operands),
        out_specs=(WHOLE,) * 3,
        interpret=interpret,
        num_warps=1,
    )(*operands)


def _kernel(
    unary, candidates, anchor, query, predecessor, successor, temperature, uniforms,
    ranks, tokens, laws,
):
    row, last_row = pl.program_id(0), predecessor.shape[0] - 1
    rank = jnp.arange(unary.shape[2], dtype=jnp.int32)
    heat = temperature[row]
    greedy = heat <= 0

    def step(position, before):
        left = predecessor[jnp.clip(before, 0, last_row), :].astype(jnp.float32)
        left = left * query[row, position, :].astype(jnp.float32)
        ids = candidates[row, position, :]
        right = successor[jnp.clip(ids, 0, last_row), :].astype(jnp.float32)
        scores = unary[row, position, :] + jnp.sum(left[None, :] * right, axis=1)
        top = jnp.max(scores)
        best = jnp.min(jnp.where(scores == top, rank, _FAR))
        weights = jnp.exp((scores - top) / jnp.where(greedy, 1.0, heat))
        q = weights / jnp.sum(weights)
        positive = q > 0
        reached = (uniforms[row, position] < jnp.cumsum(q)) & positive
        first = jnp.min(jnp.where(reached, rank, _FAR))
        final = jnp.max(jnp.where(positive, rank, 0))
        drawn = jnp.where(first < _FAR, first, final)
        # A lattice of NaN has no maximum; the rank stays one of the lattice all the same.
        chosen = jnp.minimum(jnp.where(greedy, best, drawn), rank.shape[0] - 1)
        token = jnp.sum(jnp.where(rank == chosen, ids, 0))
        ranks[row, position], tokens[row, position] = chosen, token
        laws[row, position, :] = jnp.where(greedy, (rank == chosen).astype(jnp.float32), q)
        return token

    lax.fori_loop(0, unary.shape[1], step, anchor[row])
