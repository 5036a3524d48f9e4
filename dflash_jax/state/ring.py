"""Cyclic K/V of one local draft layer."""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.ops.kv_write import write_ring


@struct.dataclass
class KVRing:
    """The last S context positions of one local draft layer, for every slot.

    key:   [slots, Hkv, S, D] bf16; written by prefill and materialize.
    value: [slots, Hkv, S, D] fp16 of the bf16 value; written with the key.
    Position p is at index p mod S. Live positions: [max(0, F_ctx - S), F_ctx); the rest is dead.
    """

    key: jax.Array
    value: jax.Array

    @classmethod
    def zeros(cls, slots, kv_heads, window, head_dim, key_dtype, value_dtype) -> "KVRing":
        shape = (slots, kv_heads, window, head_dim)
        return cls(key=jnp.zeros(shape, key_dtype), value=jnp.zeros(shape, value_dtype))

    def write(self, key, value, slot, start, count) -> "KVRing":
        """Stores the last min(count, S) columns; see `write_ring` for shapes."""
        return self.replace(
            key=write_ring(self.key, key, slot, start, count),
            value=write_ring(self.value, value, slot, start, count),
        )


def live_interval(context_frontier, window: int):
    """The positions a ring holds, as (first, end): [max(0, F_ctx - S), F_ctx)."""
    return jnp.maximum(context_frontier - window, 0), context_frontier
