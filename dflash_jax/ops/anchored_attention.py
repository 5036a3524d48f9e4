"""Grouped-query attention of many blocks to the context of the sequence they were cut from."""

import jax.numpy as jnp

from dflash_jax.ops.attention import (
    Partial,
    attend,
    block_visibility,
    check_block,
    fold_heads,
    merge,
    normalise,
    unfold_heads,
)


def anchored_attention(
    query, block_key, block_value, key, value, frontier, live, *, window, causal, scale
):
    """Attends each block's columns to the context before its anchor and to one another.

    Block r belongs to sequence r // A; column i stands at position p = frontier[r] + i. It sees the
    context position k when k < frontier[r], and with a window when p - k < window; inside the block
    it sees |i - j| < window, with causal=True only j <= i. This is what `sliding_window_attention`
    shows a block over a ring, and `softmax_attention` over pages, at the same frontier.

    Args:                                      (N sequences, A blocks each, W columns, T positions)
      query:       [N*A, W, Hq, D] bf16 or fp32, normed and rotated.
      block_key, block_value: [N*A, W, Hkv, D].
      key, value:  [N, T, Hkv, D], context rows of positions 0..T-1.
      frontier:    [N*A] int32, tokens in each block's context.
      live:        [N*A] int32, block columns that exist, 0..W.
      window:      distance in tokens, or None for a full layer. Static.
      causal:      the layer's flag. Static.
      scale:       score multiplier. Static.
    Returns:
      [N*A, W, Hq, D] in query's dtype; columns >= live are exactly zero.
    Numeric: as the two ops named above. Differentiable in the first five arguments.
    Raises: ValueError for shapes.
    Source: contracts 2 and 5.3.
    """
    rows, width, heads, dim = query.shape
    sequences, tokens, kv_heads, _ = key.shape
    check_block(query, block_key, kv_heads)
    if rows % sequences:
        raise ValueError(f"query: expected a multiple of {sequences} blocks, got {rows}")
    columns, context = jnp.arange(width), jnp.arange(tokens)
    alive = columns[None, :] < live[:, None]

    seen = (context[None, None, :] < frontier[:, None, None]) & alive[:, :, None]
    inside = block_visibility("causal" if causal else "full", rows, width, live)
    if window is not None:
        position = frontier[:, None, None] + columns[None, :, None]
        seen &= position - context[None, None, :] < window
        inside &= (jnp.abs(columns[:, None] - columns[None, :]) < window)[None]

    # All blocks of a sequence are rows of one product with its context.
    joined = rows // sequences * width
    folded = fold_heads(query.reshape(sequences, joined, heads, dim), kv_heads)
    before = attend(
        folded, *(jnp.moveaxis(x, 1, 2) for x in (key, value)),
        seen.reshape(sequences, joined, tokens), scale,
    )
    own = attend(
        fold_heads(query, kv_heads), *(jnp.moveaxis(x, 1, 2) for x in (block_key, block_value)),
        inside, scale,
    )
    mixed = normalise(merge(before, _by_sequence(own, sequences, width)))
    return unfold_heads(mixed, joined).reshape(query.shape).astype(query.dtype)


def _by_sequence(own: Partial, sequences: int, width: int) -> Partial:
    """Partials [N*A, Hkv, G*W, ...] in the row order of a sequence: [N, Hkv, G*(A*W), ...]."""

    def regroup(x):
        rows, kv_heads, grouped = x.shape[:3]
        split = x.reshape(sequences, rows // sequences, kv_heads, grouped // width, width, -1)
        ordered = jnp.moveaxis(split, 1, 3)
        return ordered.reshape(sequences, kv_heads, -1, *x.shape[3:])

    return Partial(
        maximum=regroup(own.maximum), total=regroup(own.total), values=regroup(own.values)
    )
