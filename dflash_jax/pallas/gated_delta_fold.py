"""The fold of the gated delta rule's records into the committed states, in place.

Implements: ops/gated_delta_rule.py, `gated_delta_fold`.
Matches when: Dk and Dv are powers of two, at least 16.
Assumes: rows of one call write distinct slots, and no row reads a slot that another writes.

One program owns some rows of one value head's state of one row, as in verification, and adds the
accepted columns' increments to it. Entries do not meet, so the memory is what limits it, and a
launch folds several layers: one layer's states are few, and its programs wait for their loads.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, broadcast, gpu_call, load, shared, store
from dflash_jax.pallas.gated_delta_rule import Frame, Tiles, groups

LAYERS = 6  # of a launch: one row's programs fill an H200; code and compile time grow with them
_CHANNELS = 256  # of the convolution's history that a program's warp moves


def tiles_of(states: int, columns: int, interpret: bool) -> Tiles:
    """For so many rows of all layers. The programs of one wait for memory once, with the records of
    all columns on the way; for many the code is short, since it is there for every layer. The last
    group runs whole, whatever of it has been accepted."""
    if interpret:
        return Tiles(ahead=False)
    if states == 1:
        return Tiles(value_dim=8 if columns == 1 else 4, columns=8, depth=128, ahead=False)
    return Tiles(value_dim=8, columns=2, ahead=False)


@shared("interpret", "tiles")
def fold(layers, path, read_slot, write_slot, count, *, interpret, tiles=None):
    """Applies `count` records along `path` to the states of the layers' pools, in place.

    Args: as in the op, with a tuple of layers alike, each (key, delta, decay, inputs, recurrent,
      conv) with the pools [slots, Hv, Dv, Dk] and [slots, kept, channels]; path [B, W] int32
      (record of each step) and the slots [B] int32 to read and write; a row with count = 0 or a
      slot out of range writes nothing.
    Returns:
      (recurrent, conv) of each layer; donate the pools in the enclosing jit, or copies are made
      first.
    """
    key, delta, _, _, recurrent, conv = layers[0]
    batch, columns, value_heads, value_dim = delta.shape
    tiles = tiles or tiles_of(batch * len(layers), columns, interpret)
    frame = Frame.of(tiles, value_dim, key.shape[3], interpret)
    slots, parts, each = recurrent.shape[0], value_dim // frame.rows, len(layers[0])
    # Behind the heads come programs for the convolution's history.
    channels = _CHANNELS * frame.num_warps
    further = pl.cdiv(pl.cdiv(conv.shape[2], channels), parts)

    def kernel(path, read_slot, write_slot, count, *refs):
        head, part, line = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        row, layer = line % batch, line // batch
        steps, source, target = count[row], read_slot[row], write_slot[row]
        moves = (steps > 0) & (jnp.minimum(source, target) >= 0)
        moves = moves & (jnp.maximum(source, target) < slots)
        where = row, source, target
        for index in range(len(layers)):
            given = refs[each * index : each * (index + 1)]
            outs = refs[each * len(layers) + 2 * index :][:2]
            mine = moves & (layer == index)

            @pl.when(mine & (head >= value_heads))
            def _(given=given, outs=outs):
                begin = ((head - value_heads) * parts + part) * channels
                _shift(given[3], given[5], outs[1], path, where, steps, begin, channels)

            @pl.when(mine & (head < value_heads))
            def _(given=given, outs=outs):
                place = head, part * frame.rows
                _fold_rows(frame, tiles, given[:3], given[4], outs[0], path, where, steps, place)

    flat, small = [x for layer in layers for x in layer], (path, read_slot, write_slot, count)
    pools = [len(small) + each * i + which for i in range(len(layers)) for which in (4, 5)]
    made = gpu_call(
        kernel,
        name="gated_delta_fold",
        out_shape=tuple(
            jax.ShapeDtypeStruct(x.shape, x.dtype) for layer in layers for x in layer[4:]
        ),
        grid=(value_heads + further, parts, batch * len(layers)),
        in_specs=[WHOLE] * (len(small) + len(flat)),
        out_specs=(WHOLE,) * len(pools),
        aliases={place: out for out, place in enumerate(pools)},
        interpret=interpret,
        num_warps=frame.num_warps,
    )(*small, *flat)
    return tuple(zip(made[::2], made[1::2], strict=True))


def _fold_rows(frame, tiles, records, pool, out, path, where, steps, place):
    """Folds the rows of a head's state from `place` = (head, first row) on."""
    (key, delta, decay), (row, source, target), (head, begin) = records, where, place
    columns, group = delta.shape[1], tiles.group(delta.shape[1])
    shared_by = delta.shape[2] // key.shape[2]

    def loaded(number):
        entries = []
        for offset in range(group):
            record = path[row, jnp.minimum(number * group + offset, columns - 1)]
            record = jnp.clip(record, 0, columns - 1)  # past the count it says nothing
            vector = frame.vector(key, row, record, head // shared_by)
            deltas = [delta[row, record, head, at] for at in frame.places(begin)]
            entries.append((decay[row, record, head, 0], deltas, vector))
        return entries

    def several(number, state, entries):
        for offset, entry in enumerate(entries):
            step = functools.partial(_step, frame, state, *entry)
            if group == 1:
                state = step()
            else:
                alive = number * group + offset < steps
                state = lax.cond(alive, step, lambda s=state: s)
        return state

    state = frame.load(pool, source, head, begin)
    number = 1 if columns <= group else pl.cdiv(steps, group)
    state = groups(several, number, loaded, state, tiles.ahead)
    frame.store(out, target, head, begin, state)


def _shift(inputs, conv, out, path, where, steps, begin, extent):
    """The last columns of history ++ inputs[path[:steps]], of some channels; all of them are read
    before the first is written, since a history may move within its slot."""
    (kept, channels), columns = conv.shape[1:], inputs.shape[1]
    row, source, target = where
    channel = begin + jnp.arange(extent, dtype=jnp.int32)
    known = channel < channels
    moved = []
    for place in range(kept):
        index = steps + place
        older = jnp.minimum(index, kept - 1)
        record = path[row, jnp.clip(index - kept, 0, columns - 1)]
        record = jnp.clip(record, 0, columns - 1)
        history = load(conv.at[broadcast(source, older, channel)], mask=known, other=0.0)
        new = load(inputs.at[broadcast(row, record, channel)], mask=known, other=0.0)
        moved.append(jnp.where(index < kept, history, new))
    for place, values in enumerate(moved):
        store(out.at[broadcast(target, place, channel)], values, mask=known)


def _step(frame, state, g, deltas, key):
    """M <- alpha M + delta k^T for the pieces of M."""
    alpha = jnp.exp(g)
    return tuple(
        frame.moved(pieces, alpha, delta, key)
        for pieces, delta in zip(state, deltas, strict=True)
    )
