"""The experts of many tokens: choices sorted by expert, in tiles of rows that share one.

Implements: ops/sparse_moe.py, the expert outputs of `expert_parts`.
Matches when: more than 128 tokens; else as pallas/sparse_moe.py.

Three launches. A program of the first owns an expert e: it counts the choices of lower experts, c,
and lists e's in tiles of b rows from tile c // b + e on. At most one tile then stays empty before
those of the next expert, so no program needs another's count, and the number of tiles is known
beforehand. The other two multiply a tile's rows with pieces of its expert's matrices: gate and up
with SwiGLU from the rows of x that the list names, and down into the rows [token, rank] of the
result. Tiles of one expert with the same piece are neighbours, so memory is read about once.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import (
    WHOLE,
    gpu_call,
    load,
    places,
    shared,
    step_within,
    store,
)
from dflash_jax.pallas.sparse_moe import blocks_of, product

_LISTED = 4096  # choices that a program of the sort looks at in a step
_FILLED = 128  # equal entries that it writes in a step
_NOBODY = jnp.iinfo(jnp.int32).max


@dataclass(frozen=True)
class Tiles:
    """Choices of a tile; matrix rows of a program, and the stretch of a product's sum that a step
    takes; warps and steps in flight of gate and up, and of down."""

    rows: int
    inner: int
    hidden: int
    inner_step: int
    hidden_step: int
    num_warps: tuple[int, int] = (4, 4)
    num_stages: tuple[int, int] = (4, 4)

    @classmethod
    def of(cls, share: float, hidden: int, inner: int, dtype, columns=()) -> "Tiles":
        """For `share` choices an expert of width `inner`, tokens of width `hidden`, and the columns
        of a block of those matrices that have blocks."""
        if dtype == jnp.float32:  # products without tensor cores
            rows, most = 16, (32, 32, 32)
        elif share < 64:
            rows, most = 64, (64, 128, 64)
        else:  # blocks' values are widened in registers, which large pieces would spill
            rows, most = 128, (64, 128, 64) if columns else (128, 256, 64)
        warps = 8 if rows == 128 else 4
        return cls(
            rows=rows, inner=step_within(inner, (), most[0]),
            hidden=step_within(hidden, (), most[1]),
            inner_step=step_within(inner, columns, most[2]),
            hidden_step=step_within(hidden, columns, most[2]), num_warps=(warps, warps),
        )


@shared("interpret", "columns", "tiles")
def expert_outputs(
    x, experts, gate_up, down, *, interpret: bool, scales=(None, None), columns=(0, 0), tiles=None
):
    """What every chosen expert makes of its token. Arguments and result as in pallas/sparse_moe.py.
    """
    (tokens, hidden), k, (count, _, inner) = x.shape, experts.shape[1], down.shape
    used = tuple(c for c, scale in zip(columns, scales, strict=True) if scale is not None)
    choices = tokens * k
    tiles = tiles or Tiles.of(choices / count, hidden, inner, x.dtype, used)
    order, table = sort(experts.reshape(-1), count, tiles.rows, interpret)

    def call(name, which, kernel, out, rows, *operands):
        return gpu_call(
            kernel, name=name, out_shape=out, grid=(len(table), out.shape[1] // rows),
            in_specs=[WHOLE] * len(operands), out_specs=WHOLE, interpret=interpret,
            num_warps=tiles.num_warps[which], num_stages=tiles.num_stages[which],
        )(*operands)

    blocks, values = blocks_of(gate_up, scales[0], columns[0])
    mixed = call(
        "sparse_moe_tiles_gate_up", 0, _gate_up_kernel(tiles, choices, k, blocks, interpret),
        jax.ShapeDtypeStruct((len(order), inner), x.dtype), tiles.inner,
        x, order, table, gate_up, *values,
    )
    blocks, values = blocks_of(down, scales[1], columns[1])
    outputs = call(
        "sparse_moe_tiles_down", 1, _down_kernel(tiles, choices, blocks, interpret),
        jax.ShapeDtypeStruct((choices, hidden), jnp.float32), tiles.hidden,
        mixed, order, table, down, *values,
    )
    return outputs.reshape(tokens, k, hidden)


def sort(experts, count: int, rows: int, interpret: bool):
    """Choices by expert, in their order, in tiles of `rows`.

    Args:
      experts: [n] int32 in [0, count).
    Returns:
      order: [tiles * rows] int32, the choices of a tile and then n; tiles = n // rows + count.
      table: [tiles] int32: a tile's expert, also where it has no choice.
    """
    choices = experts.shape[0]
    tiles = choices // rows + count
    width = min(_LISTED, max(16, pl.next_power_of_2(choices)))

    def kernel(experts, order, table):
        own = pl.program_id(0)

        def read(block):
            place = block * width + jnp.arange(width, dtype=jnp.int32)
            return place, load(experts.at[place], mask=place < choices, other=_NOBODY)

        def tally(block, sums):
            _, ids = read(block)
            return tuple(
                total + found.astype(jnp.int32)
                for total, found in zip(sums, (ids < own, ids == own), strict=True)
            )

        steps, empty = pl.cdiv(choices, width), jnp.zeros((width,), jnp.int32)
        lower, size = (jnp.sum(x) for x in lax.fori_loop(0, steps, tally, (empty, empty)))
        begin, end = lower // rows + own, (lower + size) // rows + own + 1
        end = jnp.where(own == count - 1, tiles, end)

        def put(block, start):
            place, ids = read(block)
            mine = ids == own
            rank = jnp.cumsum(mine.astype(jnp.int32)) - 1
            # Others point outside: interpret mode would write the old values back where they point.
            store(order.at[jnp.where(mine, start + rank, tiles * rows)], place, mask=mine)
            return start + jnp.sum(mine.astype(jnp.int32))

        filled = lax.fori_loop(0, steps, put, begin * rows)
        _fill(order, filled, end * rows, choices)
        _fill(table, begin, end, own)

    return gpu_call(
        kernel, name="sparse_moe_sort",
        out_shape=tuple(jax.ShapeDtypeStruct((n,), jnp.int32) for n in (tiles * rows, tiles)),
        grid=(count,), in_specs=[WHOLE], out_specs=(WHOLE,) * 2, interpret=interpret, num_warps=8,
    )(experts)


def _fill(ref, start, stop, value):
    def step(index, carry):
        place = start + index * _FILLED + jnp.arange(_FILLED, dtype=jnp.int32)
        store(ref.at[place], jnp.broadcast_to(value, place.shape), mask=place < stop)
        return carry

    lax.fori_loop(0, pl.cdiv(stop - start, _FILLED), step, 0)


def _tile(order, tile, rows: int):
    """A tile's places in the list and the choices there."""
    place = tile * rows + jnp.arange(rows, dtype=jnp.int32)
    return place, order[pl.ds(tile * rows, rows)]


def _rows(ref, row, live, first, width: int):
    """[rows, width] of a matrix from column `first` on, zero where not live."""
    at = places(row, first + jnp.arange(width, dtype=jnp.int32))
    return load(ref.at[at], mask=jnp.broadcast_to(live[:, None], at[0].shape), other=0.0)


def _put(ref, row, live, first, made):
    at = places(row, first + jnp.arange(made.shape[1], dtype=jnp.int32))
    store(ref.at[at], made.astype(ref.dtype), mask=jnp.broadcast_to(live[:, None], made.shape))


def _gate_up_kernel(tiles: Tiles, choices: int, k: int, blocks, interpret):
    def kernel(x, order, table, gate_up, *scale_and_out):
        *scale, out = scale_and_out
        tile, block = pl.program_id(0), pl.program_id(1)
        expert, inner = table[tile], out.shape[1]

        @pl.when(order[tile * tiles.rows] < choices)
        def _():
            place, choice = _tile(order, tile, tiles.rows)
            live, begin = choice < choices, block * tiles.inner

            def step(index, sums):
                first = index * tiles.hidden_step
                part = _rows(x, choice // k, live, first, tiles.hidden_step)
                return tuple(
                    total + product(
                        part, gate_up, scale, blocks, (expert, start, tiles.inner, first), interpret
                    )
                    for total, start in zip(sums, (begin, inner + begin), strict=True)
                )

            empty = jnp.zeros((tiles.rows, tiles.inner), jnp.float32)
            steps = x.shape[1] // tiles.hidden_step
            gate, up = lax.fori_loop(0, steps, step, (empty, empty))
            _put(out, place, live, begin, gate * jax.nn.sigmoid(gate) * up)

    return kernel


def _down_kernel(tiles: Tiles, choices: int, blocks, interpret):
    def kernel(mixed, order, table, down, *scale_and_out):
        *scale, out = scale_and_out
        tile, block = pl.program_id(0), pl.program_id(1)
        expert = table[tile]

        @pl.when(order[tile * tiles.rows] < choices)
        def _():
            place, choice = _tile(order, tile, tiles.rows)
            live, begin = choice < choices, block * tiles.hidden

            def step(index, total):
                first = index * tiles.inner_step
                part = _rows(mixed, place, live, first, tiles.inner_step)
                at = expert, begin, tiles.hidden, first
                return total + product(part, down, scale, blocks, at, interpret)

            steps = mixed.shape[1] // tiles.inner_step
            empty = jnp.zeros((tiles.rows, tiles.hidden), jnp.float32)
            _put(out, choice, live, begin, lax.fori_loop(0, steps, step, empty))

    return kernel
