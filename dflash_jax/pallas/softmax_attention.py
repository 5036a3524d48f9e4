"""Attention of a narrow block over paged context.

Implements: ops/softmax_attention.py, `softmax_attention`.
Matches when: W <= 32; page and head_dim are powers of two, at least 16; block mask of any kind.
Assumes: table entries of positions below the frontier are mapped.
"""

import jax.numpy as jnp

from dflash_jax.pallas import attention
from dflash_jax.pallas.attention import MAX_WIDTH, Context, Tiles, load_rows, split_mask
from dflash_jax.pallas.common import is_power_of_two


def supports(width: int, page: int, dim: int) -> bool:
    """Whether the kernel takes blocks, pages and heads of these sizes."""
    return width <= MAX_WIDTH and all(is_power_of_two(n) and n >= 16 for n in (page, dim))


def attend(
    query, block_key, block_value, key_pages, value_pages, table, frontier, live, block_mask,
    gate=None, *, scale, interpret, tiles=None,
):
    """See `attention.attend`; pages, table and frontier as in the op."""
    page = key_pages.shape[2]
    tiles = tiles or Tiles.of(query, block_key.shape[2], page, table.shape[1] * page)
    return attention.attend(
        query, block_key, block_value, (key_pages, value_pages, table, frontier), live, gate=gate,
        reader=_pages, name="softmax_attention", scale=scale, tiles=tiles, interpret=interpret,
        **split_mask(block_mask),
    )


def _pages(context, row, head, keys):
    key_pages, value_pages, table, frontier = context
    _, num_pages, page, _ = key_pages.shape
    length = frontier[row]

    def locate(first):
        entry = jnp.minimum(first // page, table.shape[1] - 1)
        return table[row, entry]

    def settle(number):
        return jnp.clip(number, 0, num_pages - 1)

    def read(number, first, seen):
        offset = first % page + jnp.arange(keys, dtype=jnp.int32)
        return load_rows((key_pages, value_pages), head, number, offset, seen=seen)

    return Context(length, length, locate, settle, read, lambda entry, column: True)
