"""Small modules: a bias-free product, its fused form, a norm by kind, and the SwiGLU block.

Kernels keep the checkpoint's [out, in] orientation. Matrices are stored in `param_dtype`, or with a
`block` of (rows, columns) as float8 with an fp32 scale a block; norm weights are always fp32.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.ops.block_scaled_linear import (
    BlockScale,
    block_scaled_linear,
    block_scaled_parts,
)
from dflash_jax.ops.linear import linear
from dflash_jax.ops.norm import add_rmsnorm, offset_rmsnorm, plain_rmsnorm
from dflash_jax.ops.skinny_linear import skinny_parts, skinny_swiglu

FP8 = jnp.dtype(jnp.float8_e4m3fn)
# Random float8 values are this much larger than those of a dense matrix, and their scales this much
# below one: far from both ends of the format.
_FP8_GAIN = 1024.0


def matrix_init(key, shape, dtype):
    """Normal values with variance 1 / fan_in, for a kernel [..., out, in]; in float8 before the
    scales of `scale_init`."""
    values = jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5
    if dtype == FP8:
        most = float(jnp.finfo(FP8).max)
        values = jnp.clip(_FP8_GAIN * values, -most, most)
    return values.astype(dtype)


def scale_init(key, shape, dtype):
    """Scales of blocks of `matrix_init`, spread over a factor of two."""
    spread = jax.random.uniform(key, shape, jnp.float32, -0.5, 0.5)
    return (jnp.exp2(spread) / _FP8_GAIN).astype(dtype)


def scale_shape(rows, inputs, block, *pieces):
    """Extents of the scales of [rows, inputs]: a row of them serves as many kernel rows as divide
    both a block's and each of the pieces from which the kernel's rows were joined."""
    return rows // math.gcd(block[0], rows, *pieces), -(-inputs // block[1])


class Linear(nn.Module):
    """y = kernel x. kernel [outputs, inputs] param_dtype, or float8 with scales."""

    outputs: int
    inputs: int
    param_dtype: jnp.dtype
    block: tuple[int, int] | None = None

    def setup(self):
        self.kernel, self.scale = _matrix(self, self.outputs)

    def __call__(self, x, out_dtype, implementation="auto"):
        """[..., inputs] -> [..., outputs] out_dtype; fp32 accumulation.

        `implementation` is that of `block_scaled_linear`; a dense product has one form.
        """
        return _product(self, x, out_dtype, implementation)

    def parts(self, x, implementation="auto"):
        """[..., inputs] -> [parts, ..., outputs] fp32, whose sum is the product: for a kernel that
        adds them, as that of `RMSNorm.after` does."""
        return _parts(self, x, implementation)


class FusedLinear(nn.Module):
    """Several products of one input in one matrix; `segments` names its row ranges in order.

    `piece`: rows that the file keeps together, where that is less than a segment.
    """

    segments: tuple[tuple[str, int], ...]
    inputs: int
    param_dtype: jnp.dtype
    block: tuple[int, int] | None = None
    piece: int = 0

    def setup(self):
        counts = [rows for _, rows in self.segments]
        self.kernel, self.scale = _matrix(self, sum(counts), self.piece, *counts)

    def __call__(self, x, out_dtype, implementation="auto") -> dict[str, jax.Array]:
        """[..., inputs] -> {name: [..., rows of the segment] out_dtype}; see `Linear`."""
        joined = self.joined(x, out_dtype, implementation)
        parts, first = {}, 0
        for name, rows in self.segments:
            parts[name] = joined[..., first : first + rows]
            first += rows
        return parts

    def joined(self, x, out_dtype, implementation="auto"):
        """[..., inputs] -> [..., rows of all segments] out_dtype."""
        return _product(self, x, out_dtype, implementation)

    def parts(self, x, implementation="auto"):
        """[..., inputs] -> [parts, ..., rows of all segments] fp32; see `Linear.parts`."""
        return _parts(self, x, implementation)


def _matrix(module, rows, *pieces):
    """Declares a module's kernel and, if it is block-scaled, its scale; else None."""
    shape = (rows, module.inputs)
    if module.block is None:
        return module.param("kernel", matrix_init, shape, module.param_dtype), None
    scales = scale_shape(*shape, module.block, *pieces)
    kernel = module.param("kernel", matrix_init, shape, FP8)
    return kernel, BlockScale(
        module.param("scale", scale_init, scales, jnp.float32), module.block[1]
    )


def _product(module, x, out_dtype, implementation):
    if module.block is None:
        return linear(x, module.kernel, out_dtype)
    return block_scaled_linear(
        x, module.kernel, module.scale, out_dtype, implementation=implementation
    )


def _parts(module, x, implementation):
    if module.block is None:
        return skinny_parts(x, module.kernel, implementation=implementation)
    return block_scaled_parts(x, module.kernel, module.scale, implementation=implementation)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis; `offset` scales by 1 + weight (target norms)."""

    width: int
    eps: float
    offset: bool

    def setup(self):
        start = nn.initializers.zeros if self.offset else nn.initializers.ones
        self.weight = self.param("weight", start, (self.width,), jnp.float32)

    def __call__(self, x):
        """[..., width] -> [..., width] fp32; the caller rounds where its contract says so."""
        norm = offset_rmsnorm if self.offset else plain_rmsnorm
        return norm(x, self.weight, self.eps)

    def after(self, x, branch, implementation="auto"):
        """The residual x [..., width] joined by a branch, and the norm of the sum, in x's dtype.

        A branch of None adds nothing, one of `Linear.parts` is summed first; see `add_rmsnorm`.
        """
        if branch is None:
            return x, self(x).astype(x.dtype)
        return add_rmsnorm(
            x, branch, self.weight, self.eps, offset=self.offset, implementation=implementation
        )


class SwiGlu(nn.Module):
    """down(SiLU(gate x) * (up x)) with gate and up in one matrix.

    `rounded` rounds the two projections to the activation dtype before the product (DFlash);
    otherwise only the product is rounded. `blocks`: of gate_up and of down, see `Linear`.
    """

    hidden: int
    intermediate: int
    param_dtype: jnp.dtype
    rounded: bool = False
    blocks: tuple[tuple[int, int] | None, ...] = (None, None)

    def setup(self):
        self.gate_up = FusedLinear(
            segments=(("gate", self.intermediate), ("up", self.intermediate)),
            inputs=self.hidden,
            param_dtype=self.param_dtype,
            block=self.blocks[0],
        )
        self.down = Linear(self.hidden, self.intermediate, self.param_dtype, self.blocks[1])

    def __call__(self, x, out_dtype, implementation="auto"):
        """[..., hidden] -> [..., hidden] out_dtype; the product has x's dtype. See `Linear`."""
        return self.down(self._inner(x, implementation), out_dtype, implementation)

    def parts(self, x, implementation="auto"):
        """[..., hidden] -> [parts, ..., hidden] fp32; see `Linear.parts`."""
        return self.down.parts(self._inner(x, implementation), implementation)

    def _inner(self, x, implementation):
        if self.blocks[0] is None:
            matrix = self.gate_up.kernel
            return skinny_swiglu(x, matrix, rounded=self.rounded, implementation=implementation)
        parts = self.gate_up(x, x.dtype if self.rounded else jnp.float32, implementation)
        gate, up = parts["gate"].astype(jnp.float32), parts["up"].astype(jnp.float32)
        return (jax.nn.silu(gate) * up).astype(x.dtype)
