"""Verification and fold of the gated delta rule with the state in registers.

Implements: ops/gated_delta_rule.py, `gated_delta_verify` and `gated_delta_fold`.
Matches when: Dk and Dv are powers of two, at least 16.
Assumes: rows of one call write distinct slots, and no row reads a slot that another writes.

One program owns a [tile, Dk] piece of one value head's state of one row and walks the columns. All
kernels inline the same step on the same tile with the same warps, so a fold reproduces
verification's trajectory bit for bit. On a tree a column whose parent is the column before it goes
on from the registers; any other walks its path again from the committed state, which costs a few
steps and no memory for states.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import (
    WHOLE,
    broadcast,
    gpu_call,
    is_power_of_two,
    load,
    shared,
    store,
)

_CHANNELS = 1024  # of the convolution's history that a program moves
_L2_EPS = 1e-6


@dataclass(frozen=True)
class Tiles:
    """Rows of the state a program holds, its warps, and columns whose records it loads together."""

    value_dim: int = 16
    num_warps: int = 4
    columns: int = 8

    @classmethod
    def of(cls, columns: int, interpret: bool) -> "Tiles":
        """In interpret mode one column at a time: XLA rounds each copy of a step in its own way.

        More than eight columns make a loop, which would spill registers with large groups."""
        return cls(columns=1 if interpret else 8 if columns <= 8 else 4)

    @classmethod
    def of_fold(cls, interpret: bool) -> "Tiles":
        """Fewer columns at once: the last group runs whole, whatever of it has been accepted."""
        return cls(columns=1 if interpret else 2)

    def group(self, columns: int) -> int:
        """Columns of each of equally large groups."""
        return pl.cdiv(columns, pl.cdiv(columns, self.columns))


def supports(key_dim: int, value_dim: int) -> bool:
    """Whether the kernels take heads of these widths."""
    return all(is_power_of_two(n) and n >= 16 for n in (key_dim, value_dim))


@shared("interpret", "tiles")
def verify(query, key, value, decay, recurrent, slot, parent, live, *, interpret, tiles=None):
    """Outputs of the columns; `recurrent` is the pool [slots, Hv, Dv, Dk], read only.

    Args: as in the op, with slot [B] int32 (idle rows out of range) in place of gathered states;
      parent is None for a chain.
    Returns:
      [B, W, Hv, Dv] fp32; columns >= live are exactly zero.
    """
    batch, columns, value_heads, value_dim = value.shape
    tiles = tiles or Tiles.of(columns, interpret)
    rows, group = min(tiles.value_dim, value_dim), tiles.group(columns)
    trail = () if parent is None else _trails(parent)

    def kernel(query, key, value, decay, pool, slot, live, *rest):
        *trail, out = rest
        row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        place = pl.ds(part * rows, rows)
        count = live[row]
        committed = pool[jnp.minimum(slot[row], pool.shape[0] - 1), head, place, :]

        def advance(state, index):
            return _step(state, row, index, head, place, key, value, decay)

        def read(state, index):
            return _read(state, query, row, index, head, value_heads)

        def several(number, state):
            """A few columns of a chain: nothing is stored before all of them are loaded."""
            results = []
            for offset in range(group):
                index = number * group + offset
                there = jnp.minimum(index, columns - 1)
                moved = advance(state, there)
                result = jnp.where(index < count, read(moved, there), 0.0)
                state = jnp.where(index < count, moved, state)
                results.append((index, result))
            for index, result in results:
                at = out.at[broadcast(row, index, head, part * rows + jnp.arange(rows))]
                store(at, result, mask=jnp.broadcast_to(index < columns, result.shape))
            return state

        def column(index, state):
            state = _along(trail, row, index, committed, state, advance)
            out[row, index, head, place] = read(state, index)
            return state

        def blank(index, carry):
            out[row, index, head, place] = jnp.zeros((rows,), jnp.float32)
            return carry

        if trail:
            lax.fori_loop(0, count, column, committed)
            lax.fori_loop(count, columns, blank, 0)
        else:
            _groups(several, pl.cdiv(columns, group), committed)

    operands = (query, key, value, decay, recurrent, slot, live, *trail)
    return gpu_call(
        kernel,
        name="gated_delta_verify" if parent is None else "gated_delta_verify_tree",
        out_shape=jax.ShapeDtypeStruct(value.shape, jnp.float32),
        grid=(batch, value_heads, value_dim // rows),
        in_specs=[WHOLE] * len(operands),
        out_specs=WHOLE,
        interpret=interpret,
        num_warps=tiles.num_warps,
    )(*operands)


def _trails(parent):
    """Per column its root path [B, W, W] int32, where on it to begin, and its length [B, W].

    A column behind its parent begins at its own step, any other at the root.
    """
    width = parent.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)
    on_path = [jnp.broadcast_to(index == 0, parent.shape)]
    for column in range(1, width):
        above = jnp.stack(on_path, axis=1)
        taken = jnp.take_along_axis(above, parent[:, column][:, None, None], axis=1, mode="clip")
        on_path.append(taken[:, 0] | (index == column))
    on_path = jnp.stack(on_path, axis=1)
    length = jnp.sum(on_path, axis=-1, dtype=jnp.int32)
    # Ancestors come before their descendants, so ascending columns are the path.
    path = jnp.sort(jnp.where(on_path, index, width), axis=-1)
    behind = (index > 0) & (parent == index - 1)
    return path, jnp.where(behind, length - 1, 0), length


def _along(trail, row, index, committed, state, advance):
    """The state of a column of a tree from that of the column before it."""
    path, begin, length = trail
    first = begin[row, index]
    state = jnp.where(first == 0, committed, state)
    return lax.fori_loop(
        first, length[row, index], lambda i, state: advance(state, path[row, index, i]), state
    )


def _groups(body, count, state):
    """`body` for groups 0..count-1 of columns; a single one needs no loop."""
    if isinstance(count, int) and count == 1:
        return body(0, state)
    return lax.fori_loop(0, count, body, state)


@shared("interpret", "tiles")
def fold(key, value, decay, inputs, recurrent, conv, path, read_slot, write_slot, count, *,
         interpret, tiles=None):
    """Applies `count` records along `path` to the states of the pools, in place.

    Args: as in the op, with the pools [slots, Hv, Dv, Dk] and [slots, kept, channels], path [B, W]
      int32 (record of each step) and the slots [B] int32 to read and write; a row with count = 0
      writes nothing.
    Returns:
      the pools; donate them in the enclosing jit, or copies are made first.
    """
    batch, columns, value_heads, value_dim = value.shape
    tiles = tiles or Tiles.of_fold(interpret)
    rows, group = min(tiles.value_dim, value_dim), tiles.group(columns)
    slots, parts = recurrent.shape[0], value_dim // rows
    # Behind the heads come programs for the convolution's history.
    further = pl.cdiv(pl.cdiv(conv.shape[2], _CHANNELS), parts)

    def kernel(key, value, decay, inputs, pool, conv, path, read_slot, write_slot, count, *outs):
        out, conv_out = outs
        row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        place = pl.ds(part * rows, rows)
        steps, source, target = count[row], read_slot[row], write_slot[row]
        moves = (steps > 0) & (target < slots)

        @pl.when(moves & (head >= value_heads))
        def _():
            begin = ((head - value_heads) * parts + part) * _CHANNELS
            where = jnp.minimum(source, slots - 1), target
            _shift(inputs, conv, conv_out, path, row, where, steps, begin)

        @pl.when(moves & (head < value_heads))
        def _():
            def several(number, state):
                for offset in range(group):
                    index = number * group + offset
                    record = path[row, jnp.minimum(index, columns - 1)]
                    record = jnp.clip(record, 0, columns - 1)  # past the count it says nothing
                    moved = _step(state, row, record, head, place, key, value, decay)
                    state = jnp.where(index < steps, moved, state)
                return state

            state = pool[jnp.minimum(source, slots - 1), head, place, :]
            groups = 1 if group == columns else pl.cdiv(steps, group)
            out[target, head, place, :] = _groups(several, groups, state)

    return gpu_call(
        kernel,
        name="gated_delta_fold",
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (recurrent, conv)),
        grid=(batch, value_heads + further, parts),
        in_specs=[WHOLE] * 10,
        out_specs=(WHOLE,) * 2,
        aliases={4: 0, 5: 1},
        interpret=interpret,
        num_warps=tiles.num_warps,
    )(key, value, decay, inputs, recurrent, conv, path, read_slot, write_slot, count)


def _shift(inputs, conv, out, path, row, slots, steps, begin):
    """The last columns of history ++ inputs[path[:steps]], of some channels; all of them are read
    before the first is written, since a history may move within its slot."""
    (kept, channels), columns = conv.shape[1:], inputs.shape[1]
    channel = begin + jnp.arange(_CHANNELS, dtype=jnp.int32)
    known = channel < channels
    moved = []
    for place in range(kept):
        index = steps + place
        older = jnp.minimum(index, kept - 1)
        record = path[row, jnp.clip(index - kept, 0, columns - 1)]
        record = jnp.clip(record, 0, columns - 1)
        history = load(conv.at[broadcast(slots[0], older, channel)], mask=known, other=0.0)
        new = load(inputs.at[broadcast(row, record, channel)], mask=known, other=0.0)
        moved.append(jnp.where(index < kept, history, new))
    for place, values in enumerate(moved):
        store(out.at[broadcast(slots[1], place, channel)], values, mask=known)


def _step(state, row, index, head, place, key, value, decay):
    """M <- alpha M + beta (v - alpha M k) k^T for a [rows, Dk] piece of M."""
    k = _unit(key, row, index, _key_head(head, key, value), state)
    v = value[row, index, head, place].astype(jnp.float32)
    alpha, beta = jnp.exp(decay[row, index, head, 0]), decay[row, index, head, 1]
    decayed = alpha * state
    delta = beta * (v - jnp.sum(decayed * k, axis=1))
    return decayed + delta[:, None] * k


def _read(state, query, row, index, head, value_heads):
    q = _unit(query, row, index, head // (value_heads // query.shape[2]), state)
    return jnp.sum(state * q, axis=1) * state.shape[1] ** -0.5


def _key_head(head, key, value):
    return head // (value.shape[2] // key.shape[2])


def _unit(vectors, row, index, head, state):
    """A unit vector, the same in every row of a tile like the state's: no thread waits for another
    warp's share of it."""
    depth = jnp.arange(state.shape[1], dtype=jnp.int32)[None, :]
    same = jnp.zeros((state.shape[0], 1), jnp.int32)
    wide = load(vectors.at[broadcast(row, index, head, depth + same)]).astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(wide * wide, axis=1) + _L2_EPS)[:, None]
