"""How a token is accepted.

Column j of the verification predicts the token at position F + j + 1, so proposal d_(j+1) is judged
by p_j, the target's processed distribution at column j, against q_j, the law that drew it:

    greedy row:   accept d_(j+1) while it is the argmax of column j
    sampled row:  accept d_(j+1) with probability min(1, p_j[d] / q_j[d])

The first rejection, at column A, emits the correction: the argmax, or a draw from the normalised
residual max(p_A - q_A, 0). When all P proposals are accepted, column P emits the bonus from p_P. So
the output has the target's own distribution whatever was proposed. Source: the DFlash reference
document, verification; contracts 7.
"""

import jax
import jax.numpy as jnp
from jax import lax

from dflash_jax.ops.indices import DROP
from dflash_jax.ops.vocab import public_argmax
from dflash_jax.sampling.distribution import adjusted_logits, target_distribution
from dflash_jax.sampling.order import inverse_cdf
from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.sampling.uniform import Purpose, uniform
from dflash_jax.state.scratch import Acceptance, Proposal, RoundExtent, Verification
from dflash_jax.state.sequence import SequenceState


def accept(
    proposal: Proposal,
    verification: Verification,
    sequence: SequenceState,
    sampling: SamplingArrays,
    extent: RoundExtent,
    *,
    public_vocab: int,
    drafted: bool = True,
    max_candidates: int = 0,
    allowed=None,
    lane=None,
) -> Acceptance:
    """The acceptance rule on a chain of columns; greedy and sampled rows mix freely.

    Args:
      proposal, verification: of this round; q is used as stored, never recomputed.
      sequence: the batch's rows: seeds, frontiers, counts and the prompt's ids.
      sampling: controls of each row. When every row is plain, only argmaxes are computed.
      extent: P and Q per row.
      public_vocab: V_pub; ids from there on are never emitted. Static.
      drafted: False without a draft, whose draw has the key of ordinary decoding. Static.
      max_candidates: cap on the target's candidates, 0 for none. Static.
      allowed: [B, cols, V_pub] bool, ids each column may emit, or None.
      lane: None, or [B] int32: `sequence` holds all lanes, of which the batch's are read only if a
        row is not plain. Their counts are as wide as the vocabulary.
    Returns:
      `Acceptance`: A, L = A + 1, outputs d_1..d_A and the terminal token, path, fault.
    """

    def plain():
        best = public_argmax(verification.logits, public_vocab)
        accepted = _greedy_prefix(best.index, proposal.tokens, extent.proposals)
        return accepted, _at(best.index, accepted), best.finite

    def processed():
        rows = sequence if lane is None else sequence.gather(lane)
        logits = adjusted_logits(
            verification.logits, sampling, rows.counts, rows.prompt_seen,
            proposal.tokens[:, 1:], allowed,
        )
        best = public_argmax(logits, public_vocab)
        law = target_distribution(logits, sampling, max_candidates)
        sampled = sampling.temperature > 0.0
        accepted = jnp.where(
            sampled,
            _sampled_prefix(law, proposal, rows, extent.proposals),
            _greedy_prefix(best.index, proposal.tokens, extent.proposals),
        )
        greedy = _at(best.index, accepted)
        drawn = _terminal(law, proposal, rows, extent.proposals, accepted, greedy, drafted)
        return accepted, jnp.where(sampled, drawn, greedy), best.finite

    if allowed is not None:
        accepted, terminal, finite = processed()
    elif sampling.greedy_only:
        accepted, terminal, finite = plain()
    else:
        accepted, terminal, finite = lax.cond(jnp.all(sampling.plain), plain, processed)
    return _licence(proposal, extent, accepted, terminal, finite)


def _greedy_prefix(choices, tokens, proposals):
    """A: how many of d_1..d_P match the choice of the column before them."""
    return _prefix(choices[:, :-1] == tokens[:, 1:], proposals)


def _sampled_prefix(law, proposal, sequence, proposals):
    """A: how many of d_1..d_P pass their test; each test has a key of its own.

    A token of target probability 0 never passes, not even at u = 0.
    """
    drafts = proposal.tokens[:, 1:]
    ids = jnp.minimum(drafts, law.weights.shape[-1] - 1)
    before = jax.tree.map(lambda x: x[:, :-1], law)
    p = jnp.where(drafts == ids, before.probability(ids), 0.0)
    q = jnp.sum(jnp.where(proposal.candidates == drafts[..., None], proposal.q, 0.0), axis=-1)
    position = sequence.frontier[:, None] + 1 + jnp.arange(drafts.shape[1], dtype=jnp.int32)
    u = uniform(sequence.seed[:, None], position, Purpose.ACCEPT, 0)
    return _prefix((p > 0.0) & ((p >= q) | (u * q < p)), proposals)


def _terminal(law, proposal, sequence, proposals, accepted, top, drafted: bool):
    """The correction or bonus of every row, drawn at column A."""
    weights = jnp.take_along_axis(law.weights, accepted[:, None, None], axis=1)[:, 0]
    p = weights / _at(law.total, accepted)[:, None]
    bonus = accepted >= proposals
    residual = jnp.where(bonus[:, None], p, _residual(p, proposal, accepted))
    position = sequence.frontier + accepted + 1
    if drafted:
        purpose = jnp.where(bonus, Purpose.BONUS, Purpose.CORRECTION).astype(jnp.int32)
    else:
        position, purpose = sequence.frontier, Purpose.DECODE
    token, mass = inverse_cdf(residual, uniform(sequence.seed, position, purpose, 0))
    # Rounding alone can empty the residual; the target's best candidate stands in.
    return jnp.where(mass > 0.0, token, top)


def _residual(p, proposal, accepted):
    """max(p - q, 0) at the column that rejected; q is 0 for ids that were no candidates."""
    positions = proposal.candidates.shape[1]
    if not positions:
        return p
    place = jnp.minimum(accepted, positions - 1)[:, None, None]
    ids = jnp.take_along_axis(proposal.candidates, place, axis=1)[:, 0]
    q = jnp.take_along_axis(proposal.q, place, axis=1)[:, 0]
    rows = jnp.arange(len(ids))[:, None]
    return jnp.maximum(p.at[rows, ids].add(-q, **DROP), 0.0)


def _prefix(passes, proposals):
    checked = jnp.arange(passes.shape[1])[None, :] < proposals[:, None]
    run = jnp.cumprod((passes & checked).astype(jnp.int32), axis=1)
    return jnp.sum(run, axis=1, dtype=jnp.int32)


def _at(values, column):
    return jnp.take_along_axis(values, column[:, None], axis=1)[:, 0]


def _licence(proposal, extent, accepted, terminal, finite) -> Acceptance:
    width = proposal.tokens.shape[1]
    path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (len(accepted), width))
    live = extent.columns > 0
    following = jnp.pad(proposal.tokens[:, 1:], ((0, 0), (0, 1)))
    outputs = jnp.where(path < accepted[:, None], following, terminal[:, None])
    outputs = jnp.where((path <= accepted[:, None]) & live[:, None], outputs, 0)
    return Acceptance(
        accepted=accepted,
        licensed=jnp.where(live, accepted + 1, 0),
        outputs=outputs,
        path=path,
        fault=jnp.any((path <= accepted[:, None]) & ~finite, axis=1) & live,
    )
