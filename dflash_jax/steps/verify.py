"""The target's pass over the proposed columns; it reads the state and leaves scratch."""

import jax.numpy as jnp

from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.state.scratch import Proposal, RoundExtent, Verification
from dflash_jax.steps.models import Models, Params, target_call
from dflash_jax.target import TargetColumns


def verify(
    models: Models,
    params: Params,
    state: DecodeState,
    rows: Rows,
    proposal: Proposal,
    extent: RoundExtent,
    *,
    chain: bool = True,
) -> Verification:
    """Runs columns j < Q; column j stands at position F + depth[j] and sees its ancestors.

    Args:
      chain: promises parent[j] = j - 1, as every proposal without a tree has it. Static.
    Returns:
      `Verification`; columns >= Q carry no meaning and have no effect.
    Source: contracts 6.
    """
    tokens, columns = target_columns(state, rows, proposal, extent, chain=chain)
    embedded = target_call(models, params, "embed", tokens)
    output = target_call(models, params, "verify", embedded, columns, state.target)
    return Verification(
        logits=target_call(models, params, "logits", output.hidden),
        hidden=output.hidden,
        features=output.features,
        kv_rows=output.kv_rows,
        gdn_records=output.gdn,
    )


def target_columns(
    state: DecodeState, rows: Rows, proposal: Proposal, extent: RoundExtent, *, chain: bool
):
    """The tokens [B, cols] that `verify` runs, and where they stand, `TargetColumns`."""
    sequence = state.sequence.gather(rows.lane)
    width = proposal.tokens.shape[1]
    # A lattice may hold fewer columns than a tree has room for.
    count = extent.columns if chain else jnp.minimum(extent.columns, proposal.nodes)
    live = jnp.arange(width)[None, :] < count[:, None]
    tokens = jnp.where(live, proposal.tokens, sequence.anchor[:, None])
    deepest = jnp.maximum(count - 1, 0)[:, None]
    depth = jnp.where(live, proposal.depth, deepest)
    position = (sequence.frontier + sequence.rope_delta)[:, None] + depth
    place = {
        "positions": jnp.broadcast_to(position[:, :, None], (*position.shape, 3)),
        "frontier": sequence.frontier,
        "live": count,
        "table": state.target_table.rows(rows.lane),
        "slot": rows.read_slot,
    }
    if chain:
        return tokens, TargetColumns.chained(**place)
    return tokens, TargetColumns.tree(**place, parent=proposal.parent)
