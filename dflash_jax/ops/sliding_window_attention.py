"""Grouped-query attention over a ring of context and the block's own columns, inside a window."""

import jax.numpy as jnp

from dflash_jax.ops.attention import (
    attend,
    attention_form,
    block_visibility,
    check_block,
    fold_heads,
    merge,
    normalise,
    unfold_heads,
)
from dflash_jax.pallas import sliding_window_attention as kernel


def sliding_window_attention(
    query, block_key, block_value, ring_key, ring_value, slot, frontier, live, *,
    window, causal, scale, implementation="auto",
):
    """Attends the block's columns to a ring of context and to one another.

    Column i has position p = frontier + i and sees the key at position k when abs(k - p) < window;
    with causal=True also k <= p is required.

    Args:                                                                  (B rows, W columns)
      query:       [B, W, Hq, D] bf16 or fp32, normed and rotated.
      block_key, block_value: [B, W, Hkv, D], positions frontier + 0..W-1.
      ring_key, ring_value: [slots, Hkv, S, D]; position p is at index p mod S.
      slot:        [B] int32, the ring of each row.
      frontier:    [B] int32, tokens in the context (F_ctx).
      live:        [B] int32, block columns that exist, 0..W.
      window:      distance in tokens; window - 1 is seen, window is not. Static.
      causal:      the layer's flag from the draft config. Static.
      scale:       score multiplier. Static.
      implementation: "xla", "pallas", "interpret" or "auto": on a GPU the kernel. Static.
    Returns:
      [B, W, Hq, D] in query's dtype; columns >= live are exactly zero.
    Numeric: scores, softmax and sums in fp32; probabilities meet a value in the value's dtype; the
      output is rounded once.
    Effects: none. Ring bytes outside [max(0, F_ctx - S), F_ctx) and columns >= live may hold
      anything, NaN included, and never reach the result.
    Raises: ValueError for shapes; NotImplementedError if a named kernel lacks the case.
    Source: the DFlash reference document, draft attention; contracts 2 and 5.3.
    """
    batch, width, heads, dim = query.shape
    slots, kv_heads, capacity, _ = ring_key.shape
    check_block(query, block_key, kv_heads)
    columns = jnp.arange(width)
    near = jnp.abs(columns[:, None] - columns[None, :]) < window
    named = "causal" if causal else "full"
    inside = block_visibility(named, batch, width, live) & near[None]
    form = _choose(implementation, width, capacity, query)
    if form != "xla":
        return kernel.attend(
            query, block_key, block_value, ring_key, ring_value, slot, frontier, live,
            named if window >= width else inside, window=window, scale=scale,
            interpret=form == "interpret",
        )
    folded = fold_heads(query, kv_heads)
    own_key, own_value = (jnp.moveaxis(x, 1, 2) for x in (block_key, block_value))
    block = attend(folded, own_key, own_value, inside, scale)

    alive = columns[None, :] < live[:, None]
    position = ring_positions(frontier, capacity)
    distance = frontier[:, None, None] + columns[None, :, None] - position[:, None, :]
    visible = (position[:, None, :] >= 0) & (distance < window) & alive[:, :, None]
    lane = jnp.minimum(slot, slots - 1)
    context = attend(folded, ring_key[lane], ring_value[lane], visible, scale)
    return unfold_heads(normalise(merge(context, block)), width).astype(query.dtype)


def _choose(implementation: str, width: int, capacity: int, query) -> str:
    dim = query.shape[-1]
    lacking = None if kernel.supports(width, capacity, dim) else (
        f"blocks of at most {kernel.MAX_WIDTH} columns, rings in multiples of 16 and power-of-two "
        f"heads of at least 16, got width {width}, ring {capacity}, head_dim {dim}"
    )
    return attention_form("sliding_window_attention", implementation, lacking, query)


def ring_positions(frontier, capacity: int):
    """Position held by each index of a ring, [B, S] int32; negative where nothing was written.

    Index s holds the largest position p < frontier with p mod S = s.
    """
    index = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    last = frontier[:, None] - 1
    return last - (last - index) % capacity
