"""Roundings that a contract names."""

import jax.numpy as jnp
from jax import lax


def round_to(x, dtype):
    """x rounded to dtype (nearest even) even when the next operation widens it again.

    A cast down and back up inside one jit may be dropped as excess precision (XLA on a GPU does);
    `reduce_precision` may not. fp32 to fp32 is free.

    Args:
      x: fp32.
      dtype: the boundary's dtype. Static.
    Returns:
      the same shape in dtype.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)
