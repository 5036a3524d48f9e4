"""A narrow block's attention to context and to itself, split over the keys, then joined.

Query heads that read one KV head, times columns, are the rows of a tile. Program (row and KV head,
tile, part) takes its turns at the steps of context, with the block as one more at their end, and
leaves the largest score, the sum of exponentials and the weighted values. Steps that every column
sees whole come first and take no mask, so that loads run ahead of the products; others load zeros
where there is nothing to see. A second kernel joins the parts, clears dead columns and opens the
output gate. Queries, block and output keep the caller's layout. How context is stored, `Context`
says.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, broadcast, dot, gpu_call, load, shared, store
from dflash_jax.pallas.tiling import PROCESSORS

MAX_WIDTH = 32
_LOG2_E = math.log2(math.e)
_SHARED = 224 << 10  # bytes of shared memory for queries, keys and values
_JOINED = 8192  # values that a program of the join holds


class Context(NamedTuple):
    """One row's context before one KV head, in steps of so many entries.

    Fields:
      entries: how many to walk. clear: how many of them, from the first on, every column sees.
      locate, settle: settle(locate(first)) is where the entries from `first` on lie. A memory
        access belongs into `locate`, asked two steps ahead; `settle`, asked one step ahead, has to
        compute something: a loop that hands a value on as it is does not get its loads run ahead.
      read: (place, first, seen) -> key, value [keys, D], zeros where seen [keys] bool is false;
        None: all are there.
      sees: (entry, column) -> whether a column sees an entry below `entries`, in their joint shape.
    """

    entries: jax.Array
    clear: jax.Array
    locate: Callable
    settle: Callable
    read: Callable
    sees: Callable


# (refs of the context operands, row, KV head, keys of a step) -> Context.
Reader = Callable


@dataclass(frozen=True)
class Tiles:
    """Rows of a tile, keys of a step, parts, warps, and steps in flight."""

    rows: int
    keys: int
    parts: int
    num_warps: int
    num_stages: int = 2

    @classmethod
    def of(cls, query, kv_heads: int, unit: int, entries: int) -> "Tiles":
        """For queries [B, W, Hq, D] of so many KV heads and contexts of so many entries.

        Args:
          unit: entries that a step never crosses, a power of two: a page, or what divides a ring.
        """
        batch, width, heads, dim = query.shape
        rows = heads // kv_heads * width
        tile = min(64, max(16, pl.next_power_of_2(rows)))
        narrow, size = query.dtype.itemsize == 2, query.dtype.itemsize * dim
        if narrow and dim == 128 and tile == 32:
            tile = 64  # half of it idle, but the products of a whole warpgroup are quicker
        # Scores and weighted values share the registers.
        keys = min(unit, 64 if narrow and tile * dim < 64 * 256 else 32)
        room = (_SHARED - tile * size) // (2 * keys * size)
        stages = max(1, min(room, 4 if keys < 64 else 3)) if narrow else 2
        # Programs that a processor holds at once: all of them start together.
        resident = 1 if dim > 128 else 2
        programs = batch * kv_heads * pl.cdiv(rows, tile)
        parts = min(64, max(1, resident * PROCESSORS // programs), max(1, entries // keys))
        return cls(
            rows=tile, keys=keys, parts=1 << (parts.bit_length() - 1),
            num_warps=8 if tile * dim > 64 * 256 else 4, num_stages=stages,
        )


def visibility_bits(visible):
    """[B, W, W] bool -> [B, W] uint32, bit c of row j."""
    place = jnp.arange(visible.shape[-1], dtype=jnp.uint32)
    return jnp.sum(jnp.where(visible, jnp.uint32(1) << place, 0), axis=-1, dtype=jnp.uint32)


def split_mask(block_mask):
    """What "causal", "full" or [B, W, W] bool is among `attend`'s arguments."""
    named = isinstance(block_mask, str)
    return {"named_mask": block_mask if named else None, "visible": None if named else block_mask}


def load_rows(refs, *place, seen):
    """[keys, D] of every ref at leading indices, the last of them [keys]; zeros where unseen.

    Args:
      seen: [keys] bool, or None if all are there: the loads then have no mask.
    """
    *leading, rows = place
    across = jnp.arange(refs[0].shape[-1], dtype=jnp.int32)[None, :]
    at = broadcast(*leading, rows[:, None], across)
    if seen is None:
        return tuple(load(ref.at[at]) for ref in refs)
    mask = jnp.broadcast_to(seen[:, None], at[0].shape)
    return tuple(load(ref.at[at], mask=mask, other=0.0) for ref in refs)


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
    bits = () if visible is None else (visibility_bits(visible).reshape(-1),)
    operands = (query, block_key, block_value, live, *bits, *context)
    shape = (batch, kv_heads, tiles.parts, rows)
    parts = gpu_call(
        _part_kernel(reader, tiles, named_mask, scale),
        name=name,
        out_shape=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct((*shape, dim), jnp.float32),
        ),
        grid=(batch * kv_heads, pl.cdiv(rows, tiles.rows), tiles.parts),
        in_specs=[WHOLE] * len(operands),
        out_specs=(WHOLE,) * 3,
        interpret=interpret,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(*operands)
    gates = () if gate is None else (gate,)
    lines = min(rows & -rows, max(1, _JOINED // (tiles.parts * dim)))
    return gpu_call(
        _join_kernel(lines),
        name=f"{name}_join",
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(batch * kv_heads, rows // lines),
        in_specs=[WHOLE] * (4 + len(gates)),
        out_specs=WHOLE,
        interpret=interpret,
    )(live, *parts, *gates)


def _part_kernel(reader: Reader, tiles: Tiles, named_mask: str | None, scale: float):
    def kernel(query, block_key, block_value, live, *rest):
        *operands, top, total, values = rest
        bits = operands.pop(0) if named_mask is None else None
        _, width, heads, dim = query.shape
        kv_heads, keys = block_key.shape[2], tiles.keys
        group = heads // kv_heads
        row, head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
        part = pl.program_id(2)
        context, alive = reader(operands, row, head, keys), jnp.minimum(live[row], width)

        def first_entry(turn):
            return (part + turn * tiles.parts) * keys

        # Asked without waiting for the frontier, and before the queries take their time.
        ahead = context.settle(context.locate(first_entry(0))), context.locate(first_entry(1))
        index = pl.program_id(1) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
        column, member = index % width, jnp.minimum(index // width, group - 1)
        across = jnp.arange(dim, dtype=jnp.int32)[None, :]
        queries = load(query.at[broadcast(
            row, column[:, None], (head * group + member)[:, None], across
        )])
        absorb = functools.partial(_absorb, queries=queries, scale=scale)

        steps, clear = pl.cdiv(context.entries, keys), context.clear // keys

        def turns(steps):
            return (steps + tiles.parts - 1 - part) // tiles.parts

        def step(masked, turn, carry):
            found, place, following = carry
            first = first_entry(turn)
            entry = first + jnp.arange(keys, dtype=jnp.int32)
            seen = entry < context.entries if masked else None
            key, value = context.read(place, first, seen)
            later = context.locate(first_entry(turn + 2))
            visible = None
            if masked:
                visible = seen[None, :] & context.sees(entry[None, :], column[:, None])
            found = absorb(found, key=key, value=value, visible=visible)
            return found, context.settle(following), later

        def block(found):
            own = _own_columns(block_key, block_value, bits, row, head, column, alive, named_mask)
            return absorb(found, **own)

        found = (
            jnp.full((tiles.rows,), -jnp.inf, jnp.float32),
            jnp.zeros((tiles.rows,), jnp.float32),
            jnp.zeros((tiles.rows, dim), jnp.float32),
        )
        carry = lax.fori_loop(0, turns(clear), functools.partial(step, False), (found, *ahead))
        # Few parts have such steps; the others should not even begin to load ahead.
        found = lax.cond(
            turns(clear) < turns(steps),
            lambda carry: lax.fori_loop(
                turns(clear), turns(steps), functools.partial(step, True), carry
            ),
            lambda carry: carry, carry,
        )[0]
        found = lax.cond(part == steps % tiles.parts, block, lambda found: found, found)
        kept = index < group * width
        store(top.at[broadcast(row, head, part, index)], found[0], mask=kept)
        store(total.at[broadcast(row, head, part, index)], found[1], mask=kept)
        store(
            values.at[broadcast(row, head, part, index[:, None], across)], found[2],
            mask=jnp.broadcast_to(kept[:, None], found[2].shape),
        )

    return kernel


def _own_columns(block_key, block_value, bits, row, head, column, alive, named_mask):
    """Keys and values of the block, zeros where dead, and what rows of the given columns see."""
    _, width, _, dim = block_key.shape
    own = jnp.arange(max(16, pl.next_power_of_2(width)), dtype=jnp.int32)
    seen = own < alive
    at = broadcast(row, own[:, None], head, jnp.arange(dim, dtype=jnp.int32)[None, :])
    mask = jnp.broadcast_to(seen[:, None], at[0].shape)
    key, value = (load(x.at[at], mask=mask, other=0.0) for x in (block_key, block_value))
    visible = jnp.broadcast_to(seen[None, :], (column.size, own.size))
    if named_mask == "causal":
        visible &= own[None, :] <= column[:, None]
    elif named_mask is None:
        words = bits[row * width + column][:, None]
        visible &= (words >> own.astype(jnp.uint32)[None, :]) & 1 == 1
    return {"key": key, "value": value, "visible": visible}


def _absorb(carry, queries, key, value, visible, scale):
    """The running maximum, sum and values after some more keys; visible None: every row sees all.

    Values that nobody may see are zero.
    """
    top, total, values = carry
    scores = dot(queries, key.astype(queries.dtype).T) * scale
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    shift = jnp.where(higher > -jnp.inf, higher, 0.0)
    weights, shrink = _exp(scores - shift[:, None]), _exp(top - shift)
    return (
        higher,
        total * shrink + jnp.sum(weights, axis=1),
        values * shrink[:, None] + dot(weights.astype(value.dtype), value),
    )


def _exp(x):
    """By the device's instruction, which knows powers of two. The difference comes before the
    factor: equal scores have equal weights, however large and wherever a compiler fuses."""
    return jnp.exp2(x * _LOG2_E)


def _join_kernel(lines: int):
    def kernel(live, top, total, values, *rest):
        *gate, out = rest
        _, width, heads, dim = out.shape
        _, kv_heads, parts, _ = top.shape
        row, head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
        index = pl.program_id(1) * lines + jnp.arange(lines, dtype=jnp.int32)
        column, query = index % width, head * (heads // kv_heads) + index // width
        across = jnp.arange(dim, dtype=jnp.int32)
        at = broadcast(row, column[:, None], query[:, None], across[None, :])
        alive = jnp.broadcast_to((column < live[row])[:, None], at[0].shape)
        opening = load(gate[0].at[at]) if gate else None
        part = jnp.arange(parts, dtype=jnp.int32)
        every = broadcast(row, head, part[:, None], index[None, :])
        peaks, sums = load(top.at[every]), load(total.at[every])
        shares = load(values.at[broadcast(
            row, head, part[:, None, None], index[None, :, None], across[None, None, :]
        )])
        highest = jnp.max(peaks, axis=0)
        shift = jnp.where(highest > -jnp.inf, highest, 0.0)
        weights = _exp(peaks - shift[None, :])
        whole = jnp.sum(sums * weights, axis=0)
        weights /= jnp.where(whole > 0.0, whole, 1.0)[None, :]
        mixed = jnp.sum(shares * weights[:, :, None], axis=0).astype(out.dtype)
        if gate:
            opened = mixed.astype(jnp.float32) * jax.nn.sigmoid(opening.astype(jnp.float32))
            mixed = opened.astype(out.dtype)
        store(out.at[at], jnp.where(alive, mixed, jnp.zeros((), out.dtype)))

    return kernel
