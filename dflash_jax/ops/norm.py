"""Norms over the last axis, kept apart by name because target and draft mean different weights."""

import jax
import jax.numpy as jnp
from jax import lax

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
