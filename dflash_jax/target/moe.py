"""Routed experts plus one gated shared expert."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.config import DtypePolicy, TargetConfig
from dflash_jax.layers import FusedLinear, SwiGlu, matrix_init
from dflash_jax.ops.sparse_moe import expert_mlp, route


class SparseMoe(nn.Module):
    """y = sum_e w_e expert_e(x) + sigmoid(w_shared . x) * shared(x).

    Weights w are the k largest router probabilities, renormalised. The last router row is the
    shared expert's gate. Source: contracts 6.3.6.
    """

    config: TargetConfig
    dtypes: DtypePolicy
    implementation: str = "auto"

    def setup(self):
        moe, hidden, param = self.config.moe, self.config.hidden, self.dtypes.param_dtype
        self.router = FusedLinear(
            segments=(("experts", moe.num_experts), ("shared", 1)), inputs=hidden, param_dtype=param
        )
        gate_up = (moe.num_experts, 2 * moe.intermediate, hidden)
        down = (moe.num_experts, hidden, moe.intermediate)
        self.gate_up = self.param("gate_up", matrix_init, gate_up, param)
        self.down = self.param("down", matrix_init, down, param)
        self.shared = SwiGlu(hidden, moe.shared_intermediate, param)

    def __call__(self, x, *, prefill: bool):
        """[B, W, H] normed -> [B, W, H]; a chunk of a prompt has no kernel."""
        dtype = self.dtypes.activation_dtype
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.router(tokens, jnp.float32)
        routing = route(scores["experts"], self.config.moe.experts_per_token)
        routed = expert_mlp(
            tokens, routing, self.gate_up, self.down, jnp.float32,
            implementation="xla" if prefill else self.implementation,
        )
        shared = self.shared(tokens, jnp.float32) * jax.nn.sigmoid(scores["shared"])
        return (routed + shared).astype(dtype).reshape(x.shape)
