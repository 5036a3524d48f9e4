"""Bias-free products with a kernel in the checkpoint's [out, in] orientation."""

import jax.numpy as jnp
from jax import lax


def linear(x, kernel, out_dtype):
    """Applies a matrix to the last axis: y[..., o] = sum_i kernel[o, i] * x[..., i].

    Args:
      x:         [..., in] float.
      kernel:    [out, in], same dtype as x.
      out_dtype: dtype of the result.
    Returns:
      [..., out] out_dtype.
    Numeric: products and sums in fp32 (fp32 operands: no TF32); one rounding, at the output.
    Raises: ValueError if the dtypes differ or the last axes do.
    """
    if x.dtype != kernel.dtype:
        raise ValueError(f"x: expected the kernel's dtype {kernel.dtype}, got {x.dtype}")
    return _dot(x, kernel).astype(out_dtype)


def linear_split(x, kernel):
    """Applies a bf16 matrix to fp32 rows without first rounding the rows to bf16.

    x is written as hi + lo, both bf16, and the two are extra rows of one product:
    y = kernel hi + kernel lo. What is lost is x - hi - lo, at most 2^-16 of x.

    Args:
      x:      [..., in] fp32.
      kernel: [out, in] bf16 (split) or fp32 (an ordinary fp32 product).
    Returns:
      [..., out] fp32.
    Numeric: about 2.5e-6 relative L2 from the unrounded formula; rounding x gives 1.6e-3.
    Raises: ValueError for other dtypes or if the last axes differ.
    Source: contracts 5.5 (increments from the unrounded n) and 6.3.4 (a and b of the delta net).
    """
    if x.dtype != jnp.float32:
        raise ValueError(f"x: expected float32, got {x.dtype}")
    if kernel.dtype == jnp.float32:
        return _dot(x, kernel)
    if kernel.dtype != jnp.bfloat16:
        raise ValueError(f"kernel: expected bfloat16 or float32, got {kernel.dtype}")
    # reduce_precision, not a cast and back: XLA may drop such a pair, and lo would be zero.
    high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    halves = jnp.stack([high, x - high]).astype(jnp.bfloat16)
    products = _dot(halves, kernel)
    return products[0] + products[1]


def _dot(x, kernel):
    if kernel.ndim != 2 or x.shape[-1:] != kernel.shape[1:]:
        raise ValueError(f"kernel: expected [out, {x.shape[-1]}], got {kernel.shape}")
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contract_last_axes = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(
        x, kernel, contract_last_axes, precision=precision, preferred_element_type=jnp.float32
    )
