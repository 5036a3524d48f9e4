"""Turns features of committed positions into draft context, so that F_ctx = F."""

import functools

import jax

from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.steps.models import Models, Params, draft_call


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def materialize(models: Models, params: Params, state: DecodeState, rows: Rows) -> DecodeState:
    """Appends each row's pending features to the draft context. ✎ Donates `state`.

    Args:
      rows: `Rows` [B]; n = F - F_ctx differs per row and may be 0.
    Returns:
      state with F_ctx = F on those rows; pages and rings of other lanes are unchanged.
    Source: contracts 4.
    """
    return absorb_pending(models, params, state, rows)


def absorb_pending(models: Models, params: Params, state: DecodeState, rows: Rows) -> DecodeState:
    """`materialize` without the jit, for use inside a larger program."""
    sequence = state.sequence.gather(rows.lane)
    count = sequence.frontier - sequence.context_frontier
    features = state.pending.gather(rows.lane, count)
    return materialize_features(
        models, params, state, rows, features, sequence.context_frontier, count
    )


def materialize_features(models, params, state, rows, features, start, count) -> DecodeState:
    """Appends features [B, T, n_tap * H] of positions start + j, j < count, to the context.

    F_ctx becomes start + count. Without a draft only the frontier moves. Prefill calls this with a
    chunk's own features; a chunk longer than a ring leaves only its last S columns there.
    """
    if models.draft is not None:
        context = draft_call(
            models, params, "store_context", features, state.context, rows.write_slot,
            state.draft_table.rows(rows.lane), start, count,
        )
        state = state.replace(context=context)
    sequence = state.sequence.put(rows.lane, count > 0, context_frontier=start + count)
    return state.replace(sequence=sequence)
