"""Verification and fold of the gated delta rule with the state in registers.

Implements: ops/gated_delta_rule.py, `gated_delta_verify` and `gated_delta_fold`.
Matches when: Dk and Dv are powers of two, at least 16.
Assumes: rows of one call write distinct slots, and no row reads a slot that another writes.

One program owns some rows of one value head's state of one row and walks the columns. It holds them
in pieces [height, depth] of few key entries, so that a row's products are added within a thread
and between a few lanes of a warp; sums over 32 lanes take longer than the products. A vector's norm
is a factor of its products. All kernels inline the same step on the same pieces, so a fold
reproduces verification's trajectory bit for bit. On a tree a column whose parent is the column
before it goes on from the registers; any other walks its path again from the committed state, which
costs a few steps and no memory for states.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import (
    WHOLE,
    broadcast,
    fused,
    gpu_call,
    is_power_of_two,
    load,
    shared,
    store,
)

_CHANNELS = 256  # of the convolution's history that a program's warp moves
_L2_EPS = 1e-6


@dataclass(frozen=True)
class Tiles:
    """Rows of the state a program holds and its warps; columns whose inputs it loads together, and
    whether during the work on those before; key entries of a piece, alike in verification and fold.
    """

    value_dim: int = 8
    num_warps: int = 1
    columns: int = 1
    depth: int = 32
    ahead: bool = True

    @classmethod
    def of(cls, batch: int, columns: int, interpret: bool) -> "Tiles":
        """Few rows need many small programs, many rows large ones that share a key among more of
        the state. More columns in one go take long to compile.

        In interpret mode one column at a time: XLA rounds each copy of a step in its own way."""
        many = columns > 1 and not interpret
        if batch == 1:
            return cls(value_dim=8, columns=2 if many else 1, ahead=many)
        return cls(value_dim=16, ahead=many)

    @classmethod
    def of_fold(cls, batch: int, columns: int, interpret: bool) -> "Tiles":
        """The same for the fold, whose last group runs whole, whatever of it has been accepted."""
        many = columns > 1 and not interpret
        if batch == 1:
            return cls(value_dim=8, columns=2 if many else 1, ahead=False)
        return cls(value_dim=16, ahead=many)

    def group(self, columns: int) -> int:
        """Columns of each of equally large groups."""
        return pl.cdiv(columns, pl.cdiv(columns, self.columns))


@dataclass(frozen=True)
class Frame:
    """A program's rows of a head's state, in pieces of which every thread holds four entries."""

    rows: int
    key_dim: int
    height: int
    depth: int
    num_warps: int
    interpret: bool

    @classmethod
    def of(cls, tiles: Tiles, value_dim: int, key_dim: int, interpret: bool) -> "Frame":
        """In interpret mode all rows in one piece: fewer operations."""
        if interpret:
            return cls(value_dim, key_dim, value_dim, key_dim, tiles.num_warps, interpret)
        rows, depth = min(tiles.value_dim, value_dim), min(tiles.depth, key_dim)
        warps = min(tiles.num_warps, rows * depth // 128)
        return cls(rows, key_dim, 128 * warps // depth, depth, warps, interpret)

    def places(self, begin):
        """Of the pieces' rows, from row `begin` of the head on."""
        return [pl.ds(begin + at, self.height) for at in range(0, self.rows, self.height)]

    def depths(self):
        """Of the pieces' key entries."""
        return [pl.ds(at, self.depth) for at in range(0, self.key_dim, self.depth)]

    def load(self, pool, slot, head, begin):
        """The state: for each place, its pieces [height, depth]."""
        return tuple(
            tuple(pool[slot, head, place, over] for over in self.depths())
            for place in self.places(begin)
        )

    def store(self, pool, slot, head, begin, state):
        for place, pieces in zip(self.places(begin), state, strict=True):
            for over, piece in zip(self.depths(), pieces, strict=True):
                pool[slot, head, place, over] = piece

    def vector(self, vectors, row, index, head):
        """Pieces like the state's, the same in every row: each thread loads what it needs."""
        depth = jnp.arange(self.depth, dtype=jnp.int32)[None, :]
        same = jnp.zeros((self.height, 1), jnp.int32)
        return tuple(
            load(vectors.at[broadcast(row, index, head, begin + depth + same)])
            for begin in range(0, self.key_dim, self.depth)
        )

    def fused(self, left, right, addend):
        return fused(left, right, addend, interpret=self.interpret)

    def along_keys(self, pieces, vector):
        """[height], products summed over Dk."""
        total = pieces[0] * vector[0]
        for piece, x in zip(pieces[1:], vector[1:], strict=True):
            total = self.fused(piece, x, total)
        return jnp.sum(total, axis=1)


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
    tiles = tiles or Tiles.of(batch, columns, interpret)
    frame, group = Frame.of(tiles, value_dim, key.shape[3], interpret), tiles.group(columns)
    trail = () if parent is None else _trails(parent)

    def kernel(query, key, value, decay, pool, slot, live, *rest):
        *trail, out = rest
        row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        begin, count = part * frame.rows, live[row]
        source = jnp.minimum(slot[row], pool.shape[0] - 1)

        def record(index):
            return _record(frame, row, index, head, begin, key, value, decay)

        def asked(index):
            return frame.vector(query, row, index, head // (value_heads // query.shape[2]))

        def put(index, results):
            for place, result in zip(frame.places(begin), results, strict=True):
                out[row, index, head, place] = result

        def indices(number):
            return [jnp.minimum(number * group + offset, columns - 1) for offset in range(group)]

        def loaded(number):
            return [(record(index), asked(index)) for index in indices(number)]

        def several(number, state, entries):
            """A few columns of a chain: nothing is stored before all of them are loaded."""
            results = []
            for offset, (entry, vector) in enumerate(entries):
                state = _step(frame, state, entry)
                alive = number * group + offset < count
                results.append([jnp.where(alive, x, 0.0) for x in _read(frame, state, vector)])
            for offset, (index, result) in enumerate(zip(indices(number), results, strict=True)):
                # A group may reach past the last column, whose place is then that column's again.
                if columns % group == 0:
                    put(index, result)
                else:
                    pl.when(number * group + offset < columns)(
                        functools.partial(put, index, result)
                    )
            return state

        def column(index, state):
            state = _along(
                trail, row, index, state, lambda: frame.load(pool, source, head, begin),
                lambda state, index: _step(frame, state, record(index)),
            )
            put(index, _read(frame, state, asked(index)))
            return state

        def blank(index, carry):
            put(index, [jnp.zeros((frame.height,), jnp.float32)] * (frame.rows // frame.height))
            return carry

        committed = frame.load(pool, source, head, begin)
        if trail:
            lax.fori_loop(0, count, column, committed)
            lax.fori_loop(count, columns, blank, 0)
        else:
            groups = 1 if columns <= group else pl.cdiv(count, group)
            _groups(several, groups, loaded, committed, tiles.ahead)
            lax.fori_loop(groups * group, columns, blank, 0)

    operands = (query, key, value, decay, recurrent, slot, live, *trail)
    return gpu_call(
        kernel,
        name="gated_delta_verify" if parent is None else "gated_delta_verify_tree",
        out_shape=jax.ShapeDtypeStruct(value.shape, jnp.float32),
        grid=(batch, value_heads, value_dim // frame.rows),
        in_specs=[WHOLE] * len(operands),
        out_specs=WHOLE,
        interpret=interpret,
        num_warps=frame.num_warps,
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


def _along(trail, row, index, state, committed, advance):
    """The state of a column of a tree from that of the column before it."""
    path, begin, length = trail
    first = begin[row, index]
    state = lax.cond(first == 0, committed, lambda: state)
    return lax.fori_loop(
        first, length[row, index], lambda i, state: advance(state, path[row, index, i]), state
    )


def _groups(body, count, load, state, ahead):
    """`body` for groups 0..count-1 of columns, one's inputs loaded before the last one's work."""
    if isinstance(count, int) and count == 1:
        return body(0, state, load(0))
    if not ahead:
        return lax.fori_loop(0, count, lambda i, state: body(i, state, load(i)), state)

    def step(number, carry):
        state, entries = carry
        following = load(number + 1)
        return body(number, state, entries), following

    return lax.fori_loop(0, count, step, (state, load(0)))[0]


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
    tiles = tiles or Tiles.of_fold(batch, columns, interpret)
    frame, group = Frame.of(tiles, value_dim, key.shape[3], interpret), tiles.group(columns)
    slots, parts = recurrent.shape[0], value_dim // frame.rows
    # Behind the heads come programs for the convolution's history.
    channels = _CHANNELS * frame.num_warps
    further = pl.cdiv(pl.cdiv(conv.shape[2], channels), parts)

    def kernel(key, value, decay, inputs, pool, conv, path, read_slot, write_slot, count, *outs):
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
                    entries.append(_record(frame, row, record, head, begin, key, value, decay))
                return entries

            def several(number, state, entries):
                for offset, entry in enumerate(entries):
                    step = functools.partial(_step, frame, state, entry)
                    if group == 1:
                        state = step()
                    else:
                        alive = number * group + offset < steps
                        state = lax.cond(alive, step, lambda s=state: s)
                return state

            state = frame.load(pool, jnp.minimum(source, slots - 1), head, begin)
            state = _groups(several, pl.cdiv(steps, group), loaded, state, tiles.ahead)
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
    )(key, value, decay, inputs, recurrent, conv, path, read_slot, write_slot, count)


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


def _record(frame, row, index, head, begin, key, value, decay):
    """What a column's step reads: its raw key, its values a piece each, g and beta."""
    vector = frame.vector(key, row, index, head // (value.shape[2] // key.shape[2]))
    values = tuple(value[row, index, head, place] for place in frame.places(begin))
    return vector, values, decay[row, index, head, 0], decay[row, index, head, 1]


def _step(frame, state, record):
    """M <- alpha M + beta (v - alpha M k) k^T for the pieces of M."""
    key, values, g, beta = record
    k, alpha = _wide(key), jnp.exp(g)
    unit = _unit(frame, k)
    moved = []
    for pieces, v in zip(state, values, strict=True):
        decayed = tuple(alpha * piece for piece in pieces)
        delta = beta * (v.astype(jnp.float32) - unit * frame.along_keys(decayed, k))
        pull = (delta * unit)[:, None]
        moved.append(
            tuple(frame.fused(pull, x, piece) for piece, x in zip(decayed, k, strict=True))
        )
    return tuple(moved)


def _read(frame, state, query):
    """M q / sqrt(Dk), a piece's rows each."""
    q = _wide(query)
    unit = _unit(frame, q) * frame.key_dim**-0.5
    return [unit * frame.along_keys(pieces, q) for pieces in state]


def _wide(vector):
    return tuple(piece.astype(jnp.float32) for piece in vector)


def _unit(frame, vector):
    """What makes a vector one of length 1, in every row."""
    return lax.rsqrt(frame.along_keys(vector, vector) + _L2_EPS)
