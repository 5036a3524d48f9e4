"""Both sides of the dynamic grouped convolution around one product that XLA runs.

Implements: ops/dynamic_grouped_conv.py, `prepare` and `finish`.
Matches when: at most 64 columns.

The increments are a product of all normed columns with a matrix of megabytes. It wants a main loop
of its own: inside `prepare` it took 82 us on an H200, of which 79 waited. So `norm` leaves the
unrounded norm as rows of that product, `prepare` convolves with what comes back, and `finish`
convolves the other side and adds the residual.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, gpu_call, load, places, store

MAX_WIDTH = 64
_CHANNELS = 64  # of a convolved stretch
_NORMED = 2048  # channels of a norm's step


def supports(width: int) -> bool:
    """Whether the kernels take blocks of so many columns."""
    return 0 < width <= MAX_WIDTH


def norm(x, weight, *, eps: float, dtype, interpret: bool):
    """plain_rmsnorm of rows, as operands of a product that must not round it.

    Args:
      x: [T, H]. weight: [H]. dtype: the product's.
    Returns:
      halves: [2, T, H] dtype, whose sum is the norm, or for fp32 [1, T, H].
      scale: [T] fp32, so that the norm is x * weight * scale.
    """
    tokens, hidden = x.shape
    halves = 1 if dtype == jnp.float32 else 2
    step = min(_NORMED, max(16, pl.next_power_of_2(hidden)))
    steps = pl.cdiv(hidden, step)

    def kernel(x, weight, out, scale):
        row = pl.program_id(0)

        def part(index):
            channels = index * step + jnp.arange(step, dtype=jnp.int32)
            inside = channels < hidden
            at = jnp.full_like(channels, row), channels
            return channels, inside, load(x.at[at], mask=inside, other=0.0).astype(jnp.float32)

        def add(index, squares):
            value = part(index)[2]
            return squares + value * value

        squares = lax.fori_loop(0, steps, add, jnp.zeros((step,), jnp.float32))
        factor = lax.rsqrt(jnp.sum(squares) / hidden + eps)
        scale[row] = factor

        def write(index, _):
            channels, inside, value = part(index)
            share = load(weight.at[channels], mask=inside, other=0.0).astype(jnp.float32)
            normed = value * share * factor
            for half in range(halves):
                rounded = normed.astype(dtype)
                at = jnp.full_like(channels, half), jnp.full_like(channels, row), channels
                store(out.at[at], rounded, mask=inside)
                normed = normed - rounded.astype(jnp.float32)

        lax.fori_loop(0, steps, write, None)

    return gpu_call(
        kernel,
        name="dynamic_grouped_conv_norm",
        out_shape=(
            jax.ShapeDtypeStruct((halves, tokens, hidden), dtype),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
        ),
        grid=(tokens,), in_specs=[WHOLE] * 2, out_specs=(WHOLE,) * 2, interpret=interpret,
        num_warps=8 if step >= 1024 else 4,
    )(x, weight)


def prepare(x, norm_weight, scale, base, products, *, out_dtype, interpret: bool):
    """Convolves side 0 and rounds the increments of side 1.

    Args:
      x, norm_weight, base: as in the op. scale: [B * W], from `norm`.
      products: [halves, B, W, 2 * taps * groups] fp32, whose sum over halves are the increments.
    Returns:
      prepared [B, W, H] and finish_delta [B, W, taps, groups].
    """
    batch, width, hidden = x.shape
    halves, taps = products.shape[0], base.shape[1]
    groups = products.shape[3] // (2 * taps)
    columns = pl.next_power_of_2(width)
    stretch = min(_CHANNELS, pl.next_power_of_2(hidden))
    programs = pl.cdiv(hidden, stretch)
    late = taps * groups  # increments of a column and a side
    share = pl.next_power_of_2(pl.cdiv(width * late, programs))

    def kernel(x, norm_weight, scale, base, products, prepared, finish_delta):
        row, program = pl.program_id(1), pl.program_id(0)

        def increments(column, number, mask):
            at = jnp.full(mask.shape, row), column, number
            return sum(
                load(products.at[(jnp.full(mask.shape, half), *at)], mask=mask, other=0.0)
                for half in range(halves)
            )

        column = jnp.arange(columns, dtype=jnp.int32)
        channels = program * stretch + jnp.arange(stretch, dtype=jnp.int32)
        mask = _inside(column, width, channels, hidden)
        group = jnp.minimum(channels // (hidden // groups), groups - 1)
        weight = load(norm_weight.at[channels], mask=channels < hidden, other=0.0)
        total = jnp.zeros(mask.shape, jnp.float32)
        for tap in range(taps):
            before = column - tap
            known = before >= 0
            coefficient = _base(base, 0, tap, channels, hidden) + increments(
                *places(column, tap * groups + group), mask
            )
            value = load(
                x.at[_of_row(row, before, channels)], mask=mask & known[:, None], other=0.0
            )
            factor = load(
                scale.at[row * width + before], mask=known & (column < width), other=0.0
            )
            normed = value.astype(jnp.float32) * weight.astype(jnp.float32)[None, :]
            total += coefficient * (normed * factor[:, None])
        place = _of_row(row, column, channels)
        store(prepared.at[place], total.astype(prepared.dtype), mask=mask)

        entry = program * share + jnp.arange(share, dtype=jnp.int32)
        inside = entry < width * late
        delta = increments(entry // late, late + entry % late, inside)
        at = jnp.full_like(entry, row), entry
        store(finish_delta.at[at], delta.astype(finish_delta.dtype), mask=inside)

    prepared, finish_delta = gpu_call(
        kernel,
        name="dynamic_grouped_conv_prepare",
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, out_dtype),
            jax.ShapeDtypeStruct((batch, width * late), out_dtype),
        ),
        grid=(programs, batch), in_specs=[WHOLE] * 5, out_specs=(WHOLE,) * 2,
        interpret=interpret,
    )(x, norm_weight, scale, base, products)
    return prepared, finish_delta.reshape(batch, width, taps, groups)


def finish(residual, z, base, finish_delta, *, interpret: bool):
    """Args: as in the op, z in parts. Returns: [B, W, H] in residual's dtype."""
    batch, width, hidden = residual.shape
    columns = pl.next_power_of_2(width)
    stretch = min(_CHANNELS, pl.next_power_of_2(hidden))

    def kernel(residual, z, base, finish_delta, out):
        row, groups, taps = pl.program_id(1), finish_delta.shape[3], base.shape[1]
        column = jnp.arange(columns, dtype=jnp.int32)
        channels = pl.program_id(0) * stretch + jnp.arange(stretch, dtype=jnp.int32)
        mask = _inside(column, width, channels, hidden)
        place = _of_row(row, column, channels)
        total = load(residual.at[place], mask=mask, other=0.0).astype(jnp.float32)
        group = jnp.minimum(channels // (hidden // groups), groups - 1)
        for tap in range(taps):
            before = column - tap
            at = (
                jnp.full(mask.shape, row), jnp.broadcast_to(column[:, None], mask.shape),
                jnp.full(mask.shape, tap), jnp.broadcast_to(group[None, :], mask.shape),
            )
            delta = load(finish_delta.at[at], mask=mask, other=0.0).astype(jnp.float32)
            known = mask & (before >= 0)[:, None]
            value = sum(
                load(z.at[(jnp.full(mask.shape, part), *source)], mask=known, other=0.0)
                for source in [_of_row(row, before, channels)] for part in range(z.shape[0])
            )
            total += (delta + _base(base, 1, tap, channels, hidden)) * value
        store(out.at[place], total.astype(out.dtype), mask=mask)

    return gpu_call(
        kernel,
        name="dynamic_grouped_conv_finish",
        out_shape=jax.ShapeDtypeStruct(residual.shape, residual.dtype),
        grid=(pl.cdiv(hidden, stretch), batch),
        in_specs=[WHOLE] * 4,
        out_specs=WHOLE,
        interpret=interpret,
    )(residual, z, base, finish_delta)


def _base(base, side: int, tap: int, channels, limit):
    """Coefficients [1, channels] of a tap."""
    at = (jnp.full_like(channels, side), jnp.full_like(channels, tap), channels)
    return load(base.at[at], mask=channels < limit, other=0.0).astype(jnp.float32)[None, :]


def _of_row(row, columns, channels):
    """Index arrays of columns times channels of one row of the batch."""
    first, second = places(columns, channels)
    return jnp.full(first.shape, row), first, second


def _inside(left, left_end, right, right_end):
    return (left < left_end)[:, None] & (right < right_end)[None, :]
