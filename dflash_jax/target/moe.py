"""Routed experts plus one gated shared expert."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from dflash_jax.config import DtypePolicy, TargetConfig
from dflash_jax.layers import FP8, FusedLinear, SwiGlu, matrix_init, scale_init, scale_shape
from dflash_jax.ops.block_scaled_linear import BlockScale
from dflash_jax.ops.sparse_moe import expert_mlp, route


class SparseMoe(nn.Module):
    """y = sum_e w_e expert_e(x) + sigmoid(w_shared . x) * shared(x).

    Weights w are the k largest router probabilities, renormalised. The last router row is the
    shared expert's gate. Source: contracts 6.3.6.
    """

    config: TargetConfig
    dtypes: DtypePolicy
    layer: int
    implementation: str = "auto"

    def setup(self):
        moe, hidden, param = self.config.moe, self.config.hidden, self.dtypes.param_dtype
        self.router = FusedLinear(
            segments=(("experts", moe.num_experts), ("shared", 1)), inputs=hidden, param_dtype=param
        )
        self.gate_up, self.gate_up_scale = self._experts("gate_up", 2 * moe.intermediate, hidden)
        self.down, self.down_scale = self._experts("down", hidden, moe.intermediate)
        blocks = (self._block("shared/gate_up"), self._block("shared/down"))
        self.shared = SwiGlu(hidden, moe.shared_intermediate, param, blocks=blocks)

    def __call__(self, x, *, prefill: bool):
        """[B, W, H] normed -> [B, W, H]; a prompt's chunk has no kernel for its products."""
        dtype = self.dtypes.activation_dtype
        products = "xla" if prefill else self.implementation
        tokens = x.reshape(-1, x.shape[-1])
        scores, experts = self.router.joined(tokens, jnp.float32), self.config.moe.num_experts
        routing = route(
            scores, self.config.moe.experts_per_token, experts=experts,
            implementation=self.implementation,
        )
        self.sow("intermediates", "experts", routing.experts)  # nothing unless somebody asks
        routed = expert_mlp(
            tokens, routing, self.gate_up, self.down, jnp.float32,
            scales=(self.gate_up_scale, self.down_scale), implementation=self.implementation,
        )
        # Apart: XLA would join the router's product with this one, and their matrices every time.
        apart = lax.optimization_barrier(tokens)
        shared = self.shared(apart, jnp.float32, products)
        shared = shared * jax.nn.sigmoid(scores[:, experts:])
        return (routed + shared).astype(dtype).reshape(x.shape)

    def _block(self, name):
        return self.config.fp8_block(self.layer, f"moe/{name}")

    def _experts(self, name, rows, inputs):
        """The matrices of all experts and, if they are block-scaled, their scales; else None."""
        block, lead = self._block(name), (self.config.moe.num_experts,)
        shape = (*lead, rows, inputs)
        if block is None:
            return self.param(name, matrix_init, shape, self.dtypes.param_dtype), None
        # Gate and up rows may come from tensors of their own.
        piece = self.config.moe.intermediate if name == "gate_up" else rows
        scales = (*lead, *scale_shape(rows, inputs, block, piece))
        scale = self.param(f"{name}_scale", scale_init, scales, jnp.float32)
        return self.param(name, matrix_init, shape, FP8), BlockScale(scale, block[1])
