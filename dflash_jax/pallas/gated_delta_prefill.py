"""The gated delta rule over a long chunk: every 64 columns solved at once, then one walk over them.

Implements: ops/gated_delta_rule.py, `gated_delta_prefill`.
Matches when: Dk and Dv are powers of two, 16 to 128.

With G_i the sum of the decays of a block up to column i, and M the state before the block, the
increments and outputs of its 64 columns are

    delta = (I + A)^-1 beta (v - exp(G) M k),    A_ij = beta_i exp(G_i - G_j) (k_i . k_j), j < i
    o     = exp(G) M q + C delta,                C_ij = exp(G_i - G_j) (k_j . q_i), j <= i

The inverse and C need no state: one kernel makes them for all blocks side by side. A second one
walks the blocks with a [Dk, rows] piece of a head's state in registers.

Products run on the tensor cores in bf16 without losing fp32: a bf16 key, query or value is itself
(its L2 norm is a factor of its row, applied after the product), and an fp32 operand is a pair of
bf16 numbers whose sum is within 2^-18 of it. Source: contracts 6.3.4; the XLA form of the op.
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
    gpu_call,
    is_power_of_two,
    load,
    shared,
    store,
)

CHUNK = 64  # columns of a block
_L2_EPS = 1e-6
ROWS, ACROSS = (slice(None), None), (None, slice(None))  # a vector along either axis
# Factors of a column: of M k, of M q, of its increment in the next state; and of the state itself.
_PULL, _READ, _TAIL, _GROWTH = range(4)


@dataclass(frozen=True)
class Tiles:
    """State rows of a program of the walk, its warps and the blocks it has in flight; warps of a
    program that solves a block."""

    value_dim: int = 32
    num_warps: int = 4
    num_stages: int = 3
    solve_warps: int = 4

    @classmethod
    def of(cls, dtype) -> "Tiles":
        """Wider inputs have two 16-bit halves in shared memory: half the rows, two blocks."""
        return cls() if dtype == jnp.bfloat16 else cls(value_dim=16, num_stages=2)


def supports(key_dim: int, value_dim: int) -> bool:
    """Whether the kernels take heads of these widths."""
    return all(is_power_of_two(n) and 16 <= n <= 128 for n in (key_dim, value_dim))


@shared("interpret", "tiles")
def prefill(query, key, value, decay, recurrent, live, *, interpret, tiles=None):
    """Outputs [B, T, Hv, Dv] fp32, zero from live on, and the states [B, Hv, Dv, Dk] after.

    Args: as in the op. Columns >= live may hold anything.
    """
    # fp32 comes in two parts: with more state rows it would spill registers.
    tiles = tiles or Tiles.of(key.dtype)
    query, key, value = (jnp.stack(_parts(x)) for x in (query, key, value))
    solved = _solve(query, key, decay, live, interpret, tiles)
    return _walk(query, key, value, recurrent, live, solved, interpret, tiles)


def _solve(query, key, decay, live, interpret, tiles: Tiles):
    """Of every block that has a live column: what the walk multiplies with.

    Args: query and key are parts, [1 or 2, B, T, Hk, Dk] bf16.
    Returns:
      inverse, inner: [2, B, Hv, T', 64] bf16, high and low parts, T' whole blocks: rows of
        (I + A)^-1 beta and of C / sqrt(Dk).
      factors: [4, B, Hv, T'] fp32.
    """
    _, batch, tokens, key_heads, key_dim = key.shape
    value_heads = decay.shape[2]
    blocks = pl.cdiv(tokens, CHUNK)

    def kernel(query, key, decay, live, *outs):
        block, head, row = (pl.program_id(axis) for axis in range(3))
        columns = block * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        count = jnp.minimum(live[row], tokens)

        def put(which, parts):
            for part, rows in enumerate(parts):
                outs[which][part, row, head, pl.ds(block * CHUNK, CHUNK)] = rows

        @pl.when(block * CHUNK < count)
        def _():
            alive, place = columns < count, (row, columns, head // (value_heads // key_heads))
            q, k = (_rows(ref, place, alive, 0, key_dim) for ref in (query, key))
            g, beta = (
                load(decay.at[broadcast(row, columns, head, which)], mask=alive, other=0.0)
                for which in range(2)
            )
            _solve_block(q, k, g, beta, put)

    extent = (batch, value_heads, blocks * CHUNK)
    pair = jax.ShapeDtypeStruct((2, *extent, CHUNK), jnp.bfloat16)
    return gpu_call(
        kernel,
        name="gated_delta_solve",
        out_shape=(pair, pair, jax.ShapeDtypeStruct((4, *extent), jnp.float32)),
        grid=(blocks, value_heads, batch),
        in_specs=[WHOLE] * 4,
        out_specs=(WHOLE,) * 3,
        interpret=interpret,
        num_warps=tiles.solve_warps,
    )(query, key, decay, live)


def _solve_block(q, k, g, beta, put):
    """Hands each result of a block to `put` as soon as it is made, to hold fewer registers."""
    q_scale, k_scale = (lax.rsqrt(_squares(x) + _L2_EPS) for x in (q, k))
    q_scale = q_scale * q[0].shape[1] ** -0.5
    total, last = jnp.cumsum(g), jnp.sum(g)
    growth, whole = jnp.exp(total), jnp.broadcast_to(jnp.exp(last), total.shape)
    put(2, (growth * k_scale, growth * q_scale, jnp.exp(last - total) * k_scale, whole))
    i, j = (jnp.arange(CHUNK, dtype=jnp.int32)[at] for at in (ROWS, ACROSS))
    ratio = jnp.exp(jnp.where(i >= j, total[ROWS] - total[ACROSS], -jnp.inf)) * k_scale[ACROSS]
    across = _transposed(k)
    put(1, _parts(ratio * q_scale[ROWS] * _product(q, across)))
    pulls = ratio * (beta * k_scale)[ROWS] * _product(k, across)
    put(0, _parts(_inverse(jnp.where(i > j, pulls, 0.0), i, j) * beta[ACROSS]))


def _inverse(strict, i, j):
    """(I + strict)^-1 of a strictly lower triangle, from the inverses of its diagonal blocks.

    With these as `found`, blocks of twice the width have found - found B found, B the blocks below
    the diagonal. Powers of the whole triangle would be fewer, but those of keys that resemble one
    another grow to 10^18 before they cancel.
    """
    apart = i ^ j
    found = jnp.where(apart == 0, 1.0, jnp.where(apart == 1, -strict, 0.0))  # width 2

    def double(level, found):
        below = _parts(jnp.where(apart >> level == 1, strict, 0.0))
        blocks = _parts(found)
        return found - _product(_parts(_product(blocks, below)), blocks)

    return lax.fori_loop(1, CHUNK.bit_length() - 1, double, found)


def _walk(query, key, value, recurrent, live, solved, interpret, tiles: Tiles):
    """The recurrence from block to block; arguments and results as in `prefill` and `_solve`."""
    _, batch, tokens, value_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[3:]
    rows = min(tiles.value_dim, value_dim)

    def kernel(query, key, value, recurrent, live, inverse, inner, factors, out, final):
        part, head, row = (pl.program_id(axis) for axis in range(3))
        begin, count = part * rows, jnp.minimum(live[row], tokens)
        place = pl.ds(begin, rows)

        def put(columns, made):
            inside = jnp.broadcast_to((columns < tokens)[ROWS], made.shape)
            breadth = begin + jnp.arange(rows, dtype=jnp.int32)
            at = broadcast(row, columns[ROWS], head, breadth[ACROSS])
            store(out.at[at], made, mask=inside)

        def step(block, state):
            here = pl.ds(block * CHUNK, CHUNK)
            columns = block * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
            alive, at = columns < count, (row, columns, head // (value_heads // key_heads))
            q, k = (_rows(ref, at, alive, 0, key_dim) for ref in (query, key))
            v = _rows(value, (row, columns, head), alive, begin, rows)
            solve, mix = (
                tuple(ref[part, row, head, here, :] for part in range(2))
                for ref in (inverse, inner)
            )
            factor = [factors[which, row, head, here][ROWS] for which in range(_GROWTH)]
            growth = factors[_GROWTH, row, head, block * CHUNK]
            mixed, state = _step(state, q, k, v, solve, mix, factor, growth)
            put(columns, jnp.where(alive[ROWS], mixed, 0.0))
            return state

        whole = pl.cdiv(count, CHUNK)
        state = lax.fori_loop(0, whole, step, recurrent[row, head, place, :].T)
        final[row, head, place, :] = state.T

        def blank(block, carry):
            columns = block * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
            put(columns, jnp.zeros((CHUNK, rows), jnp.float32))
            return carry

        lax.fori_loop(whole, pl.cdiv(tokens, CHUNK), blank, 0)

    operands = (query, key, value, recurrent, live, *solved)
    return gpu_call(
        kernel,
        name="gated_delta_prefill",
        out_shape=(
            jax.ShapeDtypeStruct(value.shape[1:], jnp.float32),
            jax.ShapeDtypeStruct(recurrent.shape, jnp.float32),
        ),
        # The pieces of a head run side by side: they read the same keys.
        grid=(value_dim // rows, value_heads, batch),
        in_specs=[WHOLE] * len(operands),
        out_specs=(WHOLE,) * 2,
        interpret=interpret,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(*operands)


def _step(state, q, k, v, solve, mix, factor, growth):
    """Outputs [64, rows] of a block, and the state [Dk, rows] after it."""
    held = _parts(state)
    delta = _product(solve, _parts(_sum(v) - factor[_PULL] * _product(k, held)))
    mixed = factor[_READ] * _product(q, held) + _product(mix, _parts(delta))
    return mixed, growth * state + _product(_transposed(k), _parts(factor[_TAIL] * delta))


def _rows(ref, place, alive, begin, extent):
    """Parts [64, extent] from entry `begin` on of columns of a head, zero where not alive."""
    row, columns, head = place
    across = begin + jnp.arange(extent, dtype=jnp.int32)

    def part(which):
        at = broadcast(which, row, columns[ROWS], head, across[ACROSS])
        return load(ref.at[at], mask=jnp.broadcast_to(alive[ROWS], at[0].shape), other=0.0)

    return tuple(part(which) for which in range(ref.shape[0]))


def _sum(parts):
    return sum(x.astype(jnp.float32) for x in parts)


def _squares(parts):
    wide = _sum(parts)
    return jnp.sum(wide * wide, axis=1)


def _parts(x):
    """bf16 arrays whose sum is x: x itself, or a pair to within 2^-18."""
    if x.dtype == jnp.bfloat16:
        return (x,)
    x = x.astype(jnp.float32)
    high = _rounded(x)
    return high.astype(jnp.bfloat16), _rounded(x - high).astype(jnp.bfloat16)


def _rounded(x):
    """fp32 with the digits of a bf16, by its bits: XLA may drop a cast and back (interpret mode),
    and Triton has no `reduce_precision`. NaN stays: a GPU's, all ones below the sign, would carry
    over into a zero."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    rounded = lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)
    return jnp.where(x == x, rounded, x)


def _transposed(parts):
    return tuple(x.T for x in parts)


def _product(left, right):
    """fp32 product of two sums of parts; both low parts are beneath what the sums hold."""
    total = dot(left[0], right[0])
    for low in left[1:]:
        total = total + dot(low, right[0])
    for low in right[1:]:
        total = total + dot(left[0], low)
    return total
