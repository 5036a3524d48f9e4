"""Products of a few rows with a large matrix, and what follows them in a layer."""

import math

import jax
import jax.numpy as jnp

from dflash_jax.ops.dispatch import choose_form
from dflash_jax.ops.linear import linear
from dflash_jax.pallas import mosaic
from dflash_jax.pallas import skinny_linear as kernel
from dflash_jax.pallas.tiling import PROCESSORS

_LARGE = 8 << 20  # bytes of a matrix whose product takes longer than a launch


def skinny_linear(x, matrix, out_dtype, *, residual=None, implementation="auto"):
    """y = matrix x, or residual + matrix x.

    Args:
      x:        [..., in] float.
      matrix:   [out, in], same dtype as x.
      out_dtype: dtype of the result; with a residual, the residual's.
      residual: None, or [..., out]; the product is rounded to its dtype before the two meet.
      implementation: "xla", "pallas", "interpret", "mosaic" or "auto": on a GPU "pallas" where it
        was measured faster, else "xla". Static.
    Returns:
      [..., out] out_dtype.
    Numeric: products and sums in fp32 (fp32 operands: no TF32); one rounding, with a residual two.
    Raises: ValueError for shapes or dtypes; NotImplementedError if a named kernel lacks the case.
    """
    shape = (*x.shape[:-1], matrix.shape[0])
    form = _form("skinny_linear", implementation, x, matrix, added_elsewhere=False)
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
      kernel for large 16-bit matrices of few rows, else "xla". Static.
    Returns:
      [parts, ..., out] fp32, whose sum over the first axis is y; "xla" leaves one part.
    Raises: ValueError for shapes or dtypes; NotImplementedError if a named kernel lacks the case.
    """
    form = _form("skinny_parts", implementation, x, matrix, added_elsewhere=True)
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
      implementation: as in `skinny_linear`, but "auto" is "xla". Static.
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


def _form(op: str, implementation: str, x, matrix, *, added_elsewhere: bool | None = None) -> str:
    """The form of an op; added_elsewhere: of a plain product, whether it may stay in parts."""
    if x.dtype != matrix.dtype or matrix.shape[1:] != x.shape[-1:]:
        raise ValueError(
            f"matrix: expected [out, {x.shape[-1]}] {x.dtype}, got {matrix.shape} {matrix.dtype}"
        )
    tokens, plain = math.prod(x.shape[:-1]), added_elsewhere is not None
    few = None if 0 < tokens <= kernel.MAX_TOKENS else f"1..{kernel.MAX_TOKENS} rows, got {tokens}"
    streamed = few if few or mosaic.supports(tokens, matrix) else (
        f"16-bit matrices of multiples of 8 and 64, got {matrix.shape} {matrix.dtype}"
    )
    more = {} if op == "skinny_parts" else {"mosaic": streamed}
    pays = plain and _pays(tokens, matrix, in_parts=added_elsewhere)
    return choose_form(
        op, implementation, (None if tokens else "1 row or more, got 0") if plain else few,
        auto_gpu="pallas" if pays else "xla", more=more,
    )


def _pays(tokens: int, matrix, *, in_parts: bool) -> bool:
    """Whether the kernel was faster than XLA's product on an H200.

    XLA keeps up where a matrix has tiles for all processors several times over; where it has fewer,
    XLA adds parts in a launch of its own, and so does the kernel unless a reader takes the parts.
    """
    tiles = matrix.shape[0] / (kernel.TILE * PROCESSORS)
    large = matrix.size * jnp.dtype(matrix.dtype).itemsize >= _LARGE
    enough = in_parts or tiles >= 1.0
    return jnp.dtype(matrix.dtype).itemsize == 2 and large and tokens <= 64 and enough and tiles < 3
