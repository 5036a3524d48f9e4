"""What attention reads, from one fused projection: normed and rotated heads, values and gates."""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.ops.dispatch import choose_form
from dflash_jax.ops.norm import added, offset_rmsnorm, plain_rmsnorm
from dflash_jax.ops.rope import interleaved_axes, mrope_partial, rope_1d, turn_fractions
from dflash_jax.ops.rounding import round_to
from dflash_jax.pallas import norm_rope as kernel


@struct.dataclass
class Heads:
    """query, gate [B, W, Hq, D] and key, value [B, W, Hkv, D]; gate is None where there is none."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    gate: jax.Array | None


def norm_rope(
    projected, query_norm, key_norm, positions, *, heads, gated, eps, offset, theta,
    mrope=None, rounded=False, dtypes, implementation="auto",
):
    """Cuts a projection into heads, norms those of query and key one by one, and rotates them.

    q = rope(rmsnorm(q_raw, query_norm)), k = rope(rmsnorm(k_raw, key_norm)), v = v_raw.

    Args:                                            (Hq query heads, Hkv K/V heads of D entries)
      projected: [B, W, N] float, or parts [_, B, W, N] fp32 that are added first, see
        `skinny_parts`; N is query, gate (if gated), key, value, head after head.
      query_norm, key_norm: [D] float.
      positions: [B, W] int32, or [B, W, 3] with mrope.
      heads:     (Hq, Hkv). Static.
      gated:     whether gate heads follow the query heads. Static.
      eps, offset: of the norms; offset multiplies by 1 + weight. Static.
      theta:     base of the frequencies. Static.
      mrope:     None for `rope_1d`, or (rotary_dim, mrope_section) of `mrope_partial`. Static.
      rounded:   DFlash: normed heads are rounded to dtypes[0] before they turn. Static.
      dtypes:    of query and gate, of key, and of value. Static.
      implementation: "xla", "pallas", "interpret" or "auto": on a GPU the kernel. Static.
        The kernel has no gradient.
    Returns:
      `Heads`.
    Numeric: the projection is rounded to dtypes[0] first; norm and rotation are fp32 with one
      rounding behind them. Values are rounded to dtypes[0] and from there to dtypes[2]. Both forms
      take the same 32-bit fraction of a turn; their cos and sin differ in the last places of fp32.
    Raises: ValueError for shapes; NotImplementedError if a named kernel lacks the case.
    Source: contracts 5.2 and 6.3.3.
    """
    dim = query_norm.shape[0]
    rotary_dim, sections = (dim, None) if mrope is None else mrope
    parts = _parts(dim, heads, gated, [jnp.dtype(dtype) for dtype in dtypes])
    rule = kernel.Rule(
        eps=eps, offset=offset, rotary_dim=rotary_dim, sections=sections,
        before=jnp.dtype(dtypes[0]), behind=jnp.dtype(dtypes[0]) if rounded else None,
    )
    summands = projected if projected.ndim == 4 else projected[None]
    _check(summands, query_norm, key_norm, positions, parts, rule)
    lacking = None if kernel.supports(rotary_dim) else (
        f"a power of two of rotated pairs, got {rotary_dim // 2}"
    )
    form = choose_form("norm_rope", implementation, lacking, auto_gpu="pallas")
    if form == "xla":
        made = _composed(added(summands), (query_norm, key_norm), positions, theta, parts, rule)
    else:
        made = kernel.norm_rope(
            summands, query_norm, key_norm, positions,
            jnp.asarray(turn_fractions(rotary_dim, theta).view("int32")), parts=parts, rule=rule,
            interpret=form == "interpret",
        )
    query, key, value, *gate = made
    return Heads(query=query, key=key, value=value, gate=gate[0] if gated else None)


def _parts(dim, heads, gated, dtypes):
    """Query, key, value and perhaps gate heads, and where they start in a column."""
    query_rows, rows = (count * dim for count in heads)
    first = 2 * query_rows if gated else query_rows
    parts = (
        kernel.Part(0, heads[0], dtypes[0]), kernel.Part(first, heads[1], dtypes[1]),
        kernel.Part(first + rows, heads[1], dtypes[2]),
    )
    return (*parts, kernel.Part(query_rows, heads[0], dtypes[0])) if gated else parts


def _check(summands, query_norm, key_norm, positions, parts, rule):
    (dim,) = query_norm.shape
    if key_norm.shape != (dim,):
        raise ValueError(f"key_norm: expected {(dim,)}, got {key_norm.shape}")
    entries = sum(part.heads for part in parts) * dim
    if summands.ndim != 4 or not len(summands) or summands.shape[-1] != entries:
        raise ValueError(f"projected: expected [B, W, {entries}] or parts, got {summands.shape}")
    if len(summands) > 1 and summands.dtype != jnp.float32:
        raise ValueError(f"projected: expected parts in float32, got {summands.dtype}")
    place = summands.shape[1:3] if rule.sections is None else (*summands.shape[1:3], 3)
    if (positions.shape, positions.dtype) != (place, jnp.int32):
        raise ValueError(
            f"positions: expected {place} int32, got {positions.shape} {positions.dtype}"
        )
    if rule.rotary_dim % 2 or not 0 < rule.rotary_dim <= dim:
        raise ValueError(f"mrope: expected an even rotary_dim in 2..{dim}, got {rule.rotary_dim}")
    if rule.sections is not None:
        interleaved_axes(rule.rotary_dim, rule.sections)


def _composed(projected, weights, positions, theta, parts, rule):
    norm = offset_rmsnorm if rule.offset else plain_rmsnorm
    dim = weights[0].shape[0]

    def heads(part):
        rows = projected[..., part.first : part.first + part.heads * dim]
        return _round(rows, rule.before).reshape(*projected.shape[:2], part.heads, dim)

    def turned(part, weight):
        x = norm(heads(part), weight, rule.eps)
        x = x if rule.behind is None else _round(x, rule.behind)
        if rule.sections is None:
            return rope_1d(x, positions, theta).astype(part.dtype)
        return mrope_partial(
            x, positions, theta=theta, rotary_dim=rule.rotary_dim, mrope_section=rule.sections
        ).astype(part.dtype)

    query_and_key = [turned(*pair) for pair in zip(parts[:2], weights, strict=True)]
    return (*query_and_key, *(heads(part).astype(part.dtype) for part in parts[2:]))


def _round(x, dtype):
    return x if x.dtype == dtype else round_to(x, dtype)
