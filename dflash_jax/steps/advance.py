"""The commit of one round and the next up to the host's decision, as one device program."""

import functools

import jax
import jax.numpy as jnp

from dflash_jax.config import RunConfig
from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.state.scratch import Acceptance, RoundExtent, RoundScratch
from dflash_jax.steps.commit import commit
from dflash_jax.steps.ends import check_eos_ids, first_end, spent
from dflash_jax.steps.models import Models, Params
from dflash_jax.steps.round import speculate


@functools.partial(
    jax.jit, static_argnames="models", donate_argnames=("state", "scratch", "replaced"),
    keep_unused=True,
)
def advance(
    models: Models,
    params: Params,
    state: DecodeState,
    rows: Rows,
    sampling: SamplingArrays,
    scratch: RoundScratch,
    most,
    replaced=None,
    eos_ids=None,
) -> tuple[DecodeState, RoundScratch, jax.Array]:
    """`commit`, then `speculate` with the extents that the state implies. ✎ Donates.

    Every array of the new scratch takes the memory of the old one's, also those that commit does
    not read, and the summary that of the last one. With `most` an array that stays, no address
    changes from round to round: XLA replays the command buffers that it has recorded instead of
    writing them anew, node by node.

    Args:
      rows: `Rows` [B], of both rounds.
      scratch: what the last round on these rows left. Where nothing is committed: any of this
        shape, as of another round that has been committed, or `empty_scratch`.
      most: [B] int32. N = min(L, most) is committed of each row: W or more adopts all that is
        licensed, 0 changes nothing.
      replaced: the summary of the last round, read or copied; None: new memory.
      eos_ids: [B, E] int32, ids that end a row, filled up with -1: the device sees by itself where
        a row ends, and the next round may start before the host has read this one. N = min(L, most)
        then stops behind the first of them, it is 0 for a row with a fault, and a row that ends so,
        or by its budget, is idle in the new round. None: all of that is the host's business.
    Returns:
      the state, the scratch of the new round, and what the host reads of it, [B, W + 4] int32:
      outputs, then L, P, columns verified and fault.
    Raises: ValueError for eos_ids of another shape.
    Source: contracts 9.1, 9.2, 9.3.
    """
    if eos_ids is not None:
        check_eos_ids(eos_ids, rows.lane.shape[0])
    committed, ended = _decided(scratch.acceptance, most, eos_ids)
    state = commit(models, state, rows, scratch, committed)
    rows = rows.replace(read_slot=jnp.where(committed > 0, rows.write_slot, rows.read_slot))
    if eos_ids is not None:
        ended |= (committed > 0) & spent(state.sequence.gather(rows.lane))
        rows = _without(rows, ended, models.run)
    extent = models.extent(state.sequence.gather(rows.lane))
    state, scratch = speculate(models, params, state, rows, sampling, extent)
    return state, scratch, _summary(scratch, extent)


def empty_scratch(
    models: Models, params: Params, state: DecodeState, rows: Rows, sampling: SamplingArrays
) -> RoundScratch:
    """Zeros in the shape of a round's scratch, for an `advance` that has nothing to commit.

    Every array is a buffer of its own, since each is donated.
    """
    extent = jax.eval_shape(lambda s: models.extent(s.gather(rows.lane)), state.sequence)
    inputs = (params, state, rows, sampling, extent)
    _, scratch = jax.eval_shape(lambda *a: speculate(models, *a), *inputs)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), scratch)


def _decided(acceptance: Acceptance, most, eos_ids):
    """N of each row, and whether it ends with an EOS id or a fault."""
    committed = jnp.where(most > 0, jnp.minimum(acceptance.licensed, most), 0)
    if eos_ids is None:
        return committed, None
    first, stopped = first_end(acceptance.outputs, acceptance.licensed, eos_ids)
    committed = jnp.where(acceptance.fault, 0, jnp.minimum(committed, first))
    return committed, (most > 0) & (acceptance.fault | (stopped & (first <= most)))


def _without(rows: Rows, ended, run: RunConfig) -> Rows:
    """The rows, idle where they have ended."""
    return Rows(
        lane=jnp.where(ended, run.lanes, rows.lane),
        read_slot=jnp.where(ended, run.slots, rows.read_slot),
        write_slot=jnp.where(ended, run.slots, rows.write_slot),
    )


def _summary(scratch: RoundScratch, extent: RoundExtent) -> jax.Array:
    acceptance = scratch.acceptance
    columns = jnp.minimum(extent.columns, scratch.proposal.nodes)
    numbers = (
        acceptance.licensed, extent.proposals, columns, acceptance.fault.astype(jnp.int32)
    )
    return jnp.concatenate([acceptance.outputs, jnp.stack(numbers, axis=1)], axis=1)
