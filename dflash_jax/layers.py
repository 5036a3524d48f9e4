"""Small modules: a bias-free product, its fused form, a norm by kind, and the SwiGLU block.

Kernels keep the checkpoint's [out, in] orientation. Matrices are stored in `param_dtype`; norm
weights are always fp32.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.ops.linear import linear
from dflash_jax.ops.norm import offset_rmsnorm, plain_rmsnorm


def matrix_init(key, shape, dtype):
    """Normal values with variance 1 / fan_in, for a kernel [..., out, in]."""
    return (jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)


class Linear(nn.Module):
    """y = kernel x. kernel [outputs, inputs] param_dtype."""

    outputs: int
    inputs: int
    param_dtype: jnp.dtype

    def setup(self):
        self.kernel = self.param(
            "kernel", matrix_init, (self.outputs, self.inputs), self.param_dtype
        )

    def __call__(self, x, out_dtype):
        """[..., inputs] param_dtype -> [..., outputs] out_dtype; fp32 accumulation."""
        return linear(x, self.kernel, out_dtype)


class FusedLinear(nn.Module):
    """Several products of one input in one matrix; `segments` names its row ranges in order."""

    segments: tuple[tuple[str, int], ...]
    inputs: int
    param_dtype: jnp.dtype

    def setup(self):
        rows = sum(rows for _, rows in self.segments)
        self.kernel = self.param("kernel", matrix_init, (rows, self.inputs), self.param_dtype)

    def __call__(self, x, out_dtype) -> dict[str, jax.Array]:
        """[..., inputs] -> {name: [..., rows of the segment] out_dtype}."""
        joined = linear(x, self.kernel, out_dtype)
        parts, first = {}, 0
        for name, rows in self.segments:
            parts[name] = joined[..., first : first + rows]
            first += rows
        return parts


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


class SwiGlu(nn.Module):
    """down(SiLU(gate x) * (up x)) with gate and up in one matrix.

    `rounded` rounds the two projections to the activation dtype before the product (DFlash);
    otherwise only the product is rounded.
    """

    hidden: int
    intermediate: int
    param_dtype: jnp.dtype
    rounded: bool = False

    def setup(self):
        self.gate_up = FusedLinear(
            segments=(("gate", self.intermediate), ("up", self.intermediate)),
            inputs=self.hidden,
            param_dtype=self.param_dtype,
        )
        self.down = Linear(self.hidden, self.intermediate, self.param_dtype)

    def __call__(self, x, out_dtype):
        """[..., hidden] -> [..., hidden] out_dtype; the product has x's dtype."""
        parts = self.gate_up(x, x.dtype if self.rounded else jnp.float32)
        gate, up = parts["gate"].astype(jnp.float32), parts["up"].astype(jnp.float32)
        return self.down((jax.nn.silu(gate) * up).astype(x.dtype), out_dtype)
