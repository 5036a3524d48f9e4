"""One round up to the host's decision, as one device program."""

import functools

import jax

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.state.scratch import RoundExtent, RoundScratch
from dflash_jax.steps.accept import accept
from dflash_jax.steps.materialize import absorb_pending
from dflash_jax.steps.models import Models, Params
from dflash_jax.steps.propose import propose
from dflash_jax.steps.verify import verify


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def speculate(
    models: Models,
    params: Params,
    state: DecodeState,
    rows: Rows,
    sampling: SamplingArrays,
    extent: RoundExtent,
) -> tuple[DecodeState, RoundScratch]:
    """materialize -> propose -> verify -> accept. Donates `state`.

    Only the draft context moves in the state (F_ctx = F); everything else is scratch, so a round
    that is dropped here leaves the target as it was. Without a draft this is one plain step.

    Args:
      rows: `Rows` [B]; idle rows have out-of-range lane and slots.
      extent: `Models.extent` of the rows' sequence numbers.
    Returns:
      the state, and the scratch that `commit` takes.
    """
    state = absorb_pending(models, params, state, rows)
    proposal = propose(models, params, state, rows, sampling, extent)
    verification = verify(models, params, state, rows, proposal, extent)
    acceptance = accept(
        proposal,
        verification,
        state.sequence.gather(rows.lane),
        sampling,
        extent,
        public_vocab=models.target.public_vocab,
    )
    scratch = RoundScratch(proposal=proposal, verification=verification, acceptance=acceptance)
    return state, scratch
