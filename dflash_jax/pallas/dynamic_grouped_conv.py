"""Both sides of the dynamic grouped convolution, each in one launch.

Implements: ops/dynamic_grouped_conv.py, `prepare` and `finish`.
Matches when: at most 64 columns.

prepare: a program takes a few groups of channels of one row of the batch. The increments of a group
are products of the whole normed columns with a few matrix rows, so it walks over all channels once;
the norm's factor of a column scales the sums and is known at the same time. Then it convolves its
own channels. finish: a program takes a stretch of channels.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, dot, gpu_call, load, places, store

MAX_WIDTH = 64
_CHANNELS = 64  # of a convolved stretch
_PROCESSORS = 132  # of an H200


@dataclass(frozen=True)
class Tiles:
    """Columns and matrix rows of a product, groups of a program, channels that a step sums over."""

    columns: int
    rows: int
    span: int
    step: int
    num_warps: int = 4

    @classmethod
    def of(cls, width: int, taps: int, groups: int, hidden: int) -> "Tiles":
        """For blocks of `width` columns."""
        # A product has 16 rows at least: groups share it while the processors stay busy.
        span = 1
        while 4 * taps * span <= 16 and groups // (2 * span) >= _PROCESSORS:
            span *= 2
        columns = max(16, pl.next_power_of_2(width))
        longest = 128 if columns <= 32 else 64
        return cls(
            columns=columns, rows=max(16, pl.next_power_of_2(2 * taps * span)), span=span,
            step=max(16, min(longest, pl.next_power_of_2(hidden))),
        )


def supports(width: int) -> bool:
    """Whether the kernels take blocks of so many columns."""
    return 0 < width <= MAX_WIDTH


def prepare(x, norm_weight, base, projection, *, eps: float, out_dtype, interpret: bool):
    """Args: as in the op. Returns: prepared [B, W, H] and finish_delta [B, W, taps, groups]."""
    batch, width, hidden = x.shape
    taps = base.shape[1]
    groups = projection.shape[0] // (2 * taps)
    tiles = Tiles.of(width, taps, groups, hidden)
    return gpu_call(
        _prepare_kernel(tiles, eps, groups),
        name="dynamic_grouped_conv_prepare",
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, out_dtype),
            jax.ShapeDtypeStruct((batch, width, taps, groups), out_dtype),
        ),
        grid=(pl.cdiv(groups, tiles.span), batch),
        in_specs=[WHOLE] * 4,
        out_specs=(WHOLE,) * 2,
        interpret=interpret,
        num_warps=tiles.num_warps,
        num_stages=6,
    )(x, norm_weight, base, projection)


def _prepare_kernel(tiles: Tiles, eps: float, groups: int):
    def kernel(x, norm_weight, base, projection, prepared, finish_delta):
        first_group, row = pl.program_id(0) * tiles.span, pl.program_id(1)
        _, width, hidden = x.shape
        taps = base.shape[1]
        column = jnp.arange(tiles.columns, dtype=jnp.int32)
        # A group has 2 * taps matrix rows: number n is side n // taps and tap n % taps.
        line = jnp.arange(tiles.rows, dtype=jnp.int32)
        group, number = first_group + line // (2 * taps), line % (2 * taps)
        known = (line < 2 * taps * tiles.span) & (group < groups)

        matrix_row = jnp.where(known, number * groups + group, 0)
        whole = hidden // tiles.step

        def add(index, carry, tail=False):
            """One stretch of channels; only the tail is masked, so that loads run ahead."""
            squares, sums = carry
            channels = index * tiles.step + jnp.arange(tiles.step, dtype=jnp.int32)
            at = _of_row(row, jnp.minimum(column, width - 1), channels)
            sources = ((x, at), (norm_weight, channels), (projection, places(matrix_row, channels)))
            value, weight, rows = (
                load(ref.at[at], mask=jnp.broadcast_to(channels < hidden, _shape(at)), other=0.0)
                if tail else ref[at]
                for ref, at in sources
            )
            value = value.astype(jnp.float32)
            normed = value * weight.astype(jnp.float32)[None, :]
            return squares + jnp.sum(value * value, axis=1), sums + _split_dot(normed, rows)

        carry = (
            jnp.zeros((tiles.columns,), jnp.float32),
            jnp.zeros((tiles.columns, tiles.rows), jnp.float32),
        )
        carry = lax.fori_loop(0, whole, add, carry)
        squares, sums = add(whole, carry, tail=True) if hidden % tiles.step else carry
        scale = lax.rsqrt(squares / hidden + eps)
        delta = sums * scale[:, None]

        late = (column < width)[:, None] & (known & (number >= taps))[None, :]
        shape = delta.shape
        at = (
            jnp.full(shape, row), jnp.broadcast_to(column[:, None], shape),
            jnp.broadcast_to(number[None, :] - taps, shape),
            jnp.broadcast_to(group[None, :], shape),
        )
        store(finish_delta.at[at], delta.astype(finish_delta.dtype), mask=late)

        size = hidden // groups
        stretch = min(_CHANNELS, max(16, pl.next_power_of_2(size)))

        def convolve(local, index):
            """A stretch of the channels of one of the groups."""
            limit = jnp.minimum(first_group + local + 1, groups) * size
            channels = (first_group + local) * size + index * stretch
            channels = channels + jnp.arange(stretch, dtype=jnp.int32)
            mask = _inside(column, width, channels, limit)
            total = jnp.zeros(mask.shape, jnp.float32)
            for tap in range(taps):
                before = column - tap
                coefficient = _column_of(delta, line, local * 2 * taps + tap)[:, None]
                coefficient = coefficient + _base(base, 0, tap, channels, limit)
                value = load(
                    x.at[_of_row(row, before, channels)], mask=mask & (before >= 0)[:, None],
                    other=0.0,
                ).astype(jnp.float32)
                weight = load(norm_weight.at[channels], mask=channels < limit, other=0.0)
                normed = value * weight.astype(jnp.float32) * _shifted(scale, column, tap)[:, None]
                total += coefficient * normed
            place = _of_row(row, column, channels)
            store(prepared.at[place], total.astype(prepared.dtype), mask=mask)

        for local in range(tiles.span):
            lax.fori_loop(
                0, pl.cdiv(size, stretch), lambda index, _, local=local: convolve(local, index),
                None,
            )

    return kernel


def finish(residual, z, base, finish_delta, *, interpret: bool):
    """Args: as in the op. Returns: [B, W, H] in residual's dtype."""
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
            value = load(
                z.at[_of_row(row, before, channels)], mask=mask & (before >= 0)[:, None], other=0.0
            )
            total += (delta + _base(base, 1, tap, channels, hidden)) * value.astype(jnp.float32)
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


def _split_dot(x, rows):
    """x [m, k] fp32 times rows [n, k], without rounding x to a bf16 of rows: hi + lo, both bf16."""
    if rows.dtype == jnp.float32:
        return dot(x, rows.T)
    high = x.astype(rows.dtype)
    low = (x - high.astype(jnp.float32)).astype(rows.dtype)
    return dot(high, rows.T) + dot(low, rows.T)


def _base(base, side: int, tap: int, channels, limit):
    """Coefficients [1, channels] of a tap."""
    at = (jnp.full_like(channels, side), jnp.full_like(channels, tap), channels)
    return load(base.at[at], mask=channels < limit, other=0.0).astype(jnp.float32)[None, :]


def _of_row(row, columns, channels):
    """Index arrays of columns times channels of one row of the batch."""
    first, second = places(columns, channels)
    return jnp.full(first.shape, row), first, second


def _shape(at):
    """Of what an index array, or a tuple of them, selects."""
    return (at[0] if isinstance(at, tuple) else at).shape


def _inside(left, left_end, right, right_end):
    return (left < left_end)[:, None] & (right < right_end)[None, :]


def _column_of(matrix, line, wanted: int):
    """One column of a matrix in registers."""
    return jnp.sum(jnp.where((line == wanted)[None, :], matrix, 0.0), axis=1)


def _shifted(vector, index, tap: int):
    """vector[i - tap], and 0 where there is none."""
    same = index[None, :] == index[:, None] - tap
    return jnp.sum(jnp.where(same, vector[None, :], 0.0), axis=1)
