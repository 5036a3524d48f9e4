"""Norms over the last axis, kept apart by name because target and draft mean different weights."""

import jax
import jax.numpy as jnp
from jax import lax

from dflash_jax.ops.dispatch import choose_form
from dflash_jax.ops.rounding import round_to
from dflash_jax.pallas import norm as kernel
from dflash_jax.pallas.common import added

_L2_EPS = 1e-6


def plain_rmsnorm(x, weight, eps):
    """Scales x to unit mean square and multiplies by the weight: w * x / sqrt(mean(x^2) + eps).

    Args:
      x:      [..., N] float; read as fp32.
      weight: [N] float, the whole factor (every draft norm, the GDN output norm).
      eps:    Python float.
    Returns:
      [..., N] fp32; the caller rounds where its contract names a rounding.
    Raises: ValueError if weight is not [N].
    Source: contracts 0.3 and 6.3.2.
    """
    return _unit_rms(x, eps) * _factor(x, weight)


def offset_rmsnorm(x, weight, eps):
    """Scales x to unit mean square and multiplies by 1 + w: (1 + w) * x / sqrt(mean(x^2) + eps).

    Args:
      x:      [..., N] float; read as fp32.
      weight: [N] float, stored relative to one (the target's text norms).
      eps:    Python float.
    Returns:
      [..., N] fp32.
    Raises: ValueError if weight is not [N].
    Source: contracts 0.3 and 6.3.2.
    """
    return _unit_rms(x, eps) * (1.0 + _factor(x, weight))


def add_rmsnorm(x, branch, weight, eps, *, offset, implementation="auto"):
    """Adds a branch to the residual and norms the sum as the residual keeps it.

    Args:
      x:      [..., N] float, the residual.
      branch: same shape, float; or [parts, ..., N] fp32, summands that are added first, as
        `skinny_parts` leaves them. Either spares a launch that would only add or round.
      weight: [N] float.
      eps:    Python float.
      offset: True for `offset_rmsnorm`, False for `plain_rmsnorm`. Static.
      implementation: "xla", "pallas", "interpret" or "auto": on a GPU the kernel. Static.
        The kernel has no gradient.
    Returns:
      x + branch and its norm, both [..., N] in x's dtype.
    Numeric: the branch is rounded to x's dtype, then the sum is; the norm reads the rounded sum in
      fp32 and is rounded once.
    Raises: ValueError for shapes; NotImplementedError if a named kernel lacks the case.
    Source: contracts 0.3, 5.4 and 6.3.2.
    """
    _check_branch(x, branch)
    _factor(x, weight)
    width = x.shape[-1]
    lacking = None if x.size and kernel.supports(width) else (
        f"rows of 1..{kernel.MAX_WIDTH} entries, got {x.shape}"
    )
    form = choose_form("add_rmsnorm", implementation, lacking, auto_gpu="pallas")
    if form != "xla":
        return kernel.add_rmsnorm(
            x, branch, weight, eps=eps, offset=offset, interpret=form == "interpret"
        )
    total = add_branch(x, branch)
    rule = offset_rmsnorm if offset else plain_rmsnorm
    return total, rule(total, weight, eps).astype(x.dtype)


def add_branch(x, branch):
    """The residual x joined by a branch, in x's dtype; shapes and roundings as in `add_rmsnorm`."""
    _check_branch(x, branch)
    if branch.ndim > x.ndim:
        branch = added(branch)
    rounded = round_to(branch.astype(jnp.float32), x.dtype)
    return round_to(x.astype(jnp.float32) + rounded.astype(jnp.float32), x.dtype)


def _check_branch(x, branch):
    """Raises ValueError unless a branch, or every one of its fp32 parts, has the shape of x."""
    parts = branch.ndim == x.ndim + 1 and branch.dtype == jnp.float32 and branch.shape[0] > 0
    if branch.shape[parts:] != x.shape:
        raise ValueError(
            f"branch: expected {x.shape} or float32 parts of it, got {branch.dtype} {branch.shape}"
        )


def gated_rmsnorm(x, gate, weight, eps):
    """Norms x plainly and opens it by the gate: plain_rmsnorm(x, w) * gate * sigmoid(gate).

    Args:
      x:      [..., N] float; read as fp32.
      gate:   same shape as x, float; read as fp32, neither normed nor convolved.
      weight: [N] float.
      eps:    Python float.
    Returns:
      [..., N] fp32.
    Raises: ValueError if gate and x differ in shape or weight is not [N].
    Source: contracts 6.3.4 (output of the gated delta net).
    """
    if gate.shape != x.shape:
        raise ValueError(f"gate: expected shape {x.shape}, got {gate.shape}")
    return plain_rmsnorm(x, weight, eps) * jax.nn.silu(gate.astype(jnp.float32))


def l2norm(x):
    """Scales x to unit length: x / sqrt(sum(x^2) + 1e-6).

    Args:
      x: [..., N] float; read as fp32.
    Returns:
      [..., N] fp32.
    Source: contracts 6.3.4; the epsilon belongs to the recurrence, not to the model's config.
    """
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + _L2_EPS)


def _unit_rms(x, eps):
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def _factor(x, weight):
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: expected shape {x.shape[-1:]}, got {weight.shape}")
    return weight.astype(jnp.float32)
