"""The dynamic grouped convolution of DFlash2 around one branch of a layer."""

import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.config import DraftConfig, DtypePolicy
from dflash_jax.layers import Linear
from dflash_jax.ops.dynamic_grouped_conv import finish, prepare


class GroupedConv(nn.Module):
    """Input and output side of one branch's convolution.

    base [2 sides, taps, H] fp32 is the whole coefficient; the projection [2 * taps * H/G, H] adds
    increments that a group of G channels shares. Source: contracts 5.5.
    """

    config: DraftConfig
    dtypes: DtypePolicy
    implementation: str = "auto"

    def setup(self):
        conv, hidden = self.config.conv, self.config.hidden
        rows = 2 * conv.taps * (hidden // conv.group_width)
        self.base = self.param("base", _identity, (2, conv.taps, hidden), jnp.float32)
        self.projection = Linear(rows, hidden, self.dtypes.param_dtype)

    def prepare(self, x, norm_weight):
        """Branch input x [B, W, H] -> `Prepared` input and the output side's increments."""
        return prepare(
            x, norm_weight, self.base, self.projection.kernel,
            eps=self.config.norm_eps, out_dtype=self.dtypes.activation_dtype,
            implementation=self.implementation,
        )

    def finish(self, residual, branch, finish_delta):
        """residual + Conv_1(branch), branch [parts, B, W, H] fp32."""
        return finish(
            residual, branch, self.base, finish_delta, implementation=self.implementation
        )


def _identity(key, shape, dtype):
    """Tap 0 is 1 and every other tap 0, so that the layer starts as a DFlash layer."""
    del key
    return jnp.zeros(shape, dtype).at[:, 0].set(1.0)
