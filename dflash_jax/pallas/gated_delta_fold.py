"""The fold of the gated delta rule's records into the committed states, in place.

Implements: ops/gated_delta_rule.py, `gated_delta_fold`.
Matches when: Dk and Dv are powers of two, at least 16.
Assumes: rows of one call write distinct slots, and no row reads a slot that another writes.

One program owns some rows of one value head's state of one row, as in verification, and adds the
accepted columns' increments to it. Entries do not meet, so the memory is what limits it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, broadcast, gpu_call, load, shared, store
from dflash_jax.pallas.gated_delta_rule import Frame, Tiles, groups

_CHANNELS = 256  # of the convolution's history that a program's warp moves


def tiles_of(batch: int, columns: int, interpret: bool) -> Tiles:
    """Whole rows of the state, since entries do not meet. Few programs wait for memory once, with
    all columns' records on the way; the last group runs whole, whatever of it has been accepted."""
    if interpret:
        return Tiles(ahead=False)
    if batch == 1:
        return Tiles(value_dim=8 if columns == 1 else 4, columns=8, depth=128, ahead=False)
    return Tiles(value_dim=16, columns=2, depth=128, ahead=False)


@shared("interpret", "tiles")
def fold(key, delta, decay, inputs, recurrent, conv, path, read_slot, write_slot, count, *,
         interpret, tiles=None):
    """Applies `count` records along `path` to the states of the pools, in place.

    Args: as in the op, with the pools [slots, Hv, Dv, Dk] and [slots, kept, channels], path [B, W]
      int32 (record of each step) and the slots [B] int32 to read and write; a row with count = 0
      writes nothing.
    Returns:
      the pools; donate them in the enclosing jit, or copies are made first.
    """
    batch, columns, value_heads, value_dim = delta.shape
    tiles = tiles or tiles_of(batch, columns, interpret)
    frame, group = Frame.of(tiles, value_dim, key.shape[3], interpret), tiles.group(columns)
    slots, parts = recurrent.shape[0], value_dim // frame.rows
    # Behind the heads come programs for the convolution's history.
    channels = _CHANNELS * frame.num_warps
    further = pl.cdiv(pl.cdiv(conv.shape[2], channels), parts)

    def kernel(key, delta, decay, inputs, pool, conv, path, read_slot, write_slot, count, *outs):
        out, conv_out = outs
        row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        steps, source, target = count[row], read_slot[row], write_slot[row]
        moves = (steps > 0) & (target < slots)

        @pl.when(moves & (head >= value_heads))
        def _():
            begin = ((head - value_heads) * parts + part) * channels
            where = jnp.minimum(source, slots - 1), target
            _shift(inputs, conv, conv_out, path, row, where, steps, begin, channels)

        @pl.when(moves & (head < value_heads))
        def _():
            begin = part * frame.rows

            def loaded(number):
                entries = []
                for offset in range(group):
                    record = path[row, jnp.minimum(number * group + offset, columns - 1)]
                    record = jnp.clip(record, 0, columns - 1)  # past the count it says nothing
                    vector = frame.vector(
                        key, row, record, head // (value_heads // key.shape[2])
                    )
                    deltas = [delta[row, record, head, place] for place in frame.places(begin)]
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

            state = frame.load(pool, jnp.minimum(source, slots - 1), head, begin)
            number = 1 if columns <= group else pl.cdiv(steps, group)
            state = groups(several, number, loaded, state, tiles.ahead)
            frame.store(out, target, head, begin, state)

    return gpu_call(
        kernel,
        name="gated_delta_fold",
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (recurrent, conv)),
        grid=(batch, value_heads + further, parts),
        in_specs=[WHOLE] * 10,
        out_specs=(WHOLE,) * 2,
        aliases={4: 0, 5: 1},
        interpret=interpret,
        num_warps=frame.num_warps,
    )(key, delta, decay, inputs, recurrent, conv, path, read_slot, write_slot, count)


def _shift(inputs, conv, out, path, row, slots, steps, begin, extent):
    """The last columns of history ++ inputs[path[:steps]], of some channels; all of them are read
    before the first is written, since a history may move within its slot."""
    (kept, channels), columns = conv.shape[1:], inputs.shape[1]
    channel = begin + jnp.arange(extent, dtype=jnp.int32)
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


def _step(frame, state, g, deltas, key):
    """M <- alpha M + delta k^T for the pieces of M."""
    alpha = jnp.exp(g)
    return tuple(
        frame.moved(pieces, alpha, delta, key)
        for pieces, delta in zip(state, deltas, strict=True)
    )
