"""Attention of a narrow block over a ring of context, inside a window.

Implements: ops/sliding_window_attention.py, `sliding_window_attention`.
Matches when: W <= 32; head_dim is a power of two and 16 divides the ring, both at least 16.
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from dflash_jax.pallas import attention
from dflash_jax.pallas.attention import MAX_WIDTH, Tiles, split_mask
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
        reader=_ring(window), name="sliding_window_attention", scale=scale, tiles=tiles,
        interpret=interpret, **split_mask(block_mask),
    )


@functools.cache
def _ring(window: int):
    def reader(context, row, head, keys):
        ring_key, ring_value, slot, frontier = context
        slots, _, capacity, _ = ring_key.shape
        lane, end = jnp.clip(slot[row], 0, slots - 1), frontier[row]

        def read(first, _, column):
            index = first + jnp.arange(keys, dtype=jnp.int32)
            # The largest position below the frontier that belongs at the index.
            position = end - 1 - (end - 1 - index + capacity) % capacity
            held = (index < end) & (position >= 0)
            near = end + column[:, None] - position[None, :] < window
            visible = near & held[None, :]
            place = pl.ds(first, keys)
            # A value that no column sees is dead as well: its bytes may be anything.
            seen = held & (end - position < window)
            return ring_key[lane, head, place, :], ring_value[lane, head, place, :], seen, visible

        return jnp.minimum(end, capacity), lambda first: first, read

    return reader
