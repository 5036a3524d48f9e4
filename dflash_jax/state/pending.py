"""Features of committed positions that the draft context lacks."""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.ops.indices import DROP


@struct.dataclass
class PendingFeatures:
    """Target features of positions [F_ctx, F).

    features: [lanes, W, n_tap * H] bf16; column j belongs to position F_ctx + j. Written by commit.
    Their number is not stored: it is F - F_ctx. Columns from there on are dead.
    """

    features: jax.Array

    @classmethod
    def zeros(cls, lanes: int, width: int, feature_width: int, dtype) -> "PendingFeatures":
        return cls(features=jnp.zeros((lanes, width, feature_width), dtype))

    def gather(self, lane, count):
        """[B, W, n_tap * H] of the given lanes; columns >= count are exactly zero."""
        rows = self.features[jnp.minimum(lane, self.features.shape[0] - 1)]
        live = jnp.arange(rows.shape[1])[None, :] < count[:, None]
        return jnp.where(live[:, :, None], rows, jnp.zeros((), rows.dtype))

    def put(self, lane, features, count) -> "PendingFeatures":
        """Stores columns j < count of each row, [B, cols, n_tap * H]; the rest stays as it was."""
        lanes, width, _ = self.features.shape
        column = jnp.arange(min(width, features.shape[1]), dtype=jnp.int32)
        index = jnp.where(column[None, :] < count[:, None], column[None, :], width)
        lane = jnp.where(count > 0, lane, lanes)
        return PendingFeatures(
            features=self.features.at[lane[:, None], index].set(
                features[:, : column.shape[0]], **DROP
            )
        )
