"""A Gated DeltaNet layer from its projection to its recurrence's outputs, for a chain of columns.

Implements: ops/gated_delta_block.py, `gated_delta_block`.
Matches when: columns form a chain, W <= 32; there are two taps or more; Dk and Dv are powers of
two, at least 16.

One program owns up to 64 value rows of a head: convolution, SiLU, norms and gates of its columns,
then the recurrence without a loop over states. With G_i the sum of the decays up to column i, and
committed state M, the increments of the chain solve a triangular system in the columns alone:

    delta_i = beta_i (v_i - exp(G_i) M k_i - sum_(j<i) exp(G_i - G_j) (k_j . k_i) delta_j)
    o_i     = exp(G_i) M q_i + sum_(j<=i) exp(G_i - G_j) (k_j . q_i) delta_j

so M meets all keys and queries in one product. A longer chain goes on from the state after each
eight columns. Keys are rows 0..P-1 of a tile, P = 8, the queries of the same columns rows P..2P-1.
Source: contracts 6.3.4; the chunk form of the op's prefill.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import (
    WHOLE,
    broadcast,
    dot,
    dot_three_passes,
    gpu_call,
    is_power_of_two,
    load,
    shared,
    store,
)

MAX_WIDTH = 32
P = 8  # columns of a step
_L2_EPS = 1e-6


@dataclass(frozen=True)
class Tiles:
    """Value rows of a program, and its warps."""

    rows: int
    num_warps: int

    @classmethod
    def of(cls, width: int, value_dim: int) -> "Tiles":
        """For W columns; more rows or fewer warps would spill registers."""
        return cls(rows=min(64 if width <= P else 16, value_dim), num_warps=8)


@dataclass(frozen=True)
class Sizes:
    """Of one call: columns, heads, head widths, taps of the convolution, a program's value rows."""

    width: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    rows: int

    @classmethod
    def of(cls, projected, recurrent, taps, key_heads: int, rows: int) -> "Sizes":
        width, (value_heads, value_dim, key_dim) = projected.shape[1], recurrent.shape[1:]
        return cls(
            width=width, key_heads=key_heads, value_heads=value_heads, key_dim=key_dim,
            value_dim=value_dim, taps=taps.shape[1], rows=rows,
        )

    @property
    def keys(self) -> int:
        """First channel of the keys; the queries come before."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return 2 * self.keys

    @property
    def channels(self) -> int:
        return self.values + self.value_heads * self.value_dim


def supports(width: int, taps: int, key_dim: int, value_dim: int) -> bool:
    """Whether the kernel takes blocks, convolutions and heads of these sizes."""
    heads = all(is_power_of_two(n) and n >= 16 for n in (key_dim, value_dim))
    return width <= MAX_WIDTH and taps > 1 and heads


@shared("first_gate", "key_heads", "interpret", "tiles")
def block(
    projected, gates, first_gate, conv, taps, a_log, dt_bias, recurrent, slot, live, *,
    key_heads, interpret, tiles=None,
):
    """See the op; `gates` holds the two gates from column `first_gate` on.

    Returns:
      [B, W, Hv, Dv] fp32 outputs, zero from live on; key, value, decay and conv_input as in the op,
      which from live on hold anything.
    """
    tiles = tiles or Tiles.of(projected.shape[1], recurrent.shape[2])
    sizes = Sizes.of(projected, recurrent, taps, key_heads, tiles.rows)
    batch, dtype = projected.shape[0], conv.dtype
    rows = (batch, sizes.width)
    shapes = (
        jax.ShapeDtypeStruct((*rows, sizes.value_heads, sizes.value_dim), jnp.float32),
        jax.ShapeDtypeStruct((*rows, key_heads, sizes.key_dim), dtype),
        jax.ShapeDtypeStruct((*rows, sizes.value_heads, sizes.value_dim), dtype),
        jax.ShapeDtypeStruct((*rows, sizes.value_heads, 2), jnp.float32),
        jax.ShapeDtypeStruct((*rows, sizes.channels), dtype),
    )
    operands = (projected, gates, conv, taps, a_log, dt_bias, recurrent, slot, live)
    return gpu_call(
        _kernel(sizes, first_gate, dot if interpret else dot_three_passes),
        name="gated_delta_block",
        out_shape=shapes,
        grid=(batch, sizes.value_heads, sizes.value_dim // sizes.rows),
        in_specs=[WHOLE] * len(operands),
        out_specs=(WHOLE,) * len(shapes),
        interpret=interpret,
        num_warps=tiles.num_warps,
    )(*operands)


def _kernel(sizes: Sizes, first_gate: int, product):
    def kernel(projected, gates, conv, taps, a_log, dt_bias, recurrent, slot, live, *outs):
        output, key, value, decay, conv_input = outs
        row, head, part = (pl.program_id(axis) for axis in range(3))
        group = sizes.value_heads // sizes.key_heads
        place = jnp.minimum(slot[row], conv.shape[0] - 1)
        count = jnp.minimum(live[row], sizes.width)
        tile = jnp.arange(2 * P, dtype=jnp.int32)
        is_query = tile >= P
        begin = part * sizes.rows
        depth = jnp.arange(sizes.key_dim, dtype=jnp.int32)[None, :]
        breadth = begin + jnp.arange(sizes.rows, dtype=jnp.int32)[None, :]

        def columns(index, state):
            """The outputs and records of eight columns, and the state after them."""
            column = index * P + tile % P
            own = (row, place, count, column)
            # Keys and queries; the first program of a key head leaves their records.
            first = head // group * sizes.key_dim + jnp.where(is_query, 0, sizes.keys)
            leads = (head % group == 0) & (part == 0)
            both, plain = _convolved(
                sizes, projected, conv, taps, own, first, sizes.key_dim, conv_input, leads
            )
            _put(key, plain, (row, column, head // group, depth), ~is_query & leads, sizes)
            both = both * lax.rsqrt(jnp.sum(both * both, axis=1) + _L2_EPS)[:, None]

            first = jnp.full_like(column, sizes.values + head * sizes.value_dim + begin)
            spread, plain = _convolved(
                sizes, projected, conv, taps, own, first, sizes.rows, conv_input, ~is_query
            )
            _put(value, plain, (row, column, head, breadth), ~is_query, sizes)

            leaves = ~is_query & (part == 0)
            gate = _gates(sizes, gates, first_gate, a_log, dt_bias, decay, own, head, leaves)
            mixed, state = _chain(
                sizes, both, spread, *gate, count - index * P, state, product
            )
            mixed = jnp.where((column < count)[:, None], mixed.T, 0.0)
            _put(output, mixed, (row, column, head, breadth), is_query, sizes)
            return state

        state = recurrent[place, head, pl.ds(begin, sizes.rows), :]
        if sizes.width <= P:
            columns(0, state)
        else:
            lax.fori_loop(0, pl.cdiv(sizes.width, P), columns, state)

    return kernel


def _convolved(sizes: Sizes, projected, conv, taps, own, first, extent, conv_input, writes):
    """SiLU of the short convolution of channels first[r] + 0..extent-1 at column[r].

    Returns the rows in fp32 after rounding, dead ones zero, and rounded; leaves the projected rows
    in `conv_input` where `writes`.
    """
    row, place, count, column = own
    across = jnp.arange(extent, dtype=jnp.int32)[None, :]
    channel = first[:, None] + across
    alive = (column < count)[:, None] & jnp.ones_like(across, bool)
    total = jnp.zeros(channel.shape, jnp.float32)
    for tap in range(sizes.taps):
        source = (column - (sizes.taps - 1 - tap))[:, None]
        inside = alive & (source >= 0)
        at = broadcast(row, jnp.clip(source, 0, sizes.width - 1), channel)
        entry = load(projected.at[at], mask=inside, other=0.0).astype(conv.dtype)
        if tap == sizes.taps - 1:
            _put(conv_input, entry, (row, column, channel), writes, sizes)
        else:
            at = broadcast(place, jnp.clip(source + sizes.taps - 1, 0, sizes.taps - 2), channel)
            older = load(conv.at[at], mask=alive & (source < 0), other=0.0)
            entry = jnp.where(source >= 0, entry, older)
        factor = load(taps.at[broadcast(channel, tap)])
        total = total + factor * entry.astype(jnp.float32)
    rounded = (total * jax.nn.sigmoid(total)).astype(conv.dtype)
    return rounded.astype(jnp.float32), rounded


def _gates(sizes: Sizes, gates, first_gate, a_log, dt_bias, decay, own, head, writes):
    """g and beta of every column, zero where dead; they go into the records where `writes`."""
    row, _, count, column = own
    alive = column < count
    at = jnp.minimum(column, sizes.width - 1)
    a, b = (
        load(gates.at[broadcast(row, at, first_gate + head + skip)], mask=alive, other=0.0)
        for skip in (0, sizes.value_heads)
    )
    a = a + dt_bias[head]
    rate = -jnp.exp(a_log[head]) * (jnp.maximum(a, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(a))))
    rate, beta = jnp.where(alive, rate, 0.0), jnp.where(alive, jax.nn.sigmoid(b), 0.0)
    for index, number in enumerate((rate, beta)):
        _put(decay, number, (row, column, head, index), writes, sizes)
    return rate, beta


def _put(ref, rows, place, writes, sizes: Sizes):
    """Stores the rows whose column exists and that write; `place` has their columns second."""
    row, column, *rest = place
    known = jnp.broadcast_to(writes, column.shape) & (column < sizes.width)
    # A row that does not write has no address: in interpret mode it would put old bytes back.
    column = jnp.where(known, column, sizes.width)
    tail = (None,) * (rows.ndim - 1)
    mask = jnp.broadcast_to(known[(slice(None), *tail)], rows.shape)
    store(ref.at[broadcast(row, column[(slice(None), *tail)], *rest)], rows, mask=mask)


def _chain(sizes: Sizes, both, spread, rate, beta, count, state, product):
    """[rows, 2P] outputs in columns P..2P-1, and the state after the columns.

    Args:
      both: [2P, Dk], unit keys, then unit queries. spread: [2P, rows], values in the first P rows.
      rate, beta: [2P], g and beta of each row's column, zero where dead. count: live columns.
      state: [rows, Dk].
    """
    tile = jnp.arange(2 * P, dtype=jnp.int32)
    column, is_query = tile % P, tile >= P
    # Each column's decay is there twice; the keys' half counts.
    before = (column[None, :] <= column[:, None]) & ~is_query[None, :]
    after = (column[:, None] <= column[None, :]) & ~is_query[:, None]
    total = jnp.sum(jnp.where(before, rate[None, :], 0.0), axis=1)
    total_across = jnp.sum(jnp.where(after, rate[:, None], 0.0), axis=0)
    strict = before & ((column[None, :] < column[:, None]) | is_query[:, None])
    weight = jnp.where(strict, jnp.exp(total[:, None] - total_across[None, :]), 0.0)
    pull = weight * product(both, both.T)  # row r meets key column c
    read = product(state, both.T) * jnp.exp(total_across)[None, :]
    right = jnp.where(~is_query, beta, 0.0)[None, :] * (spread.T - read)

    def solve(index, found):
        is_row = tile == index
        factors = jnp.sum(jnp.where(is_row[:, None], pull, 0.0), axis=0)
        scale = jnp.sum(jnp.where(is_row, beta, 0.0))
        delta = jnp.sum(
            jnp.where(is_row[None, :], right, 0.0) - scale * found * factors[None, :], axis=1
        )
        return jnp.where(is_row[None, :], delta[:, None], found)

    found = lax.fori_loop(0, jnp.minimum(count, P), solve, jnp.zeros_like(right))
    mixed = (read + product(found, pull.T)) * sizes.key_dim**-0.5
    last = jnp.sum(jnp.where(~is_query, rate, 0.0))
    tail = found * jnp.exp(last - total_across)[None, :]
    return mixed, jnp.exp(last) * state + product(tail, both)
