"""Verification by the gated delta rule with the state in registers.

Implements: ops/gated_delta_rule.py, `gated_delta_verify`; the fold is pallas/gated_delta_fold.py.
Matches when: Dk and Dv are powers of two, at least 16.

One program owns some rows of one value head's state of one row and walks the columns. It holds them
in pieces [height, depth] of few key entries, so that a row's products are added within a thread
and between a few lanes of a warp; sums over 32 lanes take longer than the products. It leaves each
column's delta, from which the fold makes the same state without a sum, whatever its pieces: a state
moves by `Frame.moved` in both, entry by entry. On a tree a column whose parent is the column before
it goes on from the registers; any other walks its path again from the committed state, which costs
a few steps and no memory for states.
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
)


@dataclass(frozen=True)
class Tiles:
    """Rows of the state a program holds and its warps; columns whose inputs it loads together, and
    whether during the work on those before; key entries of a piece.
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
        return cls(value_dim=16, depth=16 if many else 32, ahead=many)

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
        depth = min(tiles.depth, key_dim)
        rows = min(max(tiles.value_dim, 128 // depth), value_dim)
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

    def moved(self, pieces, alpha, delta, key):
        """alpha M + delta key^T for the pieces of some rows; delta [height]."""
        return tuple(
            self.fused(delta[:, None], x, alpha * piece)
            for piece, x in zip(pieces, key, strict=True)
        )

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
      outputs and deltas, [B, W, Hv, Dv] fp32 both; outputs of columns >= live are exactly zero.
    """
    batch, columns, value_heads, value_dim = value.shape
    tiles = tiles or Tiles.of(batch, columns, interpret)
    frame, group = Frame.of(tiles, value_dim, key.shape[3], interpret), tiles.group(columns)
    trail = () if parent is None else _trails(parent)

    def kernel(query, key, value, decay, pool, slot, live, *rest):
        *trail, out, kept = rest
        row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        begin, count = part * frame.rows, live[row]
        source = jnp.clip(slot[row], 0, pool.shape[0] - 1)

        def vector(vectors, index):
            return frame.vector(vectors, row, index, head // (value_heads // vectors.shape[2]))

        def record(index):
            """What a column's step reads: its key, its values a piece each, g and beta."""
            values = tuple(value[row, index, head, place] for place in frame.places(begin))
            gates = decay[row, index, head, 0], decay[row, index, head, 1]
            return vector(key, index), values, *gates

        def put(index, outputs, deltas):
            for to, results in ((out, outputs), (kept, deltas)):
                for place, result in zip(frame.places(begin), results, strict=True):
                    to[row, index, head, place] = result

        def indices(number):
            return [jnp.minimum(number * group + offset, columns - 1) for offset in range(group)]

        def loaded(number):
            return [(record(index), vector(query, index)) for index in indices(number)]

        def several(number, state, entries):
            """A few columns of a chain: nothing is stored before all of them are loaded."""
            results = []
            for offset, (entry, asked) in enumerate(entries):
                state, deltas = _step(frame, state, entry)
                alive = number * group + offset < count
                outputs = [jnp.where(alive, x, 0.0) for x in _read(frame, state, asked)]
                results.append((outputs, deltas))
            for offset, (index, result) in enumerate(zip(indices(number), results, strict=True)):
                # A group may reach past the last column, whose place is then that column's again.
                if columns % group == 0:
                    put(index, *result)
                else:
                    pl.when(number * group + offset < columns)(
                        functools.partial(put, index, *result)
                    )
            return state

        def column(index, state):
            state, deltas = _along(
                trail, row, index, state, lambda: frame.load(pool, source, head, begin),
                lambda state, index: _step(frame, state, record(index)),
            )
            put(index, _read(frame, state, vector(query, index)), deltas)
            return state

        def blank(index, carry):
            zeros = [jnp.zeros((frame.height,), jnp.float32)] * (frame.rows // frame.height)
            put(index, zeros, zeros)
            return carry

        committed = frame.load(pool, source, head, begin)
        if trail:
            lax.fori_loop(0, count, column, committed)
            lax.fori_loop(count, columns, blank, 0)
        else:
            number = 1 if columns <= group else pl.cdiv(count, group)
            groups(several, number, loaded, committed, tiles.ahead)
            lax.fori_loop(number * group, columns, blank, 0)

    operands = (query, key, value, decay, recurrent, slot, live, *trail)
    return gpu_call(
        kernel,
        name="gated_delta_verify" if parent is None else "gated_delta_verify_tree",
        out_shape=(jax.ShapeDtypeStruct(value.shape, jnp.float32),) * 2,
        grid=(batch, value_heads, value_dim // frame.rows),
        in_specs=[WHOLE] * len(operands),
        out_specs=(WHOLE,) * 2,
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
    """State and deltas of a column of a tree from the state of the column before it."""
    path, begin, length = trail
    first, last = begin[row, index], length[row, index] - 1
    state = lax.cond(first == 0, committed, lambda: state)
    state = lax.fori_loop(
        first, last, lambda i, state: advance(state, path[row, index, i])[0], state
    )
    return advance(state, path[row, index, last])


def groups(body, count, load, state, ahead):
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


def _step(frame, state, record):
    """Pieces of M <- alpha M + delta k^T, and delta = beta (v - alpha M k) for the rows of each."""
    key, values, g, beta = record
    alpha = jnp.exp(g)
    moved, deltas = [], []
    for pieces, v in zip(state, values, strict=True):
        delta = beta * (v.astype(jnp.float32) - alpha * frame.along_keys(pieces, key))
        moved.append(frame.moved(pieces, alpha, delta, key))
        deltas.append(delta)
    return tuple(moved), deltas


def _read(frame, state, query):
    """M q, a piece's rows each."""
    return [frame.along_keys(pieces, query) for pieces in state]
