"""How a token is accepted.

Column j of the verification predicts the token at position F + j + 1, so proposal d_(j+1) is judged
by column j. A greedy row accepts the longest prefix in which every d_(j+1) is the target's own
argmax; the first column that disagrees emits its argmax as the correction, and when all P proposals
agree, column P emits the bonus. So the output is what plain greedy decoding would emit, whatever
was proposed. Source: the DFlash reference document, verification; contracts 7.3.
"""

import jax.numpy as jnp

from dflash_jax.ops.vocab import public_argmax
from dflash_jax.sampling.params import SamplingArrays
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
) -> Acceptance:
    """The acceptance rule on a chain of columns.

    Args:
      proposal, verification: of this round.
      sequence: the batch's rows; sampled acceptance reads its seeds and counts.
      sampling: rows with temperature <= 0 are greedy; only those are implemented, and
        `SamplingArrays` makes no others.
      extent: P and Q per row.
      public_vocab: V_pub; ids from there on are never emitted. Static.
    Returns:
      `Acceptance`: A, L = A + 1, outputs d_1..d_A and the terminal token, path, fault.
    """
    del sequence, sampling
    width = proposal.tokens.shape[1]
    best = public_argmax(verification.logits, public_vocab)
    accepted = _greedy_prefix(best.index, proposal.tokens, extent.proposals)
    live = extent.columns > 0
    path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (len(accepted), width))
    on_path = path <= accepted[:, None]
    fault = jnp.any(on_path & ~best.finite, axis=1) & live
    # On a greedy path every accepted proposal equals the choice of its column.
    outputs = jnp.where(on_path & live[:, None], best.index, 0)
    return Acceptance(
        accepted=accepted,
        licensed=jnp.where(live, accepted + 1, 0),
        outputs=outputs,
        path=path,
        fault=fault,
    )


def _greedy_prefix(choices, tokens, proposals):
    """A: how many of d_1..d_P match the choice of the column before them."""
    checked = jnp.arange(tokens.shape[1] - 1)[None, :] < proposals[:, None]
    match = (choices[:, :-1] == tokens[:, 1:]) & checked
    return jnp.sum(jnp.cumprod(match.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
