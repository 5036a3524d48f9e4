"""The one place that names Pallas' Triton lowering, and every version-dependent line of it.

jax 0.10.2 lowers a GPU `pallas_call` without compiler parameters through Mosaic, later versions
through Triton; parameters are therefore always explicit. Triton is deprecated upstream since 0.11
and warns at each lowering: that one warning is filtered here.
"""

import functools
import operator
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")

load, store = plt.load, plt.store
WHOLE = pl.BlockSpec(memory_space=pl.ANY)


def shared(*static: str):
    """Decorates a kernel's entry: a jit of its own, with these keywords static.

    All layers that call it alike then lower to one function of a program, and XLA compiles the
    kernel inside once; without it the names of the layers make every copy another kernel.
    """
    return functools.partial(jax.jit, static_argnames=static)


def gpu_call(
    kernel, *, name, out_shape, grid, in_specs, out_specs, interpret,
    aliases=None, num_warps=4, num_stages=2,
):
    """A `pallas_call` through Triton.

    XLA launches kernels such that one may start before the one ahead of it has ended (programmatic
    dependent launch). Ours never allow it: XLA's fusions read operands through a path that their
    wait does not guard.

    Args:
      name: found again in the HLO and in profiles.
      aliases: input index -> output index of buffers updated in place; donate them in the jit too.
      interpret: runs the kernel as XLA operations. An argument, never derived from the device:
        kernels are compiled for a GPU on machines that have none.
    """
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        input_output_aliases=aliases or {},
        interpret=interpret,
        name=name,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )


def added(parts):
    """The sum of parts, first to last: whoever adds them gets the same bits."""
    return functools.reduce(operator.add, parts)


def dot(left, right):
    """[m, k] times [k, n] summed in fp32; fp32 operands exactly, never in TF32."""
    exact = left.dtype == jnp.float32
    return lax.dot_general(
        left, right, (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None, preferred_element_type=jnp.float32,
    )


# Four float8 values in one register become two registers of bfloat16 pairs: sign, exponent and
# mantissa move to their places, and a product with 2^120 corrects the exponent's bias. Exact; the
# hardware's own conversion goes through float16 one value at a time and takes longer than the load.
_FLOAT8_PAIRS = """{
.reg .b32 low, high, part, bias, zero;
mov.b32 bias, 0x7B807B80;
mov.b32 zero, 0x80008000;
prmt.b32 low, $2, 0, 0x1404;
prmt.b32 high, $2, 0, 0x3424;
shr.b32 part, low, 4;
and.b32 part, part, 0x07F007F0;
lop3.b32 low, low, 0x80008000, part, 0xEA;
fma.rn.bf16x2 $0, low, bias, zero;
shr.b32 part, high, 4;
and.b32 part, part, 0x07F007F0;
lop3.b32 high, high, 0x80008000, part, 0xEA;
fma.rn.bf16x2 $1, high, bias, zero;
}"""


def widened(values, dtype, *, interpret: bool):
    """float8_e4m3fn values in bf16 or fp32, exactly, but for NaN: a device reads it as 480."""
    if interpret or dtype != jnp.bfloat16:
        return values.astype(dtype)
    wide = jax.ShapeDtypeStruct(values.shape, jnp.bfloat16)
    return plt.elementwise_inline_asm(
        _FLOAT8_PAIRS, args=[values], constraints="=r,=r,r", pack=4, result_shape_dtypes=[wide]
    )[0]


def fused(left, right, addend, *, interpret: bool):
    """left * right + addend in fp32 with one rounding and in one instruction: a device's compiler
    makes two of it by itself."""
    if interpret:
        return left * right + addend
    args = broadcast(left, right, addend)
    made = [jax.ShapeDtypeStruct(args[0].shape, jnp.float32)]
    return plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;", args=args, constraints="=f,f,f,f", pack=1,
        result_shape_dtypes=made,
    )[0]


def is_power_of_two(number: int) -> bool:
    """Whether a kernel array may have this extent."""
    return number > 0 and number & (number - 1) == 0


def addressable(array) -> bool:
    """Whether a kernel reaches every entry of an array: up to 2^32 bytes Pallas' lowering counts
    entries in signed 32-bit numbers, which single bytes overflow, and above in 64-bit ones."""
    return array.dtype.itemsize > 1 or not 2**31 < array.size <= 2**32


def step_within(width: int, columns, most: int) -> int:
    """The largest power of two, at most `most`, in whose steps one goes over `width` entries
    without leaving a block inside a step; `columns`: of the blocks, which may be wider."""
    for count in columns:
        width |= count if count < width else 0
    return min(most, width & -width)


def broadcast(*indices):
    """Scalars and index arrays of one rank, as the arrays of one shape that a load takes."""
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in indices))
    return tuple(jnp.broadcast_to(i, shape) for i in indices)


def places(rows, columns):
    """Two index arrays [rows, columns] of a rectangle of entries."""
    return broadcast(rows[:, None], columns[None, :])
