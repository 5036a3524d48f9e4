"""A head's product with the choice among its rows begun in the epilogue.

Implements: ops/vocab.py, `linear_topk` and `linear_argmax`.
Matches when: at most 128 tokens; Mosaic GPU as in mosaic.py.

Every block of head rows leaves the largest of its eligible scores, so that what follows looks at
few numbers: `best_of_blocks` for the k best, one reduction over blocks for the best. Scores compare
as int32 keys, which order them totally: +0 and -0 are equal and NaN is above infinity.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from dflash_jax.pallas import mosaic, vocab
from dflash_jax.pallas.common import WHOLE, gpu_call, load, store
from dflash_jax.pallas.skinny_linear import MAX_TOKENS, Tiles, product

_FAR = np.int32(2**31 - 1)


def supports(tokens: int) -> bool:
    """Whether the kernels take so many tokens."""
    return 0 < tokens <= MAX_TOKENS


def k_best(hidden, head, *, k: int, eligible: int, interpret: bool):
    """The k best of the first `eligible` rows of a head.

    Args:
      hidden: [T, H]. head: [rows, H], the same dtype.
    Returns:
      scores [T, k] fp32 and rows [T, k] int32, best first, equal scores by lower row.
    """
    tokens, blocks = hidden.shape[0], pl.cdiv(eligible, vocab.BLOCK)
    tiles = Tiles.of(tokens, vocab.BLOCK, hidden.dtype)

    def kernel(hidden, head, scores, maxima):
        row, token, sums = _block(hidden, head, tiles)
        keys = jnp.where((row < eligible)[:, None], vocab.key(sums), vocab.LOWEST)
        known = token < tokens
        place = token[None, :] * (blocks * vocab.BLOCK) + row[:, None]
        store(scores.at[place], sums, mask=jnp.broadcast_to(known[None, :], sums.shape))
        block = token * blocks + pl.program_id(0)
        store(maxima.at[block], jnp.max(keys, axis=0), mask=known)

    scores, maxima = gpu_call(
        kernel,
        name="linear_topk",
        out_shape=(
            jax.ShapeDtypeStruct((tokens * blocks * vocab.BLOCK,), jnp.float32),
            jax.ShapeDtypeStruct((tokens * blocks,), jnp.int32),
        ),
        grid=(blocks,), in_specs=[WHOLE] * 2, out_specs=(WHOLE,) * 2, interpret=interpret,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )(hidden, head)
    return vocab.best_of_blocks(
        scores, maxima.reshape(tokens, blocks), rows=tokens, k=k, eligible=eligible,
        interpret=interpret,
    )


def lowest_maximum(hidden, head, *, eligible: int, logits_dtype, interpret: bool):
    """The lowest of the first `eligible` rows whose rounded score is the largest, [T] int32."""
    tokens, blocks = hidden.shape[0], pl.cdiv(eligible, vocab.BLOCK)
    tiles = Tiles.of(tokens, vocab.BLOCK, hidden.dtype)

    def kernel(hidden, head, maxima, places):
        row, token, sums = _block(hidden, head, tiles)
        best, place = _best_rounded(sums, row[:, None], eligible, logits_dtype)
        block, known = token * blocks + pl.program_id(0), token < tokens
        store(maxima.at[block], best, mask=known)
        store(places.at[block], place, mask=known)

    found = gpu_call(
        kernel,
        name="linear_argmax",
        out_shape=(jax.ShapeDtypeStruct((tokens * blocks,), jnp.int32),) * 2,
        grid=(blocks,), in_specs=[WHOLE] * 2, out_specs=(WHOLE,) * 2, interpret=interpret,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )(hidden, head)
    keys, places = (x.reshape(tokens, blocks) for x in found)
    return _first_best(keys, places, rows=tokens, interpret=interpret)


def stream_k_best(hidden, head, *, k: int, eligible: int, shape=None):
    """`k_best` through Mosaic GPU."""
    tokens, blocks = hidden.shape[0], pl.cdiv(eligible, vocab.BLOCK)
    columns = mosaic.padded_tokens(tokens)

    def epilogue(tile, split, sums, outs):
        del split
        scores, maxima = outs
        first = tile * vocab.BLOCK
        row = first + jax.lax.broadcasted_iota(jnp.int32, sums.shape, 0)
        scores[pl.ds(first, vocab.BLOCK), :] = sums
        keys = jnp.where(row < eligible, vocab.key(sums), vocab.LOWEST)
        maxima[tile, :] = jnp.max(keys, axis=0)

    scores, maxima = _stream(
        hidden, head, "linear_topk", eligible, epilogue,
        (
            jax.ShapeDtypeStruct((blocks * vocab.BLOCK, columns), jnp.float32),
            jax.ShapeDtypeStruct((blocks, columns), jnp.int32),
        ), shape,
    )
    return vocab.best_of_blocks(
        scores, maxima, rows=tokens, k=k, eligible=eligible, interpret=False, entries_first=True
    )


def stream_lowest_maximum(hidden, head, *, eligible: int, logits_dtype, shape=None):
    """`lowest_maximum` through Mosaic GPU."""
    blocks, columns = pl.cdiv(eligible, vocab.BLOCK), mosaic.padded_tokens(hidden.shape[0])

    def epilogue(tile, split, sums, outs):
        del split
        row = tile * vocab.BLOCK + jax.lax.broadcasted_iota(jnp.int32, sums.shape, 0)
        best, place = _best_rounded(sums, row, eligible, logits_dtype)
        outs[0][tile, :] = best
        outs[1][tile, :] = place

    found = _stream(
        hidden, head, "linear_argmax", eligible, epilogue,
        (jax.ShapeDtypeStruct((blocks, columns), jnp.int32),) * 2, shape,
    )
    return _first_best(*found, rows=hidden.shape[0], interpret=False, entries_first=True)


def _stream(hidden, head, name, eligible, epilogue, out_type, shape):
    shape = shape or mosaic.Stream.of(
        eligible, hidden.shape[1], hidden.shape[0], tile=vocab.BLOCK
    )
    return mosaic.stream(
        hidden, head, name=name, rows=eligible, epilogue=epilogue, out_type=out_type, shape=shape
    )


def _block(hidden, head, tiles: Tiles):
    """Row numbers, token numbers and scores of this program's block of a head."""
    row = pl.program_id(0) * vocab.BLOCK + jnp.arange(vocab.BLOCK, dtype=jnp.int32)
    token = jnp.arange(tiles.tokens, dtype=jnp.int32)
    return row, token, product(hidden, head, row, token, tiles)


def _best_rounded(sums, row, eligible: int, dtype):
    """Per token the key of the largest rounded score of a block, and the lowest row that has it."""
    rounded = sums.astype(dtype).astype(jnp.float32)
    keys = jnp.where(rounded != rounded, _FAR, vocab.key(rounded))
    keys = jnp.where(row < eligible, keys, vocab.LOWEST)
    best = jnp.max(keys, axis=0)
    # Not best[None]: Mosaic GPU of jax 0.10.2 finds no layout for the reshape.
    above = jax.lax.broadcast_in_dim(best, keys.shape, (1,))
    return best, jnp.min(jnp.where(keys == above, row, _FAR), axis=0)


def _first_best(keys, places, *, rows: int, interpret: bool, entries_first: bool = False):
    """Per row the place of the largest key, the first block among equals, [rows] int32.

    keys, places: [rows, blocks], or with entries_first [blocks, C], C >= rows.
    """
    shape = keys.shape
    blocks = shape[0] if entries_first else shape[1]

    def kernel(keys, places, best):
        row = pl.program_id(0)
        block = jnp.arange(max(16, pl.next_power_of_2(blocks)), dtype=jnp.int32)
        at = block * shape[1] + row if entries_first else row * blocks + block
        inside = block < blocks
        key = load(keys.at[at], mask=inside, other=vocab.LOWEST)
        place = load(places.at[at], mask=inside, other=_FAR)
        best[row] = jnp.min(jnp.where(key == jnp.max(key), place, _FAR))

    return gpu_call(
        kernel,
        name="linear_argmax_join",
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows,), in_specs=[WHOLE] * 2, out_specs=WHOLE, interpret=interpret, num_warps=2,
    )(keys.reshape(-1), places.reshape(-1))
