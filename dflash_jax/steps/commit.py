"""Adopts the first N columns of a round; N = 0 changes nothing."""

import functools

import jax
import jax.numpy as jnp

from dflash_jax.ops.indices import DROP
from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.state.gdn import fold
from dflash_jax.state.pages import write_all
from dflash_jax.state.scratch import RoundScratch
from dflash_jax.steps.models import Models


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def commit(
    models: Models, state: DecodeState, rows: Rows, scratch: RoundScratch, committed
) -> DecodeState:
    """Moves the state by `committed` columns along the accepted path. ✎ Donates `state`.

    The input rows [a, d_1..d_(N-1)] become processed: their K/V is stored, their records are
    folded, their features wait for materialize. y_N is the next anchor and is not processed.

    Args:
      scratch: of the round just run on this state.
      committed: [B] int32, N in 0..L of each row; N < L only for a row that ends.
    Returns:
      state with F + N; rows with N = 0, and every other lane, are bit-identical.
    Source: contracts 9.2 and 9.3.
    """
    verification, path = scratch.verification, scratch.acceptance.path
    path = jnp.minimum(path, verification.hidden.shape[1] - 1)
    before = state.sequence.gather(rows.lane)
    committed = jnp.where(state.sequence.live(rows.lane), committed, 0)
    table = state.target_table.rows(rows.lane)

    def along(x):
        return jnp.take_along_axis(x, path.reshape(*path.shape, *(1,) * (x.ndim - 2)), axis=1)

    kv = write_all(
        state.target.kv, verification.kv_rows, path, table, before.frontier, committed,
        implementation=models.run.implementation,
    )
    gdn = fold(
        state.target.gdn, verification.gdn_records, rows, path, committed,
        implementation=models.run.implementation,
    )
    last = jnp.maximum(committed - 1, 0)[:, None]
    hidden = jnp.take_along_axis(along(verification.hidden), last[:, :, None], axis=1)[:, 0]
    slot = jnp.where(committed > 0, rows.write_slot, state.target.continuation.shape[0])
    target = state.target.replace(
        kv=kv, gdn=gdn, continuation=state.target.continuation.at[slot].set(hidden, **DROP)
    )

    outputs = scratch.acceptance.outputs
    sequence = state.sequence.count_tokens(rows.lane, outputs, committed)
    sequence = sequence.put(
        rows.lane,
        committed > 0,
        frontier=before.frontier + committed,
        anchor=jnp.take_along_axis(outputs, last, axis=1)[:, 0],
        remaining=before.remaining - committed,
    )
    pending = state.pending.put(rows.lane, along(verification.features), committed)
    return state.replace(target=target, sequence=sequence, pending=pending)
