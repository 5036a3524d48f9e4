"""Attention of a narrow block over a ring of context, inside a window.

Implements: ops/sliding_window_attention.py, `sliding_window_attention`.
Matches when: W <= 32; head_dim is a power of two and 16 divides the ring, both at least 16.
"""

import functools

import jax.numpy as jnp

from dflash_jax.pallas import attention
from dflash_jax.pallas.attention import MAX_WIDTH, Context, Tiles, load_rows, split_mask
from dflash_jax.pallas.common import is_power_of_two


def supports(width: int, capacity: int, dim: int) -> bool:
    """Whether the kernel takes blocks, rings and heads of these sizes."""
    return width <= MAX_WIDTH and capacity % 16 == 0 and dim >= 16 and is_power_of_two(dim)


def attend(
    query, block_key, block_value, ring_key, ring_value, slot, frontier, live, block_mask, *,
    window, scale, interpret, tiles=None,
):
    """See `attention.attend`; rings, slot, frontier and window as in the op."""
    capacity = ring_key.shape[2]
    unit = capacity & -capacity  # the largest power of two that divides it
    tiles = tiles or Tiles.of(query, block_key.shape[2], unit, capacity)
    return attention.attend(
        query, block_key, block_value, (ring_key, ring_value, slot, frontier), live,
        reader=_ring(window, query.shape[1]), name="sliding_window_attention", scale=scale,
        tiles=tiles, interpret=interpret, **split_mask(block_mask),
    )


@functools.cache
def _ring(window: int, width: int):
    """Walks back from the frontier: what only some columns see, or nobody holds, comes last."""

    def reader(context, row, head, keys):
        ring_key, ring_value, slot, frontier = context
        slots, _, capacity, _ = ring_key.shape
        lane, end = jnp.clip(slot[row], 0, slots - 1), frontier[row]
        # Column j sees the entry of position end - 1 - entry at distance entry + 1 + j.
        entries = jnp.minimum(end, min(capacity, window - 1))

        def read(last, _, seen):
            index = last - jnp.arange(keys, dtype=jnp.int32)
            index = jnp.where(index < 0, index + capacity, index)
            return load_rows((ring_key, ring_value), lane, head, index, seen=seen)

        return Context(
            entries=entries,
            clear=jnp.minimum(entries, max(0, window - width)),
            locate=lambda first: end - 1 - first,
            settle=lambda last: last % capacity,
            read=read,
            sees=lambda entry, column: entry + 1 + column < window,
        )

    return reader
