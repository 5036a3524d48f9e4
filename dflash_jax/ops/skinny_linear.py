"""Products of a few rows with a large matrix, and what follows them in a layer."""

import math

import jax
import jax.numpy as jnp

from dflash_jax.ops.dispatch import choose_form
from dflash_jax.ops.linear import linear
from dflash_jax.pallas import mosaic
from dflash_jax.pallas import skinny_linear as kernel
from dflash_jax.pallas.tiling import PROCESSORS

_LARGE, _LARGE_FOR_ONE = 8 << 20, 32 << 20  # bytes of a matrix, for several tokens and for one
_LARGE_TO_MIX = 128 << 20


def skinny_linear(x, matrix, out_dtype, *, residual=None, implementation="auto"):
    """y = matrix x, or residual + matrix x.

    Args:
      x:        [..., in] float.
      matrix:   [out, in], same dtype as x.
      out_dtype: dtype of the result; with a residual, the residual's.
      residual: None, or [..., out]; the product is rounded to its dtype before the two meet.
      implementation: "xla", "pallas", "interpret", "mosaic" or "auto", which is "xla". Static.
    Returns:
      [..., out] out_dtype.
    Numeric: products and sums in fp32 (fp32 operands: no TF32); one rounding, with a residual two.
    Raises: ValueError for shapes or dtypes; NotImplementedError if a named kernel lacks the case.
    """
    shape = (*x.shape[:-1], matrix.shape[0])
    form = _form("skinny_linear", implementation, x, matrix)
    if residual is not None and (residual.shape != shape or residual.dtype != out_dtype):
        raise ValueError(
            f"residual: expected {shape} {jnp.dtype(out_dtype)}, "
            f"got {residual.shape} {residual.dtype}"
        )
    if form == "xla":
        product = linear(x, matrix, jnp.float32)
        return kernel.plus(product, residual, out_dtype)
    flat = x.reshape(-1, x.shape[-1])
    options = dict(out_dtype=out_dtype)
    if residual is not None:
        options["residual"] = residual.reshape(-1, shape[-1])
    if form == "mosaic":
        made = kernel.stream_linear(flat, matrix, **options)
    else:
        made = kernel.linear(flat, matrix, **options, interpret=form == "interpret")
    return made.reshape(shape)


def skinny_parts(x, matrix, *, implementation="auto"):
    """Summands of y = matrix x, for a kernel that adds them to something else anyway.

    Args: as in `skinny_linear`; implementation "xla", "pallas", "interpret" or "auto": on a GPU the
      kernel where it was measured faster, else "xla". Static.
    Returns:
      [parts, ..., out] fp32, whose sum over the first axis is y; "xla" leaves one part.
    Raises: ValueError for shapes or dtypes; NotImplementedError if a named kernel lacks the case.
    """
    form = _form("skinny_parts", implementation, x, matrix)
    if form == "xla":
        return linear(x, matrix, jnp.float32)[None]
    parts = kernel.parts(x.reshape(-1, x.shape[-1]), matrix, interpret=form == "interpret")
    return parts.reshape(-1, *x.shape[:-1], matrix.shape[0])


def skinny_swiglu(x, matrix, *, rounded=False, implementation="auto"):
    """SiLU(gate x) * (up x), gate and up being the halves of one matrix.

    Args:
      x:       [..., in] float.
      matrix:  [2 * inner, in], gate rows then up rows, same dtype as x.
      rounded: rounds the two products to x's dtype before they meet (DFlash). Static.
      implementation: "xla", "pallas", "interpret", "mosaic" or "auto": on a GPU the kernel where it
        was measured faster, else "xla". Static.
    Returns:
      [..., inner] in x's dtype.
    Numeric: fp32 up to the named roundings.
    Raises: ValueError for shapes or dtypes; NotImplementedError if a named kernel lacks the case.
    """
    if matrix.shape[0] % 2:
        raise ValueError(f"matrix: expected an even number of rows, got {matrix.shape}")
    form = _form("skinny_swiglu", implementation, x, matrix)
    if form == "xla":
        parts = linear(x, matrix, x.dtype if rounded else jnp.float32)
        gate, up = jnp.split(parts.astype(jnp.float32), 2, axis=-1)
        return (jax.nn.silu(gate) * up).astype(x.dtype)
    flat = x.reshape(-1, x.shape[-1])
    if form == "mosaic":
        made = kernel.stream_swiglu(flat, matrix, rounded=rounded)
    else:
        made = kernel.swiglu(flat, matrix, rounded=rounded, interpret=form == "interpret")
    return made.reshape(*x.shape[:-1], -1)


def _form(op: str, implementation: str, x, matrix) -> str:
    if x.dtype != matrix.dtype or matrix.shape[1:] != x.shape[-1:]:
        raise ValueError(
            f"matrix: expected [out, {x.shape[-1]}] {x.dtype}, got {matrix.shape} {matrix.dtype}"
        )
    if 0 in matrix.shape:
        raise ValueError(f"matrix: expected at least one row and column, got {matrix.shape}")
    tokens = math.prod(x.shape[:-1])
    few = None if 0 < tokens <= kernel.MAX_TOKENS else f"1..{kernel.MAX_TOKENS} rows, got {tokens}"
    some = None if tokens else "at least one row, got none"
    streamed = few if few or mosaic.supports(tokens, matrix) else (
        f"16-bit matrices of multiples of 8 and 64, got {matrix.shape} {matrix.dtype}"
    )
    more = None if op == "skinny_parts" else {"mosaic": streamed}
    pays = op in _PAYS and _PAYS[op](tokens, *matrix.shape, matrix.dtype)
    return choose_form(op, implementation, some, auto_gpu="pallas" if pays else "xla", more=more)


def _pays(tokens: int, rows: int, width: int, dtype) -> bool:
    """Whether the kernel was faster than XLA's product and sum on an H200.

    XLA keeps up where a matrix has tiles for all processors several times over, and where it is
    small: as a row's sums for one token, below a launch's time for any.
    """
    itemsize = jnp.dtype(dtype).itemsize
    size = rows * width * itemsize
    most = 3 * kernel.TILE * PROCESSORS
    return (
        itemsize == 2 and tokens <= kernel.MOST_MEASURED and rows < most
        and size >= (_LARGE_FOR_ONE if tokens == 1 else _LARGE)
    )


def _mixing_pays(tokens: int, rows: int, width: int, dtype) -> bool:
    """Whether the kernel was faster than XLA's product and mixing: a large matrix.

    On an H200 34816 x 5120 takes 83.2 us of one row, 83.8 of eight, 84.6 of sixteen, 87.0 of 32 and
    90.5 of 64, against 88.4, 86.8, 86.5, 90.2 and 94; 12288 x 2048 takes as long in XLA."""
    itemsize = jnp.dtype(dtype).itemsize
    few = 0 < tokens <= kernel.MOST_MEASURED
    return itemsize == 2 and few and rows * width * itemsize >= _LARGE_TO_MIX


_PAYS = {"skinny_parts": _pays, "skinny_swiglu": _mixing_pays}
