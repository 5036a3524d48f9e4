"""Routed experts plus one gated shared expert."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.config import DtypePolicy, TargetConfig
from dflash_jax.layers import FP8, FusedLinear, SwiGlu, matrix_init, scale_init, scale_shape
from dflash_jax.ops.block_scaled_linear import BlockScale
from dflash_jax.ops.sparse_moe import Matrices, choose_experts, expert_parts


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

    def __call__(self, x, *, products):
        """[B, W, H] normed -> [parts, B, W, H] fp32, to be added in this order.

        `products` is the implementation of dense ones, here the router's.
        """
        moe, tokens = self.config.moe, x.reshape(-1, x.shape[-1])
        routing = choose_experts(
            tokens, self.router.kernel, moe.experts_per_token, experts=moe.num_experts, shared=True,
            product=products, implementation=self.implementation,
        )
        self.sow("intermediates", "experts", routing.experts)  # nothing unless somebody asks
        routed = Matrices(
            gate_up=self.gate_up, down=self.down, gate_up_scale=self.gate_up_scale,
            down_scale=self.down_scale,
        )
        shared = Matrices(
            gate_up=self.shared.gate_up.kernel, down=self.shared.down.kernel,
            gate_up_scale=self.shared.gate_up.scale, down_scale=self.shared.down.scale,
        )
        shared = jax.tree.map(lambda leaf: leaf[None], shared)
        parts = expert_parts(tokens, routing, routed, shared, implementation=self.implementation)
        return parts.reshape(-1, *x.shape)

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
