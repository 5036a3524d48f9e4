"""One round up to the host's decision, as one device program."""

import functools

import jax

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.state.scratch import Proposal, RoundExtent, RoundScratch
from dflash_jax.steps.accept import accept
from dflash_jax.steps.accept_tree import accept_tree
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
    that is dropped here leaves the target as it was. Without a draft this is one plain step; with
    `run.tree_nodes` the columns are a tree.

    Args:
      rows: `Rows` [B]; idle rows have out-of-range lane and slots.
      extent: `Models.extent` of the rows' sequence numbers.
    Returns:
      the state, and the scratch that `commit` takes.
    """
    state = absorb_pending(models, params, state, rows)
    proposal = propose(models, params, state, rows, sampling, extent)
    return state, _judged(models, params, state, rows, proposal, sampling, extent, None)


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def draft_only(
    models: Models,
    params: Params,
    state: DecodeState,
    rows: Rows,
    sampling: SamplingArrays,
    extent: RoundExtent,
) -> tuple[DecodeState, Proposal]:
    """materialize -> propose: the first half of a round whose masks depend on the drafts.

    The host reads the proposal, builds one mask per column (a grammar advanced along d_1..d_j) and
    calls `judge`. The proposal itself never sees a mask. Donates `state`.
    """
    state = absorb_pending(models, params, state, rows)
    return state, propose(models, params, state, rows, sampling, extent)


@functools.partial(jax.jit, static_argnames="models")
def judge(
    models: Models,
    params: Params,
    state: DecodeState,
    rows: Rows,
    proposal: Proposal,
    sampling: SamplingArrays,
    extent: RoundExtent,
    allowed,
) -> RoundScratch:
    """verify -> accept under a mask per column: the second half after `draft_only`.

    Args:
      allowed: [B, cols, V_pub] bool; column j's row holds after d_1..d_j (in a tree: after the
        drafts of its path). A column without any allowed id is a fault of its row.
    """
    return _judged(models, params, state, rows, proposal, sampling, extent, allowed)


def _judged(models, params, state, rows, proposal, sampling, extent, allowed) -> RoundScratch:
    run = models.run
    verification = verify(
        models, params, state, rows, proposal, extent, chain=not run.tree_nodes
    )
    choices = {
        "public_vocab": models.target.public_vocab,
        "max_candidates": run.max_candidates,
        "allowed": allowed,
        "lane": rows.lane,
    }
    judged = (proposal, verification, state.sequence, sampling, extent)
    if run.tree_nodes:
        acceptance = accept_tree(*judged, paths=run.tree_paths, **choices)
    else:
        acceptance = accept(*judged, drafted=models.draft is not None, **choices)
    return RoundScratch(proposal=proposal, verification=verification, acceptance=acceptance)
