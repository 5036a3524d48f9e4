"""The k best scores of long rows: block maxima by XLA, then one program a row.

Implements: ops/vocab.py, the selection of `linear_topk`.
Matches when: k <= 128.

The k blocks with the largest maxima (equal maxima: the lower block) hold the k best scores (equal
scores: the lower index), so a program looks at the maxima, and then inside k blocks only. Up to 16
it runs in one warp: every reduction stays in its lanes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, gpu_call, load

BLOCK = 128
LOWEST = np.int32(-(2**31))  # below the key of every score


def supports(k: int) -> bool:
    """Whether the kernel keeps so many."""
    return 0 < k <= BLOCK


def top_k(scores, *, k: int, eligible: int, interpret: bool):
    """The k best of the first `eligible` scores of each row, by score, then by lower index.

    Args:
      scores: [R, N] fp32; from `eligible` on anything. +0 and -0 are equal.
      k: at most eligible. Static.
    Returns:
      scores [R, k] fp32 and their indices [R, k] int32, best first.
    """
    rows, count = scores.shape
    blocks = pl.cdiv(count, BLOCK)
    if blocks * BLOCK != count:
        scores = jnp.pad(scores, ((0, 0), (0, blocks * BLOCK - count)))
    index = jnp.arange(blocks * BLOCK, dtype=jnp.int32)
    keys = jnp.where(index < eligible, key(scores), LOWEST)
    maxima = jnp.max(keys.reshape(rows, blocks, BLOCK), axis=-1)
    return best_of_blocks(scores, maxima, rows=rows, k=k, eligible=eligible, interpret=interpret)


def best_of_blocks(scores, maxima, *, rows, k, eligible, interpret, entries_first=False):
    """The k best of rows whose block maxima are known.

    Args:
      scores: [R, blocks * BLOCK] fp32; from `eligible` on anything.
      maxima: [R, blocks] int32 keys of the eligible scores.
      rows: R.
      entries_first: both come transposed, [blocks * BLOCK, C] and [blocks, C] with C >= R.
    Returns:
      as `top_k`.
    """
    kept = max(16, pl.next_power_of_2(k))
    best = gpu_call(
        _kernel(k, kept, maxima.shape, entries_first, eligible),
        name="top_k",
        out_shape=(
            jax.ShapeDtypeStruct((rows, kept), jnp.float32),
            jax.ShapeDtypeStruct((rows, kept), jnp.int32),
        ),
        grid=(rows,),
        in_specs=[WHOLE] * 2,
        out_specs=(WHOLE,) * 2,
        interpret=interpret,
        num_warps=kept // 16,
    )(scores.reshape(-1), maxima.reshape(-1))
    return tuple(x[:, :k] for x in best)


def _kernel(k: int, kept: int, shape: tuple[int, int], entries_first: bool, eligible: int):
    blocks = shape[0] if entries_first else shape[1]

    def kernel(scores, maxima, best, ids):
        row, slot = pl.program_id(0), jnp.arange(kept, dtype=jnp.int32)

        def place_of(entry, entries):
            return entry * shape[1] + row if entries_first else row * entries + entry

        places = jnp.arange(max(16, pl.next_power_of_2(blocks)), dtype=jnp.int32)
        inside = places < blocks
        highest = load(maxima.at[place_of(places, blocks)], mask=inside, other=LOWEST)

        def choose_block(rank, carry):
            chosen, left = carry
            _, place = first_largest(left, places)
            return jnp.where(slot == rank, place, chosen), jnp.where(
                places == place, LOWEST, left
            )

        # Unused entries name a block past the end: nothing in it is eligible.
        chosen = jnp.full((kept,), blocks, jnp.int32)
        chosen, _ = lax.fori_loop(0, min(k, blocks), choose_block, (chosen, highest))

        offset = jnp.arange(BLOCK, dtype=jnp.int32)
        index = chosen[:, None] * BLOCK + offset[None, :]
        inside = index < eligible
        value = load(scores.at[place_of(index, blocks * BLOCK)], mask=inside, other=0.0)
        value = jnp.where(value == 0.0, 0.0, value)
        keys = jnp.where(inside, key(value), LOWEST)

        def choose(rank, carry):
            found, at, left = carry
            largest, place = first_largest(left, index)
            found = jnp.where(slot == rank, largest, found)
            at = jnp.where(slot == rank, place, at)
            return found, at, jnp.where(index == place, LOWEST, left)

        start = (jnp.zeros((kept,), jnp.int32), jnp.zeros((kept,), jnp.int32), keys)
        found, at, _ = lax.fori_loop(0, k, choose, start)
        best[row, :] = score(found)
        ids[row, :] = at

    return kernel


def first_largest(keys, index):
    """The largest key and the lowest index that has it."""
    largest = jnp.max(keys)
    return largest, jnp.min(jnp.where(keys == largest, index, np.int32(2**31 - 1)))


def key(scores):
    """int32 keys that compare like the scores; -0 counts as +0."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0.0, 0.0, scores), jnp.int32)
    return jnp.where(bits < 0, bits ^ np.int32(2**31 - 1), bits)


def score(keys):
    """The fp32 scores of keys."""
    bits = jnp.where(keys < 0, keys ^ np.int32(2**31 - 1), keys)
    return lax.bitcast_convert_type(bits, jnp.float32)
