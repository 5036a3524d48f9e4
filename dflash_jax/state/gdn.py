"""State of one Gated DeltaNet layer, the records of a round, and the fold that applies them."""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.config import GdnConfig
from dflash_jax.ops.gated_delta_rule import gated_delta_folds
from dflash_jax.ops.indices import DROP


@struct.dataclass
class GdnState:
    """Recurrent and convolution state of one layer, for every slot.

    recurrent: [slots, Hv, Dv, Dk] fp32; written by prefill and commit.
    conv:      [slots, kernel - 1, channels] bf16, projected inputs, oldest first; likewise.
    """

    recurrent: jax.Array
    conv: jax.Array

    @classmethod
    def zeros(cls, slots: int, gdn: GdnConfig, conv_dtype) -> "GdnState":
        recurrent = (slots, gdn.value_heads, gdn.value_dim, gdn.key_dim)
        conv = (slots, gdn.conv_kernel - 1, gdn.channels)
        return cls(recurrent=jnp.zeros(recurrent, jnp.float32), conv=jnp.zeros(conv, conv_dtype))

    def rows(self, slot) -> "GdnState":
        """The images of B rows, leading axis B; what an idle row reads is dead."""
        index = jnp.minimum(slot, self.recurrent.shape[0] - 1)
        return GdnState(recurrent=self.recurrent[index], conv=self.conv[index])

    def put(self, slot, image: "GdnState", count) -> "GdnState":
        """Writes the rows whose count is not 0; slots out of range drop."""
        slot = jnp.where(count > 0, slot, self.recurrent.shape[0])
        return GdnState(
            recurrent=self.recurrent.at[slot].set(image.recurrent, **DROP),
            conv=self.conv.at[slot].set(image.conv, **DROP),
        )


@struct.dataclass
class GdnRecords:
    """What a verify pass leaves for the fold, per column of one layer.

    Not the raw k and v of contracts 6.3.5: verification has normalised the one and made delta of
    the other, and with those the fold has no sum left to do. It costs twice their bytes.

    key:        [B, cols, Hk, Dk] fp32, normalised.
    delta:      [B, cols, Hv, Dv] fp32, beta (v - alpha M k) with the state M before the column.
    decay:      [B, cols, Hv, 2] fp32, {g, beta}.
    conv_input: [B, cols, channels] bf16, the projected column.
    """

    key: jax.Array
    delta: jax.Array
    decay: jax.Array
    conv_input: jax.Array


def fold(states, records, rows, path, count, *, implementation) -> tuple[GdnState, ...]:
    """Applies the first `count` records along `path` to each row's state in every layer.

    Args:
      states, records: `GdnState` and `GdnRecords` of each layer.
      rows: `Rows`; states are read at read_slot and written at write_slot.
      path: [B, cols] int32, columns in order; entries past count are never applied.
      implementation: that of the verification that left the records. Static.
      count: [B] int32; a row with 0 leaves every byte unchanged.
    Source: contracts 9.3.
    """
    layers = tuple(
        (kept.key, kept.delta, kept.decay, kept.conv_input, state.recurrent, state.conv)
        for state, kept in zip(states, records, strict=True)
    )
    folded = gated_delta_folds(
        layers, path, rows.read_slot, rows.write_slot, count, implementation=implementation
    )
    return tuple(GdnState(recurrent=recurrent, conv=conv) for recurrent, conv in folded)
