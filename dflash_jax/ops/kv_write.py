"""Scatters of K or V rows into paged storage and into cyclic rings.

All writes drop dead rows by sending them to an index that is out of range.
"""

import jax
import jax.numpy as jnp

from dflash_jax.ops.dispatch import choose_form
from dflash_jax.ops.indices import DROP
from dflash_jax.pallas import kv_write as kernel


def write_pages(pages, rows, table, start, count):
    """Writes columns j < count of each row at positions start + j of its page table.

    Args:                                                                  (B rows, T columns)
      pages: [Hkv, num_pages, page, D], any float dtype.
      rows:  [B, T, Hkv, D], dtype of `pages`; columns >= count may hold anything.
      table: [B, max_pages] int32, page ids; an unmapped entry is out of range.
      start: [B] int32, position of column 0, tokens.
      count: [B] int32, columns to write, 0..T.
    Returns:
      pages with the addressed rows replaced; every other byte is unchanged.
    Effects: positions beyond the table and unmapped entries are dropped.
    Raises: ValueError for shapes or dtypes.
    Source: contracts 3.3 and 6.4.
    """
    _check("pages", pages, rows)
    num_pages, page = pages.shape[1:3]
    columns = jnp.arange(rows.shape[1], dtype=jnp.int32)
    position = start[:, None] + columns[None, :]
    block = position // page
    mapped = (columns[None, :] < count[:, None]) & (block < table.shape[1])
    page_id = jnp.take_along_axis(table, jnp.minimum(block, table.shape[1] - 1), axis=1)
    page_id = jnp.where(mapped, page_id, num_pages)
    return pages.at[:, page_id, position % page].set(
        jnp.transpose(rows, (2, 0, 1, 3)), **DROP
    )


def write_layers(pools, rows, path, table, start, count, *, implementation="auto"):
    """`write_pages` of the columns along a path, keys and values of all layers.

    Args:                                                                  (B rows, W columns)
      pools: per layer (keys, values), each as `pages` above and of one shape; donate them in the
        enclosing jit.
      rows:  per layer (keys, values), each [B, W, Hkv, D] of its pool's dtype.
      path:  [B, W] int32, the column that is stored in each place; entries from count on are never
        read.
      table, start, count: as above; a page belongs to one row.
      implementation: "xla", "pallas", "interpret" or "auto": on a GPU the kernel. Static.
    Returns:
      the pools, per layer (keys, values).
    Raises: ValueError for shapes or dtypes; NotImplementedError if a named kernel lacks the case.
    Source: contracts 9.3.
    """
    for pool, given in zip(pools, rows, strict=True):
        for pages, row in zip(pool, given, strict=True):
            _check("pages", pages, row)
            if pages.shape != pools[0][0].shape:
                raise ValueError(f"pools: expected one shape, got {pages.shape} beside others")
    if not pools:
        return ()
    dim = pools[0][0].shape[3]
    lacking = None if kernel.supports(dim) else f"power-of-two heads, got {dim}"
    form = choose_form("kv_write", implementation, lacking, auto_gpu="pallas")
    if form != "xla":
        return kernel.write(pools, rows, path, table, start, count, interpret=form == "interpret")

    def one(pages, row):
        along = jnp.take_along_axis(row, path[:, :, None, None], axis=1, mode="clip")
        return write_pages(pages, along, table, start, count)

    return tuple(
        (one(pool[0], given[0]), one(pool[1], given[1]))
        for pool, given in zip(pools, rows, strict=True)
    )


def write_ring(ring, rows, slot, start, count):
    """Writes the last min(count, S) of each row's columns at index position mod S of its ring.

    Args:                                                                  (B rows, T columns)
      ring:  [slots, Hkv, S, D], any float dtype.
      rows:  [B, T, Hkv, D], dtype of `ring`; columns >= count may hold anything.
      slot:  [B] int32, ring of each row; an idle row's is out of range.
      start: [B] int32, position of column 0, tokens.
      count: [B] int32, columns that exist, 0..T.
    Returns:
      ring with the addressed rows replaced; no index of a ring is written twice.
    Raises: ValueError for shapes or dtypes.
    Source: contracts 4.4 and 4.5.
    """
    _check("ring", ring, rows)
    capacity = ring.shape[2]
    if rows.shape[1] > capacity:
        # Only the last S live columns can survive: gather them, so that no index repeats.
        first = jnp.maximum(count - capacity, 0)
        columns = first[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None, :]
        index = jnp.minimum(columns, rows.shape[1] - 1)[:, :, None, None]
        rows = jnp.take_along_axis(rows, index, axis=1)
    else:
        columns = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape[:2])
    live = columns < count[:, None]
    index = jnp.where(live, (start[:, None] + columns) % capacity, capacity)
    return ring.at[slot[:, None], :, index].set(rows, **DROP)


def _check(name: str, store: jax.Array, rows: jax.Array) -> None:
    heads = store.shape[0] if name == "pages" else store.shape[1]
    if rows.shape[2:] != (heads, store.shape[3]) or rows.dtype != store.dtype:
        raise ValueError(
            f"rows: expected [B, T, {heads}, {store.shape[3]}] {store.dtype} to match {name}, "
            f"got {rows.shape} {rows.dtype}"
        )
