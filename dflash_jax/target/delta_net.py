"""Gated DeltaNet layer of the target: projections, short convolution, recurrence, gated norm."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.config import DtypePolicy, TargetConfig
from dflash_jax.layers import FusedLinear, Linear, RMSNorm, matrix_init
from dflash_jax.ops.causal_conv1d import causal_conv1d_silu, shift_history
from dflash_jax.ops.gated_delta_rule import gated_delta_prefill, gated_delta_verify
from dflash_jax.ops.norm import gated_rmsnorm
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
        """[B, W, H] normed -> y [B, W, H] and `GdnRecords`; the state is read only."""
        slots = state.conv.shape[0]
        history = state.conv[jnp.minimum(columns.slot, slots - 1)]
        query, records, z = self._inputs(x, columns, history, self.implementation)
        mixed = gated_delta_verify(
            query, records.key, records.value, records.decay, state.recurrent, columns.slot,
            columns.parent, columns.live, chain=columns.chain, implementation=self.implementation,
        )
        return self._close(mixed, z, self.implementation), records

    def prefill(self, x, columns, state: GdnState):
        """[B, T, H] normed -> y [B, T, H] and the rows' image after the live columns."""
        image = state.rows(columns.slot)
        query, records, z = self._inputs(x, columns, image.conv, "xla")
        mixed, recurrent = gated_delta_prefill(
            query, records.key, records.value, records.decay, image.recurrent, columns.live
        )
        path = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        conv = shift_history(image.conv, records.conv_input, path, columns.live)
        return self._close(mixed, z, "xla"), GdnState(recurrent=recurrent, conv=conv)

    def _inputs(self, x, columns, history, implementation):
        """Query [B, W, Hk, Dk], records of every column, and the output gate z."""
        gdn, dtype = self.config.gdn, self.dtypes.activation_dtype
        parts = self.in_proj(x, jnp.float32, implementation)
        if self.gates is not None:
            parts |= self.gates(x, jnp.float32)
        conv_input = parts["qkv"].astype(dtype)
        mixed = causal_conv1d_silu(
            conv_input, history, self.conv, columns.parent, chain=columns.chain
        ).astype(dtype)
        width = gdn.key_heads * gdn.key_dim
        query, key, value = jnp.split(mixed, [width, 2 * width], axis=-1)
        rate = jnp.exp(self.A_log) * jax.nn.softplus(parts["a"] + self.dt_bias)
        decay = jnp.stack([-rate, jax.nn.sigmoid(parts["b"])], axis=-1)
        keys = (*x.shape[:2], gdn.key_heads, gdn.key_dim)
        records = GdnRecords(
            key=key.reshape(keys),
            value=value.reshape(*x.shape[:2], gdn.value_heads, gdn.value_dim),
            decay=decay,
            conv_input=conv_input,
        )
        return query.reshape(keys), records, parts["z"].astype(dtype)

    def _close(self, mixed, z, implementation):
        dtype = self.dtypes.activation_dtype
        gated = gated_rmsnorm(
            mixed, z.reshape(mixed.shape), self.norm.weight, self.config.norm_eps
        )
        return self.output(gated.astype(dtype).reshape(z.shape), dtype, implementation)

