"""Conditioning features, and from them the context K/V of all draft layers in one product."""

import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.config import DraftConfig, DraftKind, DtypePolicy, LayerKind
from dflash_jax.layers import Linear, RMSNorm
from dflash_jax.ops.context_kv_materialize import context_kv_materialize, store_context
from dflash_jax.ops.rounding import round_to
from dflash_jax.pallas.common import added
from dflash_jax.state.draft_context import DraftContext


class ContextProjection(nn.Module):
    """c = plain_rmsnorm(W_feature s); K and V of every layer from c.

    `key_value` stacks, per layer, the K rows then the V rows; `key_norm` is [n_draft, D]. Both are
    copies of the layers' own, so that one large product serves all layers. Source: contracts 4.
    """

    config: DraftConfig
    dtypes: DtypePolicy
    implementation: str = "auto"

    def setup(self):
        config, param = self.config, self.dtypes.param_dtype
        rows = config.draft_layers * 2 * config.kv_heads * config.head_dim
        self.feature_projection = Linear(config.hidden, config.feature_width, param)
        self.norm = RMSNorm(config.hidden, config.norm_eps, offset=False)
        self.key_value = Linear(rows, config.hidden, param)
        shape = (config.draft_layers, config.head_dim)
        self.key_norm = self.param("key_norm", nn.initializers.ones, shape, jnp.float32)

    def conditioning(self, features):
        """s_t [B, T, n_tap * H] -> c_t [B, T, H]; rounded after the projection and the norm."""
        dtype = self.dtypes.activation_dtype
        product = added(self.feature_projection.parts(features, self.implementation))
        return self.norm(round_to(product, dtype)).astype(dtype)

    def projected(self, features):
        """[B, T, n_tap * H] -> [parts, B, T, layers * 2 * Hkv * D] fp32, whose sum is K and V of
        every layer."""
        return self.key_value.parts(self.conditioning(features), self.implementation)

    def store(self, features, context: DraftContext, slot, table, start, count) -> DraftContext:
        """Appends features [B, T, n_tap * H] of positions start + j, j < count, to the context.

        slot [B] and table [B, max_pages] say where each row's rings and pages are.
        """
        config = self.config
        pairs = store_context(
            self.projected(features), self.key_norm,
            tuple((store.key, store.value) for store in context.stores(config)),
            slot, table, start, count,
            paged=tuple(kind != LayerKind.SLIDING for kind in config.layer_types),
            eps=config.norm_eps, theta=config.rope_theta,
            rounded=config.kind == DraftKind.DFLASH, implementation=self.implementation,
        )
        return context.with_stores(config, pairs)

    def __call__(self, features, positions):
        """[B, T, n_tap * H] at cache positions [B, T] -> per layer (key, value) rows.

        Each is [B, T, Hkv, D], as the rings and pages store it.
        """
        config = self.config
        return context_kv_materialize(
            added(self.projected(features)),
            self.key_norm,
            positions,
            kv_heads=config.kv_heads,
            eps=config.norm_eps,
            theta=config.rope_theta,
            rounded=config.kind == DraftKind.DFLASH,
            key_dtype=self.dtypes.activation_dtype,
            value_dtype=self.dtypes.context_value_dtype,
        )
