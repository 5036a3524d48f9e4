"""Grouped-query attention over paged context and the block's own columns."""

import jax
import jax.numpy as jnp
from jax import lax

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
from dflash_jax.pallas import softmax_attention as kernel
from dflash_jax.pallas import softmax_attention_chunk as chunk_kernel

# A longer context is read in stretches, in a loop that ends with the longest row: at most this many
# positions, and at most this many scores, at a time.
CONTEXT_BLOCK = 8192
SCORES = 1 << 26


def softmax_attention(
    query, block_key, block_value, key_pages, value_pages, table, frontier, live, *,
    block_mask, scale, gate=None, implementation="auto",
):
    """Attends the block's columns to [0, frontier) in pages and to one another.

    Column j has position frontier + j. It sees every context position and, inside the block, the
    columns that `block_mask` names.

    Args:                                                                  (B rows, W columns)
      query:       [B, W, Hq, D] bf16 or fp32, normed and rotated.
      block_key, block_value: [B, W, Hkv, D], dtypes of their own.
      key_pages, value_pages: [Hkv, num_pages, page, D].
      table:       [B, max_pages] int32; an unmapped entry is num_pages.
      frontier:    [B] int32, tokens in the context.
      live:        [B] int32, block columns that exist, 0..W.
      block_mask:  "causal", "full" or bool [B, W, W] (row = query, column = key).
      scale:       score multiplier. Static.
      gate:        None, or [B, W, Hq, D]: the rounded output is multiplied by its sigmoid.
      implementation: "xla", "pallas", "interpret" or "auto": on a GPU the kernel. Static.
    Returns:
      [B, W, Hq, D] in query's dtype; columns >= live are exactly zero.
    Numeric: scores, softmax and sums in fp32; probabilities meet a value in the value's dtype; the
      output is rounded once, and once more behind the gate.
    Effects: none. Page bytes at positions >= frontier, unmapped pages and columns >= live may hold
      anything, NaN included, and never reach the result.
    Raises: ValueError for shapes; NotImplementedError if a named kernel lacks the case.
    Source: contracts 5.3 and 6.4.
    """
    batch, width, heads, dim = query.shape
    kv_heads, num_pages, page, _ = key_pages.shape
    check_block(query, block_key, kv_heads)
    visible = block_visibility(block_mask, batch, width, live)
    form = _choose(implementation, width, page, query, block_mask)
    if form != "xla" and width > kernel.MAX_WIDTH:
        return chunk_kernel.attend(
            query, block_key, block_value, key_pages, value_pages, table, frontier, live, gate,
            scale=scale, interpret=form == "interpret",
        )
    if form != "xla":
        return kernel.attend(
            query, block_key, block_value, key_pages, value_pages, table, frontier, live,
            block_mask if isinstance(block_mask, str) else visible, gate, scale=scale,
            interpret=form == "interpret",
        )
    folded = fold_heads(query, kv_heads)
    alive = jnp.arange(width)[None, :] < live[:, None]
    own_key, own_value = (jnp.moveaxis(x, 1, 2) for x in (block_key, block_value))
    part = attend(folded, own_key, own_value, visible, scale)

    def absorb(first_page, part, pages):
        """Merges in the context of some consecutive page-table columns, [B, pages]."""
        ids = jnp.minimum(pages, num_pages - 1)
        key, value = (
            jnp.moveaxis(pool[:, ids], 0, 1).reshape(batch, kv_heads, -1, dim)
            for pool in (key_pages, value_pages)
        )
        position = first_page * page + jnp.arange(key.shape[2])
        seen = alive[:, :, None] & (position[None, None, :] < frontier[:, None, None])
        return merge(part, attend(folded, key, value, seen, scale))

    step = max(1, min(CONTEXT_BLOCK, SCORES // (batch * heads * width)) // page)
    if table.shape[1] <= step:
        part = absorb(0, part, table) if table.shape[1] else part
    else:
        padded = jnp.pad(table, ((0, 0), (0, -table.shape[1] % step)), constant_values=num_pages)
        stretches = (jnp.max(frontier) + step * page - 1) // (step * page)

        def stretch(index, part):
            pages = lax.dynamic_slice_in_dim(padded, index * step, step, axis=1)
            return absorb(index * step, part, pages)

        part = lax.fori_loop(0, jnp.minimum(stretches, padded.shape[1] // step), stretch, part)
    mixed = unfold_heads(normalise(part), width).astype(query.dtype)
    if gate is None:
        return mixed
    opened = mixed.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return jnp.where(alive[:, :, None, None], opened, 0.0).astype(query.dtype)


def _choose(implementation: str, width: int, page: int, query, block_mask) -> str:
    dim = query.shape[-1]
    narrow = width <= kernel.MAX_WIDTH
    takes = kernel.supports(width, page, dim) if narrow else (
        chunk_kernel.supports(page, dim, block_mask)
    )
    lacking = None if takes else (
        f"blocks of at most {kernel.MAX_WIDTH} columns or causal ones and power-of-two pages and "
        f"heads of at least 16, got width {width}, page {page}, head_dim {dim}"
    )
    return attention_form("softmax_attention", implementation, lacking, query)


def ancestor_mask(parent):
    """Visibility of a block whose columns form a tree: each column sees itself and its ancestors.

    Args:
      parent: [B, W] int32, parent[b, c] < c for c > 0; column 0 is the root (its own parent).
    Returns:
      [B, W, W] bool, row = query column, column = key column. For a chain this is causal.
    Source: contracts 8.2.
    """
    width = parent.shape[1]
    columns = jnp.arange(width)
    own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (*parent.shape, width))
    mask = own
    for column in range(1, width):
        inherited = jnp.take_along_axis(mask, parent[:, column][:, None, None], axis=1)[:, 0]
        mask = mask.at[:, column].set(inherited | (columns == column)[None, :])
    return mask
