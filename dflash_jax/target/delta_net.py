"""Gated DeltaNet layer of the target: projections, short convolution, recurrence, gated norm."""

import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.config import DtypePolicy, TargetConfig
from dflash_jax.layers import FusedLinear, Linear, RMSNorm, matrix_init
from dflash_jax.ops.causal_conv1d import shift_history
from dflash_jax.ops.gated_delta_block import block_inputs, close_heads, gated_delta_block
from dflash_jax.ops.gated_delta_rule import gated_delta_prefill
from dflash_jax.ops.norm import added
from dflash_jax.state.gdn import GdnRecords, GdnState


class GatedDeltaNet(nn.Module):
    """y = W_out(plain_rmsnorm(o, norm) * SiLU(z)) with o from the gated delta rule.

    Rows of `in_proj`: q, k, v (convolved), z, a, b; where it is block-scaled, a and b are dense
    rows of their own, `gates`. Source: contracts 6.3.4 and 6.3.5; `checkpoints.md` 4.3.
    """

    config: TargetConfig
    dtypes: DtypePolicy
    layer: int
    implementation: str

    def setup(self):
        gdn, param = self.config.gdn, self.dtypes.param_dtype
        heads, hidden = gdn.value_heads, self.config.hidden
        wide, gates = (("qkv", gdn.channels), ("z", gdn.value_width)), (("a", heads), ("b", heads))
        block = self.config.fp8_block(self.layer, "delta_net/in_proj")
        if block is None:
            self.in_proj, self.gates = FusedLinear(wide + gates, hidden, param), None
        else:
            self.in_proj = FusedLinear(wide, hidden, param, block)
            self.gates = FusedLinear(gates, hidden, param)
        self.conv = self.param("conv", matrix_init, (gdn.channels, gdn.conv_kernel), jnp.float32)
        self.A_log = self.param("A_log", nn.initializers.zeros, (heads,), jnp.float32)
        self.dt_bias = self.param("dt_bias", nn.initializers.zeros, (heads,), jnp.float32)
        self.norm = RMSNorm(gdn.value_dim, self.config.norm_eps, offset=False)
        block = self.config.fp8_block(self.layer, "delta_net/output")
        self.output = Linear(hidden, gdn.value_width, param, block)

    def verify(self, x, columns, state: GdnState):
        """[B, W, H] normed -> y [parts, B, W, H] fp32 and `GdnRecords`; the state is read only."""
        projected, gates = self._project(x, self.implementation)
        output, inputs, delta = gated_delta_block(
            projected, gates, state.conv, self.conv, self.A_log, self.dt_bias, self.norm.weight,
            state.recurrent, columns.slot, columns.parent, columns.live,
            key_heads=self.config.gdn.key_heads, eps=self.config.norm_eps, chain=columns.chain,
            implementation=self.implementation,
        )
        records = GdnRecords(
            key=inputs.key, delta=delta, decay=inputs.decay, conv_input=inputs.conv_input
        )
        return self.output.parts(output, self.implementation), records

    def prefill(self, x, columns, state: GdnState):
        """[B, T, H] normed -> y [B, T, H] and the rows' image after the live columns."""
        gdn, image = self.config.gdn, state.rows(columns.slot)
        projected, gates = self._project(x, "xla")
        inputs = block_inputs(
            projected, gates, state.conv, self.conv, self.A_log, self.dt_bias, columns.slot,
            columns.parent, key_heads=gdn.key_heads, heads=image.recurrent.shape[1:],
            chain=columns.chain, unit=False, implementation=self.implementation,
        )
        mixed, recurrent = gated_delta_prefill(
            inputs.query, inputs.key, inputs.value, inputs.decay, image.recurrent, columns.live,
            implementation=self.implementation,
        )
        conv = shift_history(image.conv, inputs.conv_input, None, columns.live)
        wide = gdn.channels + gdn.value_width
        gate = added(projected[..., gdn.channels : wide])
        output = close_heads(
            mixed, gate, self.norm.weight, self.config.norm_eps, image.conv.dtype
        )
        y = self.output(output, output.dtype, "xla")
        return y, GdnState(recurrent=recurrent, conv=conv)

    def _project(self, x, implementation):
        """[parts, B, W, channels + Hv * Dv (+ 2 * Hv)] fp32; the gates' rows if they are apart."""
        joined = self.in_proj.parts(x, implementation)
        return joined, None if self.gates is None else self.gates.joined(x, jnp.float32)
