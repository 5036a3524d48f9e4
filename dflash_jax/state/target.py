"""Committed state of the target: K/V, GDN images, and the continuation hidden."""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.config import RunConfig, TargetConfig
from dflash_jax.state.gdn import GdnState
from dflash_jax.state.pages import KVPages


@struct.dataclass
class TargetState:
    """What the target keeps between rounds.

    kv:   one `KVPages` per full-attention layer, in layer order; covers [0, F) of each lane.
    gdn:  one `GdnState` per linear-attention layer, in layer order; after F tokens.
    continuation: [slots, H] bf16, final-normed hidden of the last committed column.
    """

    kv: tuple[KVPages, ...]
    gdn: tuple[GdnState, ...]
    continuation: jax.Array

    @classmethod
    def zeros(cls, target: TargetConfig, run: RunConfig) -> "TargetState":
        dtype = run.dtypes.activation_dtype
        pages = (target.kv_heads, run.pages, run.page_size, target.head_dim)
        return cls(
            kv=tuple(KVPages.zeros(*pages, dtype, dtype) for _ in target.full_layers),
            gdn=tuple(
                GdnState.zeros(run.slots, target.gdn, dtype) for _ in target.linear_layers
            ),
            continuation=jnp.zeros((run.slots, target.hidden), dtype),
        )
