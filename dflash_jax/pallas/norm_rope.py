"""A projected column becomes normed and rotated heads, in one launch.

Implements: ops/norm_rope.py.
Matches when: half of the rotated dims is a power of two.

A program is one warp and takes one head of one column. The two halves of the rotated dims and the
dims behind them are three arrays, so that a lane computes the angle of few pairs and no array is
sliced. Value and gate heads are copied.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, added, gpu_call, is_power_of_two, load, shared, store
from dflash_jax.pallas.rope import turn


@dataclass(frozen=True)
class Part:
    """Heads of one kind: where they start in a column, how many, and the dtype they get."""

    first: int
    heads: int
    dtype: jnp.dtype


@dataclass(frozen=True)
class Rule:
    """What the formula fixes: the norm, the rotated dims, pairs of three axes or None for one
    axis, and the dtypes to which a head is rounded before and, or None, behind its norm."""

    eps: float
    offset: bool
    rotary_dim: int
    sections: tuple[int, int, int] | None
    before: jnp.dtype
    behind: jnp.dtype | None


def supports(rotary_dim: int) -> bool:
    """Whether the kernel rotates so many dims."""
    return rotary_dim % 2 == 0 and is_power_of_two(rotary_dim // 2)


@shared("parts", "rule", "interpret")
def norm_rope(
    projected, query_norm, key_norm, positions, fractions, *, parts: tuple[Part, ...], rule: Rule,
    interpret: bool,
):
    """Norms and rotates the heads of the first two parts, query and key, and copies the others.

    Args:
      projected: [summands, B, W, N] float, whose sum is read.
      query_norm, key_norm: [D] float.
      positions: [B, W] or [B, W, 3] int32.
      fractions: [digits, rotary_dim / 2] int32, see ops/rope.py.
    Returns:
      per part [B, W, heads, D] in its dtype.
    """
    summands, batch, width, entries = projected.shape
    dim, axes = query_norm.shape[0], 1 if rule.sections is None else 3

    def kernel(projected, query_norm, key_norm, positions, fractions, *outs):
        line, head = pl.program_id(0), pl.program_id(1)
        weights = [query_norm, key_norm] + [None] * (len(parts) - 2)
        for part, out, weight in zip(parts, outs, weights, strict=True):

            @pl.when((head >= 0) & (head < part.heads))
            def _(part=part, out=out, weight=weight, head=head):
                first = line * entries + part.first + head * dim
                source = [batch * width * entries * number + first for number in range(summands)]
                target = (line * part.heads + head) * dim
                if weight is None:
                    _copy(projected, source, out, target, dim, rule)
                else:
                    position = _position(positions, line * axes, rule)
                    _turn(projected, source, out, target, weight, fractions, position, rule)

            head = head - part.heads

    made = gpu_call(
        kernel,
        name="norm_rope",
        out_shape=tuple(
            jax.ShapeDtypeStruct((batch * width * part.heads * dim,), part.dtype) for part in parts
        ),
        grid=(batch * width, sum(part.heads for part in parts)),
        in_specs=[WHOLE] * 5,
        out_specs=(WHOLE,) * len(parts),
        interpret=interpret,
        num_warps=1,
    )(projected.reshape(-1), query_norm, key_norm, positions.reshape(-1), fractions)
    return tuple(
        x.reshape(batch, width, part.heads, dim) for x, part in zip(made, parts, strict=True)
    )


def _copy(projected, source, out, target, dim: int, rule: Rule):
    entry = jnp.arange(pl.next_power_of_2(dim), dtype=jnp.int32)
    mask = entry < dim
    value = _round(_sum(projected, source, entry, mask), rule.before)
    store(out.at[target + entry], value.astype(out.dtype), mask=mask)


def _position(positions, first, rule: Rule):
    """What turns each pair: one scalar, or the axis that the pair reads."""
    if rule.sections is None:
        return positions[first]
    pair = jnp.arange(rule.rotary_dim // 2, dtype=jnp.int32)
    position = jnp.full_like(pair, positions[first])
    for axis in (1, 2):
        reads = (pair % 3 == axis) & (pair < 3 * rule.sections[axis])
        position = jnp.where(reads, positions[first + axis], position)
    return position


def _turn(projected, source, out, target, weight, fractions, position, rule: Rule):
    """Norms and rotates a head."""
    dim, half = weight.shape[0], rule.rotary_dim // 2
    pair = jnp.arange(half, dtype=jnp.int32)
    stretches = [(pair, None), (half + pair, None)]
    if dim > rule.rotary_dim:
        rest = jnp.arange(pl.next_power_of_2(dim - rule.rotary_dim), dtype=jnp.int32)
        stretches.append((rule.rotary_dim + rest, rule.rotary_dim + rest < dim))
    raw = [_sum(projected, source, entry, mask) for entry, mask in stretches]
    raw = [_round(x, rule.before) for x in raw]
    factors = [_read(weight, entry, mask) for entry, mask in stretches]
    cos, sin = turn(fractions, position)
    scale = lax.rsqrt(sum(jnp.sum(x * x) for x in raw) / dim + rule.eps)
    if rule.offset:
        factors = [1.0 + x for x in factors]
    low, high, *rest = (
        _round(x * scale * factor, rule.behind) for x, factor in zip(raw, factors, strict=True)
    )
    turned = (low * cos - high * sin, high * cos + low * sin, *rest)
    for (entry, mask), x in zip(stretches, turned, strict=True):
        store(out.at[target + entry], x.astype(out.dtype), mask=mask)


def _sum(ref, starts, entry, mask):
    return added(_read(ref, start + entry, mask) for start in starts)


def _read(ref, at, mask):
    value = ref[at] if mask is None else load(ref.at[at], mask=mask, other=0.0)
    return value.astype(jnp.float32)


def _round(x, dtype):
    """fp32 values rounded to dtype, or unchanged if there is none."""
    return x if dtype is None else x.astype(dtype).astype(jnp.float32)
