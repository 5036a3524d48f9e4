"""A Gated DeltaNet layer between its projections: convolution, gates, recurrence, gated norm."""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.ops.causal_conv1d import causal_conv1d_silu
from dflash_jax.ops.dispatch import choose_form
from dflash_jax.ops.gated_delta_rule import gated_delta_verify, unit_vectors
from dflash_jax.ops.norm import added, gated_rmsnorm
from dflash_jax.pallas import gated_delta_block as kernel


@struct.dataclass
class DeltaInputs:
    """What the recurrence reads, per column.

    query, key: [B, W, Hk, Dk], after convolution and SiLU; for verification in fp32 as
      `unit_vectors` makes them of those, for a prefill before the L2 norm.
    value:      [B, W, Hv, Dv].
    decay:      [B, W, Hv, 2] fp32, {g, beta}.
    conv_input: [B, W, channels], the projected columns.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    conv_input: jax.Array


def gated_delta_inputs(
    projected, gates, history, taps, a_log, dt_bias, parent, *, key_heads, heads, chain, unit
) -> DeltaInputs:
    """Convolution, SiLU and gates of projected columns.

    Args:                                                                  (B rows, W columns)
      projected: [B, W, channels + ...] fp32, rows q, k, v first.
      gates:     [B, W, 2 * Hv] fp32, rows a and b.
      history:   [B, kernel - 1, channels], the dtype of all activations.
      taps, parent, chain: as in `causal_conv1d_silu`. a_log, dt_bias: [Hv] fp32.
      key_heads: Hk. heads: (Hv, Dv, Dk). unit: whether to normalise queries and keys. Static.
    Source: contracts 6.3.4.
    """
    value_heads, value_dim, key_dim = heads
    keys, dtype, shape = key_heads * key_dim, history.dtype, projected.shape[:2]
    conv_input = projected[..., : 2 * keys + value_heads * value_dim].astype(dtype)
    mixed = causal_conv1d_silu(conv_input, history, taps, parent, chain=chain).astype(dtype)
    query, key, value = jnp.split(mixed, [keys, 2 * keys], axis=-1)
    query, key = (x.reshape(*shape, key_heads, key_dim) for x in (query, key))
    query, key = unit_vectors(query, key) if unit else (query, key)
    a, b = jnp.split(gates, 2, axis=-1)
    rate = jnp.exp(a_log) * jax.nn.softplus(a + dt_bias)
    return DeltaInputs(
        query=query,
        key=key,
        value=value.reshape(*shape, value_heads, value_dim),
        decay=jnp.stack([-rate, jax.nn.sigmoid(b)], axis=-1),
        conv_input=conv_input,
    )


def block_inputs(
    projected, gates, conv, taps, a_log, dt_bias, slot, parent, *, key_heads, heads, chain, unit,
    implementation,
) -> DeltaInputs:
    """`gated_delta_inputs` in the form that fits, by the histories' pool; arguments as in
    `gated_delta_block`."""
    projected = _in_parts("projected", projected, (*parent.shape, projected.shape[-1]))
    value_heads, value_dim, key_dim = heads
    if gates is not None:
        gates = _in_parts("gates", gates, (*parent.shape, 2 * value_heads))
    sizes = kernel.Sizes(
        width=projected.shape[2], key_heads=key_heads, value_heads=value_heads, key_dim=key_dim,
        value_dim=value_dim, taps=taps.shape[1], unit=unit,
    )
    form = _choose(implementation, sizes) if chain else "xla"
    wide = sizes.channels + sizes.values
    gate_rows, first_gate = (projected, wide) if gates is None else (gates, 0)
    if form != "xla":
        return DeltaInputs(*kernel.inputs(
            projected, gate_rows, first_gate, conv, taps, a_log, dt_bias, slot, sizes=sizes,
            interpret=form == "interpret",
        ))
    return gated_delta_inputs(
        added(projected), added(gate_rows[..., first_gate:]),
        conv[jnp.minimum(slot, len(conv) - 1)], taps, a_log, dt_bias, parent,
        key_heads=key_heads, heads=heads, chain=chain, unit=unit,
    )


def close_heads(mixed, gate, weight, eps, dtype):
    """gated_rmsnorm of [B, W, Hv, Dv] by gate [B, W, Hv * Dv] fp32, both roundings to `dtype`."""
    gate = gate.astype(dtype)
    closed = gated_rmsnorm(mixed, gate.reshape(mixed.shape), weight, eps)
    return closed.astype(dtype).reshape(gate.shape)


def gated_delta_block(
    projected, gates, conv, taps, a_log, dt_bias, weight, recurrent, slot, parent, live, *,
    key_heads, eps, chain, implementation="auto",
):
    """Outputs of a block's columns before the output projection; the state is read, not written.

    Args:                                                                  (B rows, W columns)
      projected:  [B, W, channels + Hv * Dv (+ 2 * Hv)] fp32, rows q, k, v, z (, a, b).
      gates:      [B, W, 2 * Hv] fp32, rows a and b; None: the last rows of `projected`.
        Either may be in parts [_, B, W, ...] that are added first, see `skinny_parts`.
      conv:       [slots, kernel - 1, channels], committed inputs, the dtype of all activations.
      taps:       [channels, kernel]. a_log, dt_bias: [Hv]. weight: [Dv]. All fp32.
      recurrent:  [slots, Hv, Dv, Dk] fp32, committed states.
      slot:       [B] int32, state of each row; an idle row's is out of range.
      parent, live, chain: as in `gated_delta_verify`.
      key_heads:  Hk. eps: of the norm. Static.
      implementation: "xla", "pallas", "interpret" or "auto": on a GPU the kernels. Static. Trees
        have a kernel for the recurrence alone (`gated_delta_verify`).
    Returns:
      output [B, W, Hv * Dv] in conv's dtype, of columns below live; and, whose columns >= live hold
      anything, `DeltaInputs` and the deltas of `gated_delta_verify`.
    Numeric: rounded to conv's dtype where contracts 6.3.4 says so, else fp32.
    Effects: none. Columns >= live may hold anything and never reach columns below.
    Raises: ValueError for shapes; NotImplementedError if a named kernel lacks the case.
    Source: contracts 6.3.4, 6.3.5.
    """
    heads = recurrent.shape[1:]
    value_heads, value_dim, key_dim = heads
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    wide = channels + value_heads * value_dim
    own = gates is None
    expected = wide + 2 * value_heads if own else wide
    if projected.shape[-1] != expected or conv.shape[-1] != channels:
        raise ValueError(
            f"projected: expected {expected} rows of which {channels} are convolved, got "
            f"{projected.shape[-1]} and {conv.shape[-1]}"
        )
    inputs = block_inputs(
        projected, gates, conv, taps, a_log, dt_bias, slot, parent, key_heads=key_heads,
        heads=heads, chain=chain, unit=True, implementation=implementation,
    )
    mixed, delta = gated_delta_verify(
        inputs.query, inputs.key, inputs.value, inputs.decay, recurrent, slot, parent, live,
        chain=chain, implementation=implementation,
    )
    parts = projected if projected.ndim == 4 else projected[None]
    gate = added(parts[..., channels:wide])
    output = close_heads(mixed, gate, weight, eps, conv.dtype)
    return output, inputs, delta


def _in_parts(name, x, shape):
    """fp32 rows [B, W, rows] of this shape, alone or in parts -> [parts, B, W, rows]."""
    parts = x if x.ndim == 4 else x[None]
    if parts.shape[1:] != shape or not len(parts) or x.dtype != jnp.float32:
        raise ValueError(
            f"{name}: expected float32 {shape}, or parts of it, got {x.dtype} {x.shape}"
        )
    return parts


def _choose(implementation: str, sizes: kernel.Sizes) -> str:
    lacking = None if sizes.supported() else (
        f"two taps or more, power-of-two keys of at least 16 and values in multiples of 16 "
        f"channels; got taps {sizes.taps}, key {sizes.key_dim}, values {sizes.values}"
    )
    return choose_form("gated_delta_block", implementation, lacking, auto_gpu="pallas")
