"""What a Gated DeltaNet layer's recurrence reads, from its projection in one launch, for a chain.

Implements: ops/gated_delta_block.py, the inputs of `gated_delta_block` (the recurrence follows in
pallas/gated_delta_rule.py).
Matches when: columns form a chain; there are two taps or more; Dk is a power of two, and it and the
width of the values are multiples of 16.

A program owns some channels of up to 32 columns of a row: convolution, SiLU and both roundings; to
normalise queries and keys, those of a head. One more program for the same columns makes the gates.
Source: contracts 6.3.4.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import (
    WHOLE,
    added,
    broadcast,
    gpu_call,
    is_power_of_two,
    load,
    places,
    shared,
    step_within,
    store,
)

_COLUMNS = 32  # at most, of a program
_L2_EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Of one call: columns, heads, head widths, taps of the convolution, and whether queries and
    keys are normalised."""

    width: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    unit: bool

    @property
    def keys(self) -> int:
        """Channels of the keys, and of the queries, which come first."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of the values, which come last."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    def blocks(self) -> tuple[int, int]:
        """Channels of a program of queries or keys and of one of values: enough programs for every
        processor, rows of at least 128 bytes where the heads allow it."""
        most = 64 if self.width > 8 else 128
        keys = self.key_dim if self.unit else step_within(self.keys, (), most)
        return keys, step_within(self.values, (), most)

    def supported(self) -> bool:
        """Whether the kernel takes them."""
        heads = is_power_of_two(self.key_dim) and self.key_dim >= 16
        return self.taps > 1 and heads and self.values % 16 == 0


@shared("sizes", "first_gate", "interpret")
def inputs(
    projected, gates, first_gate, conv, taps, a_log, dt_bias, slot, *, sizes: Sizes, interpret: bool
):
    """See `gated_delta_inputs`; `gates` holds the two gates from column `first_gate` on.

    Args:
      projected, gates: in parts [_, B, W, ...], which are added up here.
      conv: [slots, taps - 1, channels], rows of `slot` [B]; what an idle row reads is dead.
    Returns:
      query, key, value in conv's dtype (normalised: fp32), decay fp32 and conv_input, each column
      made of itself and of columns before it.
    """
    batch, dtype, blocks = projected.shape[1], conv.dtype, sizes.blocks()
    columns = min(_COLUMNS, pl.next_power_of_2(sizes.width))
    rows = (batch, sizes.width)
    keys = jax.ShapeDtypeStruct((*rows, sizes.keys), jnp.float32 if sizes.unit else dtype)
    shapes = (
        keys, keys,
        jax.ShapeDtypeStruct((*rows, sizes.values), dtype),
        jax.ShapeDtypeStruct((*rows, sizes.value_heads, 2), jnp.float32),
        jax.ShapeDtypeStruct((*rows, sizes.channels), dtype),
    )
    operands = (projected, gates, conv, taps, a_log, dt_bias, slot)
    query, key, value, decay, conv_input = gpu_call(
        _kernel(sizes, first_gate, blocks, columns),
        name="gated_delta_inputs",
        out_shape=shapes,
        grid=(
            batch, 2 * sizes.keys // blocks[0] + sizes.values // blocks[1] + 1,
            pl.cdiv(sizes.width, columns),
        ),
        in_specs=[WHOLE] * len(operands),
        out_specs=(WHOLE,) * len(shapes),
        interpret=interpret,
    )(*operands)
    heads = (*rows, sizes.key_heads, sizes.key_dim)
    value = value.reshape(*rows, sizes.value_heads, sizes.value_dim)
    return query.reshape(heads), key.reshape(heads), value, decay, conv_input


def _kernel(sizes: Sizes, first_gate: int, blocks: tuple[int, int], columns: int):
    key_parts, value_parts = sizes.keys // blocks[0], sizes.values // blocks[1]

    def kernel(projected, gates, conv, taps, a_log, dt_bias, slot, *outs):
        query, key, value, decay, conv_input = outs
        row, part = pl.program_id(0), pl.program_id(1)
        column = pl.program_id(2) * columns + jnp.arange(columns, dtype=jnp.int32)
        place = jnp.clip(slot[row], 0, conv.shape[0] - 1)

        def convolved(begin, block):
            """SiLU of some channels, and which they are."""
            channel = begin + jnp.arange(block, dtype=jnp.int32)
            mixed, plain = _convolved(sizes, projected, conv, taps, row, place, column, channel)
            _put(conv_input, plain, row, column, channel, sizes)
            return mixed, channel

        @pl.when(part < 2 * key_parts)
        def _():
            begin = part * blocks[0]
            mixed, channel = convolved(begin, blocks[0])
            for out, first, length in ((query, 0, sizes.key_dim**-0.5), (key, sizes.keys, 1.0)):
                @pl.when((begin >= first) & (begin < first + sizes.keys))
                def _(out=out, first=first, length=length):
                    rows = _scaled(mixed, length) if sizes.unit else mixed
                    _put(out, rows, row, column, channel - first, sizes)

        @pl.when((part >= 2 * key_parts) & (part < 2 * key_parts + value_parts))
        def _():
            begin = (part - 2 * key_parts) * blocks[1]
            mixed, channel = convolved(2 * sizes.keys + begin, blocks[1])
            _put(value, mixed, row, column, channel - 2 * sizes.keys, sizes)

        @pl.when(part == 2 * key_parts + value_parts)
        def _():
            _gates(sizes, gates, first_gate, a_log, dt_bias, decay, row, column)

    return kernel


def _scaled(mixed, length):
    """Rows [columns, Dk] of this length, in fp32."""
    wide = mixed.astype(jnp.float32)
    factor = length * jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) + _L2_EPS)
    return wide * factor[:, None]


def _convolved(sizes: Sizes, projected, conv, taps, row, place, column, channel):
    """SiLU of the short convolution [columns, channels], rounded, and the projected columns."""
    at = places(column, channel)
    total = jnp.zeros(at[0].shape, jnp.float32)
    for tap in range(sizes.taps):
        source = at[0] - (sizes.taps - 1 - tap)
        there = broadcast(row, jnp.clip(source, 0, sizes.width - 1), at[1])
        inside = (source >= 0) & (source < sizes.width)
        entry = _sum(projected, there, mask=inside, other=0.0).astype(conv.dtype)
        if tap < sizes.taps - 1:
            there = broadcast(place, jnp.clip(source + sizes.taps - 1, 0, sizes.taps - 2), at[1])
            older = load(conv.at[there], mask=source < 0, other=0.0)
            entry = jnp.where(source < 0, older, entry)
        factor = load(taps.at[broadcast(channel, tap)])
        total = total + factor[None, :] * entry.astype(jnp.float32)
    return (total * jax.nn.sigmoid(total)).astype(conv.dtype), entry


def _sum(ref, there, **mask):
    """fp32 sum over the parts, first to last."""
    return added(load(ref.at[broadcast(part, *there)], **mask) for part in range(ref.shape[0]))


def _gates(sizes: Sizes, gates, first_gate, a_log, dt_bias, decay, row, column):
    """g and beta of every column and head."""
    head = jnp.arange(pl.next_power_of_2(sizes.value_heads), dtype=jnp.int32)
    known = head < sizes.value_heads
    at = places(jnp.minimum(column, sizes.width - 1), jnp.minimum(head, sizes.value_heads - 1))
    a, b = (
        _sum(gates, broadcast(row, at[0], first_gate + at[1] + skip))
        for skip in (0, sizes.value_heads)
    )
    bias = load(dt_bias.at[head], mask=known, other=0.0)
    log_rate = load(a_log.at[head], mask=known, other=0.0)
    a = a.astype(jnp.float32) + bias[None, :]
    softplus = jnp.maximum(a, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(a)))
    numbers = (-jnp.exp(log_rate)[None, :] * softplus, jax.nn.sigmoid(b.astype(jnp.float32)))
    there = places(jnp.where(column < sizes.width, column, sizes.width), head)
    mask = (there[0] < sizes.width) & (there[1] < sizes.value_heads)
    for index, number in enumerate(numbers):
        store(decay.at[broadcast(row, *there, index)], number, mask=mask)


def _put(out, rows, row, column, channel, sizes: Sizes):
    """Stores the columns that exist."""
    at = places(column, channel)  # a column past the last has no address: nothing is put back
    store(out.at[broadcast(row, *at)], rows, mask=at[0] < sizes.width)
