"""The commit of one round and the next up to the host's decision, as one device program."""

import functools

import jax
import jax.numpy as jnp

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.state.scratch import RoundExtent, RoundScratch
from dflash_jax.steps.commit import commit
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
      replaced: the summary of the last round, which has been read; None: new memory.
    Returns:
      the state, the scratch of the new round, and what the host reads of it, [B, W + 4] int32:
      outputs, then L, P, columns verified and fault.
    Source: contracts 9.2, 9.3.
    """
    committed = jnp.where(most > 0, jnp.minimum(scratch.acceptance.licensed, most), 0)
    state = commit(models, state, rows, scratch, committed)
    rows = rows.replace(read_slot=jnp.where(committed > 0, rows.write_slot, rows.read_slot))
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


def _summary(scratch: RoundScratch, extent: RoundExtent) -> jax.Array:
    acceptance = scratch.acceptance
    columns = jnp.minimum(extent.columns, scratch.proposal.nodes)
    numbers = (
        acceptance.licensed, extent.proposals, columns, acceptance.fault.astype(jnp.int32)
    )
    return jnp.concatenate([acceptance.outputs, jnp.stack(numbers, axis=1)], axis=1)
