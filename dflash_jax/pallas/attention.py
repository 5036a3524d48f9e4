"""A narrow block's attention to context and to itself, split over the context's keys, then joined.

Query heads that read one KV head, times columns, are the rows of a tile. Program (row and KV head,
tile, part) walks its share of the context and leaves the largest score, the sum of exponentials and
the weighted values; the last part is the block itself, whose visibility comes as one bit mask per
column. A second kernel joins the parts. How context is stored is the caller's: see `Reader`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, dot, gpu_call

MAX_WIDTH = 32
_PROCESSORS = 132  # of an H200: programs that run at once
_JOINED = 16  # rows that one program joins

# (refs of the context operands, row, KV head, keys of a step) -> (entries to walk, read), where
# read(first, column) gives key [keys, D], value [keys, D], seen [keys] bool, and visible
# [rows, keys] bool of the entries from `first` on for rows of the given columns.
Reader = Callable


@dataclass(frozen=True)
class Tiles:
    """Rows of a tile, keys of a step, parts (the block's own included) and warps."""

    rows: int
    keys: int
    parts: int
    num_warps: int

    @classmethod
    def of(cls, batch, kv_heads, rows, dim, unit, entries) -> "Tiles":
        """For [batch, kv_heads, rows, dim] queries and contexts of so many entries.

        Args:
          unit: entries that a step never crosses, a power of two: a page, or what divides a ring.
        """
        tile = min(64, max(16, pl.next_power_of_2(rows)))
        keys = min(unit, 64 if dim <= 128 else 32)
        programs = batch * kv_heads * pl.cdiv(rows, tile)
        useful = 1 + max(1, entries // (2 * keys))
        parts = min(16, max(2, _PROCESSORS // programs), useful)
        return cls(
            rows=tile, keys=keys, parts=1 << (parts - 1).bit_length(),
            num_warps=8 if tile * dim >= 64 * 256 else 4,
        )


def visibility_bits(visible):
    """[B, W, W] bool -> [B, W] uint32, bit c of row j."""
    place = jnp.arange(visible.shape[-1], dtype=jnp.uint32)
    return jnp.sum(jnp.where(visible, jnp.uint32(1) << place, 0), axis=-1, dtype=jnp.uint32)


def attend(
    query, block_key, block_value, context, live, visible, *,
    reader: Reader, name: str, width: int, scale: float, tiles: Tiles, interpret: bool,
):
    """Attention of folded queries to their context and their block.

    Args:                                                             (B rows, W = width columns)
      query: [B, Hkv, M, D], M = G * W; row m is column m mod W.
      block_key, block_value: [B, Hkv, W, D].
      context: arrays that `reader` gets as refs.
      live: [B] int32, block columns that exist.
      visible: [B, W, W] bool, inside the block.
    Returns:
      [B, Hkv, M, D] in query's dtype; rows of columns >= live are exactly zero.
    """
    batch, kv_heads, rows, dim = query.shape
    count = pl.cdiv(rows, tiles.rows)
    padded = count * tiles.rows
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    own = max(16, pl.next_power_of_2(width))
    block_key, block_value = (
        jnp.pad(x, ((0, 0), (0, 0), (0, own - width), (0, 0))) for x in (block_key, block_value)
    )
    shape = (batch, kv_heads, tiles.parts, padded)
    bits = visibility_bits(visible).reshape(-1)
    operands = (query, block_key, block_value, live, bits, *context)
    parts = gpu_call(
        _part_kernel(reader, tiles, width, rows, scale),
        name=name,
        out_shape=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct((*shape, dim), jnp.float32),
        ),
        grid=(batch * kv_heads, count, tiles.parts),
        in_specs=[WHOLE] * len(operands),
        out_specs=(WHOLE,) * 3,
        interpret=interpret,
        num_warps=tiles.num_warps,
    )(*operands)
    joined = gpu_call(
        _join_kernel(tiles.parts),
        name=f"{name}_join",
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(batch * kv_heads, padded // _JOINED),
        in_specs=[WHOLE] * 3,
        out_specs=WHOLE,
        interpret=interpret,
    )(*parts)
    return joined[:, :, :rows]


def _part_kernel(reader: Reader, tiles: Tiles, width: int, rows: int, scale: float):
    def kernel(query, block_key, block_value, live, bits, *rest):
        *context, top, total, values = rest
        kv_heads = query.shape[1]
        row, head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
        part = pl.program_id(2)
        place = pl.ds(pl.program_id(1) * tiles.rows, tiles.rows)
        queries = query[row, head, place, :]
        index = pl.program_id(1) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
        column = index % width
        alive = ((index < rows) & (column < live[row]))[:, None]

        def share_of_context(carry):
            entries, read = reader(context, row, head, tiles.keys)
            steps = pl.cdiv(entries, tiles.keys)
            share = pl.cdiv(steps, tiles.parts - 1)

            def step(index, carry):
                key, value, seen, visible = read(index * tiles.keys, column)
                return _absorb(carry, queries, key, value, alive & visible, seen, scale)

            return lax.fori_loop(part * share, jnp.minimum((part + 1) * share, steps), step, carry)

        def block(carry):
            own = jnp.arange(block_key.shape[2], dtype=jnp.int32)
            seen = own < jnp.minimum(live[row], width)
            named = (bits[row * width + column][:, None] >> own.astype(jnp.uint32)[None, :]) & 1
            key, value = block_key[row, head, :, :], block_value[row, head, :, :]
            return _absorb(
                carry, queries, key, value, alive & seen[None, :] & (named == 1), seen, scale
            )

        start = (
            jnp.full((tiles.rows,), -jnp.inf, jnp.float32),
            jnp.zeros((tiles.rows,), jnp.float32),
            jnp.zeros((tiles.rows, query.shape[3]), jnp.float32),
        )
        found = lax.cond(part == tiles.parts - 1, block, share_of_context, start)
        top[row, head, part, place] = found[0]
        total[row, head, part, place] = found[1]
        values[row, head, part, place, :] = found[2]

    return kernel


def _absorb(carry, queries, key, value, visible, seen, scale):
    """The running maximum, sum and values after some more keys."""
    top, total, values = carry
    scores = dot(queries, key.astype(queries.dtype).T) * scale
    scores = jnp.where(visible, scores, -jnp.inf)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    shift = jnp.where(higher > -jnp.inf, higher, 0.0)
    weights = jnp.where(visible, jnp.exp(scores - shift[:, None]), 0.0)
    shrink = jnp.exp(top - shift)
    # Dead rows are zeroed before the product: 0 * NaN is NaN.
    value = jnp.where(seen[:, None], value, jnp.zeros((), value.dtype))
    return (
        higher,
        total * shrink + jnp.sum(weights, axis=1),
        values * shrink[:, None] + dot(weights.astype(value.dtype), value),
    )


def _join_kernel(parts: int):
    def kernel(top, total, values, out):
        kv_heads = top.shape[1]
        row, head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
        place = pl.ds(pl.program_id(1) * _JOINED, _JOINED)
        peaks = top[row, head, :, place]
        highest = jnp.max(peaks, axis=0)
        shift = jnp.where(highest > -jnp.inf, highest, 0.0)
        whole = jnp.sum(total[row, head, :, place] * jnp.exp(peaks - shift[None, :]), axis=0)

        def add(part, mixed):
            weight = jnp.exp(top[row, head, part, place] - shift)
            return mixed + weight[:, None] * values[row, head, part, place, :]

        mixed = lax.fori_loop(0, parts, add, jnp.zeros((_JOINED, values.shape[4]), jnp.float32))
        mixed = mixed / jnp.where(whole > 0.0, whole, 1.0)[:, None]
        out[row, head, place, :] = mixed.astype(out.dtype)

    return kernel
