"""Gated full attention of the target: partial three-axis rotation, paged context, output gate."""

from flax import linen as nn

from dflash_jax.config import DtypePolicy, TargetConfig
from dflash_jax.layers import FusedLinear, Linear, RMSNorm
from dflash_jax.ops.norm_rope import norm_rope
from dflash_jax.ops.softmax_attention import softmax_attention


class GatedAttention(nn.Module):
    """y = W_o(attention(q, k, v) * sigmoid(gate)).

    q and k are normed per head with 1 + w and rotated over the first rotary dims; the gate is
    neither. Rows of `qgkv`: all query heads, all gate heads, K, V. Source: contracts 6.3.3.
    """

    config: TargetConfig
    dtypes: DtypePolicy
    layer: int
    implementation: str = "auto"

    def setup(self):
        config, param = self.config, self.dtypes.param_dtype
        query = config.query_heads * config.head_dim
        rows = config.kv_heads * config.head_dim
        self.qgkv = FusedLinear(
            segments=(("query", query), ("gate", query), ("key", rows), ("value", rows)),
            inputs=config.hidden,
            param_dtype=param,
            block=config.fp8_block(self.layer, "attention/qgkv"),
            piece=config.head_dim,
        )
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps, offset=True)
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps, offset=True)
        block = config.fp8_block(self.layer, "attention/output")
        self.output = Linear(config.hidden, query, param, block)

    def __call__(self, x, columns, pages, *, prefill: bool):
        """Attends the block's columns to the committed context and to one another.

        Args:
          x: [B, W, H], normed.
          columns: `TargetColumns`.
          pages: `KVPages` of this layer; read only.
          prefill: whether x is a chunk of a prompt, whose products have no kernel.
        Returns:
          y [parts, B, W, H] fp32, to be added up and rounded, and the columns' rows (key, value),
          each [B, W, Hkv, D], as the cache will store them: the block is attended in that form, so
          a write first would change nothing.
        """
        config, dtype = self.config, self.dtypes.activation_dtype
        products = "xla" if prefill else self.implementation
        rope = config.rope
        heads = norm_rope(
            self.qgkv.parts(x, products), self.query_norm.weight,
            self.key_norm.weight, columns.positions, heads=(config.query_heads, config.kv_heads),
            gated=True, eps=config.norm_eps, offset=True, theta=rope.theta,
            mrope=(rope.rotary_dim(config.head_dim), rope.mrope_section),
            dtypes=(dtype, pages.key.dtype, pages.value.dtype),
            implementation=self.implementation,
        )
        mixed = softmax_attention(
            heads.query, heads.key, heads.value, pages.key, pages.value, columns.table,
            columns.frontier, columns.live, block_mask=columns.block_mask,
            scale=config.head_dim**-0.5, gate=heads.gate, implementation=self.implementation,
        )
        mixed = mixed.reshape(*x.shape[:2], -1)
        return self.output.parts(mixed, products), (heads.key, heads.value)
