"""A narrow block's attention to context and to itself, split over the context's keys, then joined.

Query heads that read one KV head, times columns, are the rows of a tile. Program (row and KV head,
tile, part) walks its share of the context and leaves the largest score, the sum of exponentials and
the weighted values; the last part is the block itself. A second kernel joins the parts and opens
the output gate. Queries, block and output keep the caller's layout. How context is stored is the
caller's: see `Reader`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, broadcast, dot, gpu_call, load, shared
from dflash_jax.pallas.tiling import PROCESSORS

MAX_WIDTH = 32
_FEW = 8  # rows times KV heads that leave most processors idle

# (refs of the context operands, row, KV head, keys of a step) -> (entries to walk, locate, read).
# locate(first) says where the entries from `first` on lie; it is asked one step ahead, because that
# may take a memory access. read(place, first, column) gives key [keys, D], value [keys, D], seen
# [keys] bool, and visible [rows, keys] bool for rows of the given columns.
Reader = Callable


@dataclass(frozen=True)
class Tiles:
    """Rows of a tile, keys of a step, parts (the block's own included) and warps."""

    rows: int
    keys: int
    parts: int
    num_warps: int

    @classmethod
    def of(cls, query, kv_heads: int, unit: int, entries: int) -> "Tiles":
        """For queries [B, W, Hq, D] of so many KV heads and contexts of so many entries.

        Args:
          unit: entries that a step never crosses, a power of two: a page, or what divides a ring.
        """
        batch, width, heads, dim = query.shape
        rows = heads // kv_heads * width
        tile = min(64, max(16, pl.next_power_of_2(rows)))
        if tile * dim >= 64 * 256 and batch * kv_heads <= _FEW:
            tile = 16  # processors are free: smaller tiles take turns less, and read keys from L2
        # Two steps of keys and values have to fit into shared memory.
        keys = min(unit, 64 if dim * query.dtype.itemsize <= 512 else 32)
        programs = batch * kv_heads * pl.cdiv(rows, tile)
        useful = 1 + max(1, entries // (2 * keys))
        parts = min(32, max(2, 2 * PROCESSORS // programs), useful)
        return cls(
            rows=tile, keys=keys, parts=1 << (parts - 1).bit_length(),
            num_warps=8 if tile * dim >= 64 * 256 else 4,
        )


def visibility_bits(visible):
    """[B, W, W] bool -> [B, W] uint32, bit c of row j."""
    place = jnp.arange(visible.shape[-1], dtype=jnp.uint32)
    return jnp.sum(jnp.where(visible, jnp.uint32(1) << place, 0), axis=-1, dtype=jnp.uint32)


def split_mask(block_mask):
    """What "causal", "full" or [B, W, W] bool is among `attend`'s arguments."""
    named = isinstance(block_mask, str)
    return {"named_mask": block_mask if named else None, "visible": None if named else block_mask}


@shared("named_mask", "reader", "name", "scale", "tiles", "interpret")
def attend(
    query, block_key, block_value, context, live, visible=None, gate=None, *,
    named_mask: str | None, reader: Reader, name: str, scale: float, tiles: Tiles, interpret: bool,
):
    """Attention of a block to its context and to itself.

    Args:                                                             (B rows, W columns)
      query: [B, W, Hq, D]. block_key, block_value: [B, W, Hkv, D].
      context: arrays that `reader` gets as refs.
      live: [B] int32, block columns that exist.
      visible: [B, W, W] bool, inside the block, or None if `named_mask` says it.
      gate: None, or [B, W, Hq, D]: the rounded output times its sigmoid.
      named_mask: "causal", "full" or None. reader: the same object in every layer. Static.
    Returns:
      [B, W, Hq, D] in query's dtype; columns >= live are exactly zero.
    """
    batch, width, heads, dim = query.shape
    kv_heads = block_key.shape[2]
    rows = heads // kv_heads * width
    count = pl.cdiv(rows, tiles.rows)
    bits = () if visible is None else (visibility_bits(visible).reshape(-1),)
    operands = (query, block_key, block_value, live, *bits, *context)
    shape = (batch, kv_heads, tiles.parts, count * tiles.rows)
    parts = gpu_call(
        _part_kernel(reader, tiles, named_mask, scale),
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
    gates = () if gate is None else (gate, live)
    return gpu_call(
        _join_kernel(gated=gate is not None),
        name=f"{name}_join",
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(batch, width, heads),
        in_specs=[WHOLE] * (3 + len(gates)),
        out_specs=WHOLE,
        interpret=interpret,
    )(*parts, *gates)


def _part_kernel(reader: Reader, tiles: Tiles, named_mask: str | None, scale: float):
    def kernel(query, block_key, block_value, live, *rest):
        *context, top, total, values = rest
        bits = context.pop(0) if named_mask is None else None
        _, width, heads, dim = query.shape
        kv_heads = block_key.shape[2]
        group = heads // kv_heads
        row, head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
        part = pl.program_id(2)
        place = pl.ds(pl.program_id(1) * tiles.rows, tiles.rows)
        index = pl.program_id(1) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
        column, member = index % width, jnp.minimum(index // width, group - 1)
        alive = ((index < group * width) & (column < live[row]))[:, None]
        across = jnp.arange(dim, dtype=jnp.int32)[None, :]
        queries = load(query.at[broadcast(
            row, column[:, None], (head * group + member)[:, None], across
        )])

        def share_of_context(carry):
            entries, locate, read = reader(context, row, head, tiles.keys)
            steps = pl.cdiv(entries, tiles.keys)
            share = pl.cdiv(steps, tiles.parts - 1)

            def step(index, carry):
                found, where = carry
                key, value, seen, visible = read(where, index * tiles.keys, column)
                ahead = locate((index + 1) * tiles.keys)
                return _absorb(found, queries, key, value, alive & visible, seen, scale), ahead

            first = part * share
            start = (carry, locate(first * tiles.keys))
            return lax.fori_loop(first, jnp.minimum(first + share, steps), step, start)[0]

        def block(carry):
            own = jnp.arange(max(16, pl.next_power_of_2(width)), dtype=jnp.int32)
            seen = own < jnp.minimum(live[row], width)
            at = broadcast(row, jnp.minimum(own, width - 1)[:, None], head, across)
            key, value = load(block_key.at[at]), load(block_value.at[at])
            visible = alive & seen[None, :]
            if named_mask == "causal":
                visible &= own[None, :] <= column[:, None]
            elif named_mask is None:
                words = bits[row * width + column][:, None]
                visible &= (words >> own.astype(jnp.uint32)[None, :]) & 1 == 1
            return _absorb(carry, queries, key, value, visible, seen, scale)

        start = (
            jnp.full((tiles.rows,), -jnp.inf, jnp.float32),
            jnp.zeros((tiles.rows,), jnp.float32),
            jnp.zeros((tiles.rows, dim), jnp.float32),
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


def _join_kernel(gated: bool):
    def kernel(top, total, values, *rest):
        *gates, out = rest
        _, width, heads, _ = out.shape
        group = heads // top.shape[1]
        row, column, query = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        head, index = query // group, query % group * width + column
        peaks = top[row, head, :, index]
        highest = jnp.max(peaks)
        weights = jnp.exp(peaks - jnp.where(highest > -jnp.inf, highest, 0.0))
        whole = jnp.sum(total[row, head, :, index] * weights)
        mixed = jnp.sum(values[row, head, :, index, :] * weights[:, None], axis=0)
        mixed = (mixed / jnp.where(whole > 0.0, whole, 1.0)).astype(out.dtype)
        if gated:
            gate, live = gates
            opened = mixed.astype(jnp.float32) * jax.nn.sigmoid(
                gate[row, column, query, :].astype(jnp.float32)
            )
            mixed = jnp.where(column < live[row], opened, 0.0).astype(out.dtype)
        out[row, column, query, :] = mixed

    return kernel
