"""Roundings that a contract names."""

import jax.numpy as jnp
from jax import lax


def rounded(x, dtype):
    """fp32 values rounded to dtype (nearest even) and kept in fp32.

    A cast down and back up inside one jit may be dropped as excess precision (XLA on a GPU does);
    `reduce_precision` may not, but makes zeros of what is subnormal in dtype: float16 has such
    values from 6e-5 down.

    Args:
      x: fp32.
      dtype: the boundary's dtype. Static.
    Returns:
      the same shape in fp32. fp32 to fp32 is free.
    """
    info = jnp.finfo(dtype)
    normal = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == jnp.finfo(x.dtype).nexp:
        return normal
    steps = 2.0 ** (info.nmant - info.minexp)  # a power of two: scaling is exact
    whole = lax.round(x * steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.abs(x) < 2.0**info.minexp, whole / steps, normal)


def round_to(x, dtype):
    """`rounded`, in dtype: the same even when the next operation widens it again."""
    return rounded(x, dtype).astype(dtype)
