"""Dynamic grouped convolution of a DFlash2 layer, before (side 0) and after (side 1) a branch.

Channel h belongs to group h // G. Tap 0 multiplies the current column, tap t the column t before
it in the same block; nothing lies before column 0.
"""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.ops.dispatch import choose_form
from dflash_jax.ops.linear import linear, linear_split
from dflash_jax.ops.norm import added, plain_rmsnorm
from dflash_jax.ops.rounding import round_to
from dflash_jax.pallas import dynamic_grouped_conv as kernel


@struct.dataclass(kw_only=True)
class Prepared:
    """What a branch reads, and what its finish needs later."""

    # [B, W, H] out_dtype, the branch's input.
    prepared: jax.Array
    # [B, W, taps, H/G] out_dtype, increments of side 1.
    finish_delta: jax.Array


def prepare(x, norm_weight, base, projection, *, eps, out_dtype, implementation="auto"):
    """Norms a residual, takes the increments of both sides from it and convolves side 0.

    n = plain_rmsnorm(x); d = projection n;
    prepared[i, h] = sum_t (base[0, t, h] + d[i, 0, t, h // G]) * n[i - t, h], t <= i.

    Args:
      x:           [B, W, H] float, the residual.
      norm_weight: [H] float, the layer norm before the branch.
      base:        [2, taps, H] float, whole coefficients (no implicit 1).
      projection:  [2*taps*H/G, H] bf16 or fp32; row (side*taps + tap)*H/G + group.
      eps:         Python float.
      out_dtype:   dtype of the two results.
      implementation: "xla", "pallas", "interpret" or "auto": on a GPU the kernel. Static.
    Returns:
      Prepared.
    Numeric: n and the increments of side 0 are never rounded; prepared and finish_delta once.
    Raises: ValueError for shapes; NotImplementedError if a named kernel lacks the case.
    Source: the DFlash reference document, dynamic convolution; contracts 5.5.
    """
    _check_rows(projection, base.shape[1])
    groups = projection.shape[0] // (2 * base.shape[1])
    _check_base(base[0], x.shape[-1], groups)
    form = _form(x, implementation)
    if form != "xla":
        options = {"interpret": form == "interpret"}
        halves, scale = kernel.norm(
            x.reshape(-1, x.shape[-1]), norm_weight, eps=eps, dtype=projection.dtype, **options
        )
        products = linear(halves, projection, jnp.float32)
        products = products.reshape(len(halves), *x.shape[:2], -1)
        prepared, finish_delta = kernel.prepare(
            x, norm_weight, scale, base, products, out_dtype=out_dtype, **options
        )
        return Prepared(prepared=prepared, finish_delta=finish_delta)
    normed = plain_rmsnorm(x, norm_weight, eps)
    delta = increments(normed, projection, taps=base.shape[1])
    return Prepared(
        prepared=round_to(apply_taps(normed, base[0], delta[:, :, 0]), out_dtype),
        finish_delta=round_to(delta[:, :, 1], out_dtype),
    )


def finish(residual, z, base, finish_delta, *, implementation="auto"):
    """Convolves a branch's output with side 1 and adds it to the residual.

    out[i, h] = residual[i, h] + sum_t (base[1, t, h] + finish_delta[i, t, h // G]) * z[i - t, h].

    Args:
      residual:     [B, W, H] float.
      z:            [B, W, H] fp32, the branch's projected output, unrounded, or parts of it as
        `skinny_parts` leaves them.
      base:         [2, taps, H] float.
      finish_delta: [B, W, taps, H/G] float, from prepare of the same branch.
      implementation: as in `prepare`. Static.
    Returns:
      [B, W, H], dtype of residual; the only rounding.
    Raises: ValueError for shapes; NotImplementedError if a named kernel lacks the case.
    Source: contracts 5.5.
    """
    parts = z if z.ndim > residual.ndim else z[None]
    if residual.shape != parts.shape[1:] or not len(parts) or z.dtype != jnp.float32:
        raise ValueError(
            f"z: expected float32 {residual.shape}, or parts of it, got {z.dtype} {z.shape}"
        )
    _check_taps(residual.shape, base[1], finish_delta.shape)
    form = _form(residual, implementation)
    if form != "xla":
        return kernel.finish(residual, parts, base, finish_delta, interpret=form == "interpret")
    z = added(parts)
    total = residual.astype(jnp.float32) + apply_taps(z, base[1], finish_delta)
    return total.astype(residual.dtype)


def increments(normed, projection, *, taps):
    """Projects normed columns to the increments of both sides: d[b, i, side, tap, group].

    Args:
      normed:     [B, W, H] fp32, unrounded.
      projection: [2*taps*groups, H] bf16 or fp32.
      taps:       columns a side reads. Static.
    Returns:
      [B, W, 2, taps, groups] fp32.
    Raises: ValueError if the rows are not a multiple of 2*taps.
    Source: contracts 5.5.
    """
    _check_rows(projection, taps)
    return linear_split(normed, projection).reshape(*normed.shape[:2], 2, taps, -1)


def apply_taps(x, base, delta):
    """Convolves columns: out[i, h] = sum_(t <= i) (base[t, h] + delta[i, t, h // G]) * x[i - t, h].

    Args:
      x:     [B, W, H] float.
      base:  [taps, H] float.
      delta: [B, W, taps, groups] float; column i's increments serve all its taps.
    Returns:
      [B, W, H] fp32. Column i reads columns i-taps+1..i of its own row alone.
    Numeric: fp32, tap 0 first.
    Raises: ValueError for shapes or if groups do not divide H.
    Source: contracts 5.5.
    """
    batch, width, hidden = x.shape
    taps, groups = base.shape[0], delta.shape[-1]
    _check_taps(x.shape, base, delta.shape)
    coefficient = delta.astype(jnp.float32)[..., None] + base.astype(jnp.float32).reshape(
        taps, groups, hidden // groups
    )
    grouped = x.astype(jnp.float32).reshape(batch, width, groups, hidden // groups)
    total = coefficient[:, :, 0] * grouped
    for tap in range(1, min(taps, width)):
        # Only columns that have one read a previous column; no row index is ever clamped.
        total = total.at[:, tap:].add(coefficient[:, tap:, tap] * grouped[:, : width - tap])
    return total.reshape(batch, width, hidden)


def _form(block, implementation: str) -> str:
    width = block.shape[1]
    lacking = None if kernel.supports(width) else f"1..{kernel.MAX_WIDTH} columns, got {width}"
    return choose_form("dynamic_grouped_conv", implementation, lacking, auto_gpu="pallas")


def _check_rows(projection, taps: int):
    rows = projection.shape[0]
    if rows % (2 * taps):
        raise ValueError(f"projection: expected a multiple of {2 * taps} rows, got {rows}")


def _check_base(base, hidden: int, groups: int):
    if base.shape[1:] != (hidden,) or hidden % groups:
        raise ValueError(f"base: expected [taps, {hidden}], groups {groups}, got {base.shape}")


def _check_taps(shape, base, delta_shape):
    batch, width, hidden = shape
    taps, groups = base.shape[0], delta_shape[-1]
    _check_base(base, hidden, groups)
    if delta_shape != (batch, width, taps, groups):
        raise ValueError(f"delta: expected {(batch, width, taps, groups)}, got {delta_shape}")
