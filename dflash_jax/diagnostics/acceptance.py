"""Counters of acceptance and recall by position, and the acceptance that p and q predict."""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.ops.vocab import public_argmax
from dflash_jax.sampling.distribution import adjusted_logits, target_distribution
from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.scratch import RoundExtent, RoundScratch
from dflash_jax.state.sequence import SequenceState


@struct.dataclass
class RoundCounters:
    """Sums over rounds and rows. Position i is that of proposal d_(i+1).

    rounds:    [] int32, row-rounds with P > 0.
    offered:   [K] int32, proposals that could be verified (i < P).
    accepted:  [K] int32, of them accepted; accepted / rounds is the path acceptance at i.
    judged:    [K] int32, of them judged: every earlier proposal was accepted.
    recall_1:  [K] int32, judged columns whose most likely target id is the proposal.
    recall_all: [K] int32, judged columns whose most likely target id is among the candidates.
    """

    rounds: jax.Array
    offered: jax.Array
    accepted: jax.Array
    judged: jax.Array
    recall_1: jax.Array
    recall_all: jax.Array

    @classmethod
    def zeros(cls, draft_tokens: int) -> "RoundCounters":
        def column():
            return jnp.zeros((draft_tokens,), jnp.int32)

        return cls(
            rounds=jnp.zeros((), jnp.int32), offered=column(), accepted=column(), judged=column(),
            recall_1=column(), recall_all=column(),
        )

    def add(
        self, scratch: RoundScratch, extent: RoundExtent, *, public_vocab: int
    ) -> "RoundCounters":
        """The counters after one more round of a chain; rows without proposals count nothing."""
        proposal, taken = scratch.proposal, scratch.acceptance.accepted[:, None]
        position = jnp.arange(self.offered.shape[0])[None, :]
        offered = position < extent.proposals[:, None]
        judged = offered & (position <= taken)
        likely = public_argmax(scratch.verification.logits, public_vocab).index[:, :-1]
        found = jnp.any(proposal.candidates == likely[..., None], axis=-1)

        def count(mask):
            return jnp.sum(mask, axis=0, dtype=jnp.int32)

        return RoundCounters(
            rounds=self.rounds + jnp.sum(extent.proposals > 0, dtype=jnp.int32),
            offered=self.offered + count(offered),
            accepted=self.accepted + count(offered & (position < taken)),
            judged=self.judged + count(judged),
            recall_1=self.recall_1 + count(judged & (likely == proposal.tokens[:, 1:])),
            recall_all=self.recall_all + count(judged & found),
        )


def expected_acceptance(
    scratch: RoundScratch,
    sequence: SequenceState,
    sampling: SamplingArrays,
    *,
    public_vocab: int,
    max_candidates: int = 0,
):
    """Probability that proposal d_(i+1) passes its test once it is judged: sum_v min(p_i, q_i).

    Args:
      sequence: the batch's rows as `accept` saw them.
    Returns:
      [B, K] fp32; of no meaning on greedy rows.
    Source: contracts 7.3.
    """
    proposal = scratch.proposal
    logits = adjusted_logits(
        scratch.verification.logits, sampling, sequence.counts, sequence.prompt_seen,
        proposal.tokens[:, 1:],
    )
    law = target_distribution(logits, sampling, max_candidates)
    ids = jnp.minimum(proposal.candidates, public_vocab - 1)
    p = jnp.take_along_axis(law.weights[:, :-1], ids, axis=-1) / law.total[:, :-1, None]
    p = jnp.where(ids == proposal.candidates, p, 0.0)
    return jnp.sum(jnp.minimum(p, proposal.q), axis=-1)
