"""Attention of one draft layer: the block's columns over the context and one another."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from dflash_jax.config import DraftConfig, DraftKind, DtypePolicy, LayerKind
from dflash_jax.layers import FusedLinear, Linear, RMSNorm
from dflash_jax.ops.anchored_attention import anchored_attention
from dflash_jax.ops.norm_rope import norm_rope
from dflash_jax.ops.sliding_window_attention import sliding_window_attention
from dflash_jax.ops.softmax_attention import softmax_attention
from dflash_jax.state.sequence_context import KVSequence


@struct.dataclass
class DraftColumns:
    """Where the columns of one block stand.

    positions: [B, W] int32, cache positions F + j.
    frontier:  [B] int32, F_ctx = F: context that the columns may see.
    live:      [B] int32, columns that exist: DFlash Q, DFlash2 W.
    slot:      [B] int32, ring of each row.
    table:     [B, max_pages] int32, pages of each row.
    """

    positions: jax.Array
    frontier: jax.Array
    live: jax.Array
    slot: jax.Array
    table: jax.Array


def block_positions(frontier, width: int, live):
    """[B, W] int32: F + j, the last live position repeated beyond it (contracts 5.1).

    Args: frontier, live: [B] int32. width: W. Static.
    """
    columns = jnp.arange(width, dtype=jnp.int32)
    return frontier[:, None] + jnp.minimum(columns, jnp.maximum(live - 1, 0)[:, None])


class DraftAttention(nn.Module):
    """W_o attention(q, [K_ctx; k], [V_ctx; v]); full-width scalar rotation, plain head norms.

    `layer` selects the kind and the causal flag. Source: contracts 5.2 and 5.3.
    """

    config: DraftConfig
    dtypes: DtypePolicy
    layer: int
    implementation: str = "auto"

    def setup(self):
        config, param = self.config, self.dtypes.param_dtype
        query, rows = (n * config.head_dim for n in (config.query_heads, config.kv_heads))
        self.qkv = FusedLinear(
            segments=(("query", query), ("key", rows), ("value", rows)),
            inputs=config.hidden,
            param_dtype=param,
        )
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps, offset=False)
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps, offset=False)
        self.output = Linear(config.hidden, query, param)

    def __call__(self, x, columns: DraftColumns, store):
        """x [B, W, H] and this layer's `KVRing` or `KVPages` -> [parts, B, W, H] fp32, to be added.

        In training the store is a `KVSequence` of fewer sequences than blocks.
        """
        config, dtype = self.config, self.dtypes.activation_dtype
        heads = norm_rope(
            self.qkv.parts(x, self.implementation), self.query_norm.weight,
            self.key_norm.weight, columns.positions,
            heads=(config.query_heads, config.kv_heads), gated=False, eps=config.norm_eps,
            offset=False, theta=config.rope_theta, rounded=config.kind == DraftKind.DFLASH,
            dtypes=(dtype,) * 3, implementation=self.implementation,
        )
        query, key, value = heads.query, heads.key, heads.value
        causal, scale = config.causal[self.layer], config.head_dim**-0.5
        sliding = config.layer_types[self.layer] == LayerKind.SLIDING
        if isinstance(store, KVSequence):
            mixed = anchored_attention(
                query, key, value, store.key, store.value, columns.frontier, columns.live,
                window=config.window if sliding else None, causal=causal, scale=scale,
            )
        elif sliding:
            mixed = sliding_window_attention(
                query, key, value, store.key, store.value, columns.slot, columns.frontier,
                columns.live, window=config.window, causal=causal, scale=scale,
                implementation=self.implementation,
            )
        else:
            mixed = softmax_attention(
                query, key, value, store.key, store.value, columns.table, columns.frontier,
                columns.live, block_mask="causal" if causal else "full", scale=scale,
                implementation=self.implementation,
            )
        mixed = mixed.reshape(*x.shape[:2], -1).astype(dtype)
        return self.output.parts(mixed, self.implementation)
