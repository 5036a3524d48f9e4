"""Products with block-scaled float8 matrices, dequantised inside the product."""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.ops.dispatch import choose_form
from dflash_jax.ops.linear import linear
from dflash_jax.pallas import block_scaled_linear as pallas


@struct.dataclass
class BlockScale:
    """The scales of float8 matrices [..., out, in]: w[o, i] = kernel[o, i] * s[o // rows, i // c].

    values:  [..., out / rows, ceil(in / columns)] fp32; `rows` follows from the two shapes.
    columns: c, of a block. Static.
    Source: `checkpoints.md` 4.3.
    """

    values: jax.Array
    columns: int = struct.field(pytree_node=False)


def dequantise(kernel, scale, dtype):
    """The values of block-scaled matrices.

    Args:
      kernel: [..., out, in] float8_e4m3fn.
      scale:  `BlockScale` of it.
      dtype:  of the result.
    Returns:
      [..., out, in] dtype: the fp32 product, rounded once.
    Raises: ValueError for shapes or dtypes.
    """
    check_scale(kernel, scale)
    *lead, out, inner = kernel.shape
    *_, blocks, count = scale.values.shape
    wide = scale.values.reshape(*lead, blocks, 1, count, 1)
    wide = jnp.broadcast_to(wide, (*lead, blocks, out // blocks, count, scale.columns))
    wide = wide.reshape(*lead, out, count * scale.columns)[..., :inner]
    return (kernel.astype(jnp.float32) * wide).astype(dtype)


def block_scaled_linear(x, kernel, scale, out_dtype, *, implementation="auto"):
    """Applies a block-scaled matrix to the last axis: y[..., o] = sum_i w[o, i] * x[..., i].

    Args:
      x:         [..., in] bf16 or fp32.
      kernel:    [out, in] float8_e4m3fn.
      scale:     `BlockScale` of it.
      out_dtype: dtype of the result.
      implementation: "xla", "pallas", "interpret" or "auto": on a GPU the kernel where it takes the
        call, else "xla". Static.
    Returns:
      [..., out] out_dtype.
    Numeric: products and sums in fp32, one rounding at the output. "xla" rounds w to the dtype of x
      first; the kernel multiplies float8 values exactly and scales the fp32 sum of each block.
    Raises: ValueError for shapes or dtypes; NotImplementedError if a named kernel lacks the case.
    """
    parts = block_scaled_parts(x, kernel, scale, implementation=implementation)
    return (parts[0] if len(parts) == 1 else jnp.sum(parts, axis=0)).astype(out_dtype)


def block_scaled_parts(x, kernel, scale, *, implementation="auto"):
    """Summands [parts, ..., out] fp32 of `block_scaled_linear`, as `skinny_parts` leaves them."""
    if kernel.ndim != 2 or x.shape[-1] != kernel.shape[1]:
        raise ValueError(f"kernel: expected [out, {x.shape[-1]}], got {kernel.shape}")
    check_scale(kernel, scale)
    rows = x.reshape(-1, x.shape[-1])
    form = choose_form(
        "block_scaled_linear", implementation, _lacking(rows, kernel, scale), auto_gpu="pallas"
    )
    if form == "xla":
        return linear(x, dequantise(kernel, scale, x.dtype), jnp.float32)[None]
    parts = pallas.parts(
        rows, kernel, scale.values, columns=scale.columns, interpret=form == "interpret"
    )
    return parts.reshape(-1, *x.shape[:-1], kernel.shape[0])


def check_scale(kernel, scale) -> None:
    """Raises ValueError unless the scale has one fp32 value for each block of a float8 kernel."""
    if kernel.dtype != jnp.float8_e4m3fn:
        raise ValueError(f"kernel: expected float8_e4m3fn, got {kernel.dtype}")
    values = scale.values
    if values.dtype != jnp.float32:
        raise ValueError(f"scale: expected float32, got {values.dtype}")
    *lead, out, inner = kernel.shape
    blocks = -(-inner // scale.columns)
    legal = values.ndim == kernel.ndim and values.shape[:-2] == tuple(lead) and values.size
    legal = legal and values.shape[-1] == blocks and out % values.shape[-2] == 0
    if not legal:
        expected = [*lead, f"a divisor of {out}", blocks]
        raise ValueError(f"scale: expected {expected}, got {values.shape}")


def _lacking(rows, kernel, scale) -> str | None:
    """What the kernel takes and this call is not."""
    if pallas.supports(rows.shape[0], rows.dtype, kernel.shape[1], scale.columns):
        return None
    return (
        f"1..{pallas.MAX_TOKENS} bfloat16 rows, inputs in whole steps of at least 16 within a "
        f"block's columns; got {rows.dtype} {rows.shape}, {scale.columns} columns"
    )
