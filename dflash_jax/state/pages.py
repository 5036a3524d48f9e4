"""Paged K/V of one layer, and the table that maps positions of a lane to pages."""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.ops.kv_write import write_layers, write_pages


@struct.dataclass
class KVPages:
    """Keys and values of one full-attention layer.

    key, value: [Hkv, num_pages, page, D]; written by prefill, materialize (draft) and commit.
    Position p of a lane lies in page table[lane, p // page] at offset p mod page. Bytes at
    positions that the owner's frontier does not cover are dead.
    """

    key: jax.Array
    value: jax.Array

    @classmethod
    def zeros(cls, kv_heads, num_pages, page, head_dim, key_dtype, value_dtype) -> "KVPages":
        shape = (kv_heads, num_pages, page, head_dim)
        return cls(key=jnp.zeros(shape, key_dtype), value=jnp.zeros(shape, value_dtype))

    def write(self, key, value, table, start, count) -> "KVPages":
        """Stores columns j < count at positions start + j; see `write_pages` for shapes."""
        return self.replace(
            key=write_pages(self.key, key, table, start, count),
            value=write_pages(self.value, value, table, start, count),
        )


def write_all(
    layers: tuple[KVPages, ...], rows, path, table, start, count, *, implementation
) -> tuple[KVPages, ...]:
    """Stores the columns along a path of all layers; see `write_layers`."""
    pools = tuple((pages.key, pages.value) for pages in layers)
    written = write_layers(
        pools, rows, path, table, start, count, implementation=implementation
    )
    return tuple(KVPages(key=key, value=value) for key, value in written)


@struct.dataclass
class PageTable:
    """Pages of every lane.

    ids: [lanes, max_pages] int32; an unmapped entry is the page count of the pool.
    """

    ids: jax.Array

    @classmethod
    def unmapped(cls, lanes: int, max_pages: int, num_pages: int) -> "PageTable":
        return cls(ids=jnp.full((lanes, max_pages), num_pages, jnp.int32))

    def rows(self, lane):
        """[B, max_pages] int32 of the given lanes; an idle row reads some lane's."""
        return self.ids[jnp.clip(lane, 0, self.ids.shape[0] - 1)]
