"""How a token is accepted in a tree.

The walk starts at the anchor. At column v the children x_0, x_1, .. are judged in the order of
their draws, and the first that passes is entered:

    greedy row:   the child that is the argmax of column v
    sampled row:  child x_j with probability min(1, r_j[x_j] / z_j[x_j]), where z_0 = q_v and
                  z_j is q_v without x_0..x_(j-1), renormalised; r_0 = p_v, and after a rejection
                  r_(j+1) is max(r_j - z_j, 0), renormalised

Where no child passes, the correction is drawn from what is left of r; where there is none, the
bonus from p_v. A chain is the case of one child each, and gives what `accept` gives, bit for bit.

Both normalisers of z are the sum of what is not taken. 1 minus the sum of what is taken (contracts
8.5) loses all digits where one candidate has nearly the whole law. Source: contracts 8.5.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from dflash_jax.ops.indices import DROP
from dflash_jax.ops.softmax_attention import ancestor_mask
from dflash_jax.ops.vocab import public_argmax
from dflash_jax.sampling.distribution import Law, adjusted_logits, target_distribution
from dflash_jax.sampling.order import inverse_cdf
from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.sampling.uniform import Purpose, uniform
from dflash_jax.state.scratch import Acceptance, Proposal, RoundExtent, Verification
from dflash_jax.state.sequence import SequenceState


@struct.dataclass
class _Tree:
    """What follows from the parents, by column.

    exists:    [B, cols] bool, a live column; false at the anchor, which is nobody's child.
    ancestors: [B, cols, cols] bool, the column itself and the columns on its way to the anchor.
    sibling:   [B, cols] int32, place among the children of the parent, in the order of draws.
    """

    exists: jax.Array
    ancestors: jax.Array
    sibling: jax.Array


@struct.dataclass
class _Judged:
    """The children of every column judged, as if the walk had come there.

    entered: [B, cols] int32, the child that passed; 0 if none.
    refused: [B, cols] bool, there were children, and none passed.
    left:    [B, cols, C] fp32, not normalised: what is left of r at the candidates that follow.
    """

    entered: jax.Array
    refused: jax.Array
    left: jax.Array


def accept_tree(
    proposal: Proposal,
    verification: Verification,
    sequence: SequenceState,
    sampling: SamplingArrays,
    extent: RoundExtent,
    *,
    public_vocab: int,
    paths: int,
    max_candidates: int = 0,
    allowed=None,
    lane=None,
) -> Acceptance:
    """The acceptance rule on a tree of columns; rows with a chain in the same frame mix freely.

    Args:
      proposal: of `build_tree`, or a chain; columns from min(Q, its nodes) on do not exist.
      verification, sequence, sampling, lane: as in `accept`.
      extent: P and Q per row.
      public_vocab: V_pub. Static.
      paths: leaves of a tree at most, which bounds the children of a column. Static.
      max_candidates: cap on the target's candidates, 0 for none. Static.
      allowed: [B, cols, V_pub] bool, ids each column may emit, or None.
    Returns:
      `Acceptance` with outputs and path [B, K + 1], as `accept` returns it.
    """
    tree = _structure(proposal, extent)

    def plain():
        best = public_argmax(verification.logits, public_vocab)
        entered = _greedy_children(best.index, proposal, tree)
        path, accepted = _walk(entered, proposal, tree)
        return path, accepted, _at(best.index, _at(path, accepted)), best.finite

    def processed():
        rows = sequence if lane is None else sequence.gather(lane)
        logits = adjusted_logits(
            verification.logits, sampling, rows.counts, rows.prompt_seen,
            proposal.tokens[:, 1:], allowed, tree.ancestors,
        )
        best = public_argmax(logits, public_vocab)
        law = target_distribution(logits, sampling, max_candidates)
        sampled = sampling.temperature > 0.0
        judged = _sampled_children(law, proposal, rows, tree, paths)
        greedy = _greedy_children(best.index, proposal, tree)
        entered = jnp.where(sampled[:, None], judged.entered, greedy)
        path, accepted = _walk(entered, proposal, tree)
        last = _at(path, accepted)
        top = _at(best.index, last)
        drawn = _terminal(law, judged, proposal, rows, last, top)
        return path, accepted, jnp.where(sampled, drawn, top), best.finite

    if allowed is not None:
        found = processed()
    elif sampling.greedy_only:
        found = plain()
    else:
        found = lax.cond(jnp.all(sampling.plain), plain, processed)
    return _licence(proposal, extent, *found)


def _structure(proposal: Proposal, extent: RoundExtent) -> _Tree:
    parent = proposal.parent
    column = jnp.arange(parent.shape[1])
    exists = (parent < column) & (column < extent.columns[:, None])
    same = (parent[:, :, None] == parent[:, None, :]) & exists[:, None, :]
    earlier = same & (column[:, None] > column[None, :])
    return _Tree(
        exists=exists,
        ancestors=ancestor_mask(jnp.where(exists, parent, column)),
        sibling=jnp.sum(earlier, axis=2, dtype=jnp.int32),
    )


def _greedy_children(choices, proposal: Proposal, tree: _Tree):
    """The child [B, cols] that is the choice of its parent's column; 0 if none."""
    wanted = jnp.take_along_axis(choices, proposal.parent, axis=1)
    return _parents_of(tree.exists & (proposal.tokens == wanted), proposal)


def _parents_of(child, proposal: Proposal):
    """For marked columns [B, cols], at most one a parent: the marked child by parent, else 0."""
    batch, columns = child.shape
    column = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), child.shape)
    place = jnp.where(child, proposal.parent, columns)
    rows = jnp.arange(batch)[:, None]
    return jnp.zeros(child.shape, jnp.int32).at[rows, place].set(column, **DROP)


def _sampled_children(law: Law, proposal, sequence, tree: _Tree, paths: int) -> _Judged:
    """Judges the children of all columns at once, one sibling after the other."""
    ids, p = _at_candidates(law, proposal)
    beyond = jnp.maximum(1.0 - jnp.sum(p, axis=-1), 0.0)
    position = sequence.frontier[:, None] + proposal.depth
    u = uniform(sequence.seed[:, None], position, Purpose.ACCEPT, tree.sibling)
    rows = jnp.arange(len(u))[:, None]

    left, mass = p, jnp.ones(u.shape, jnp.float32)
    taken = jnp.zeros(p.shape, bool)
    entered = jnp.zeros(u.shape, jnp.int32)
    for sibling in range(min(paths, p.shape[-1])):
        child = _parents_of(tree.exists & (tree.sibling == sibling), proposal)
        judging = (child > 0) & (entered == 0)
        chosen = ids == proposal.tokens[rows, child][..., None]
        z = proposal.q[rows, jnp.maximum(child - 1, 0)]
        z = _without(z, taken) if sibling else z
        r_of_child = _pick(chosen, left) / jnp.where(mass > 0.0, mass, 1.0)
        z_of_child = _pick(chosen, z)
        passes = (r_of_child > 0.0) & (
            (r_of_child >= z_of_child) | (u[rows, child] * z_of_child < r_of_child)
        )
        if sibling:
            # A later sibling without a law of its own was never drawn.
            judging = judging & (z_of_child > 0.0)
        entered = jnp.where(judging & passes, child, entered)
        refused = (judging & ~passes)[..., None]
        left = jnp.where(refused, jnp.maximum(left - mass[..., None] * z, 0.0), left)
        mass = jnp.where(refused[..., 0], beyond + jnp.sum(left, axis=-1), mass)
        taken = taken | chosen
    first = _parents_of(tree.exists & (tree.sibling == 0), proposal)
    return _Judged(entered=entered, refused=(first > 0) & (entered == 0), left=left)


def _without(law, taken):
    """The law [.., C] of the ranks that are not taken, renormalised."""
    left = jnp.where(taken, 0.0, law)
    total = jnp.sum(left, axis=-1, keepdims=True)
    return left / jnp.where(total > 0.0, total, 1.0)


def _at_candidates(law: Law, proposal: Proposal):
    """Ids [B, cols, C] of the candidates that follow each column, and p of each."""
    deepest = proposal.candidates.shape[1] - 1
    place = jnp.minimum(proposal.depth, deepest)[..., None]
    ids = jnp.take_along_axis(proposal.candidates, place, axis=1)
    public = jnp.minimum(ids, law.weights.shape[-1] - 1)
    p = jnp.take_along_axis(law.weights, public, axis=-1) / law.total[..., None]
    return ids, jnp.where(ids == public, p, 0.0)


def _pick(chosen, values):
    return jnp.sum(jnp.where(chosen, values, 0.0), axis=-1)


def _walk(entered, proposal: Proposal, tree: _Tree):
    """The path [B, K + 1] of entered columns from the anchor on, and A."""
    column = jnp.arange(entered.shape[1])
    passed = jnp.take_along_axis(entered, proposal.parent, axis=1) == column
    passed = jnp.where(column == 0, True, passed & tree.exists)
    reached = jnp.all(~tree.ancestors | passed[:, None, :], axis=2)
    depths = jnp.arange(proposal.candidates.shape[1] + 1)
    here = reached[:, None, :] & (proposal.depth[:, None, :] == depths[:, None])
    path = jnp.sum(jnp.where(here, column.astype(jnp.int32), 0), axis=2, dtype=jnp.int32)
    return path, jnp.sum(reached, axis=1, dtype=jnp.int32) - 1


def _terminal(law: Law, judged: _Judged, proposal, sequence, last, top):
    """The correction or bonus of every row, drawn at the last accepted column."""
    rows = jnp.arange(len(last))
    p = law.weights[rows, last] / law.total[rows, last][:, None]
    refused, depth = judged.refused[rows, last], proposal.depth[rows, last]
    place = jnp.minimum(depth, proposal.candidates.shape[1] - 1)
    residual = p.at[rows[:, None], proposal.candidates[rows, place]].set(
        judged.left[rows, last], **DROP
    )
    residual = jnp.where(refused[:, None], residual, p)
    purpose = jnp.where(refused, Purpose.CORRECTION, Purpose.BONUS).astype(jnp.int32)
    u = uniform(sequence.seed, sequence.frontier + depth + 1, purpose, 0)
    token, mass = inverse_cdf(residual, u)
    # Rounding alone can empty the residual; the target's best candidate stands in.
    return jnp.where(mass > 0.0, token, top)


def _at(values, column):
    return jnp.take_along_axis(values, column[:, None], axis=1)[:, 0]


def _licence(proposal, extent, path, accepted, terminal, finite) -> Acceptance:
    index = jnp.arange(path.shape[1])
    live = extent.columns > 0
    following = jnp.take_along_axis(proposal.tokens, jnp.pad(path[:, 1:], ((0, 0), (0, 1))), axis=1)
    outputs = jnp.where(index < accepted[:, None], following, terminal[:, None])
    outputs = jnp.where((index <= accepted[:, None]) & live[:, None], outputs, 0)
    on_path = jnp.take_along_axis(finite, path, axis=1)
    return Acceptance(
        accepted=accepted,
        licensed=jnp.where(live, accepted + 1, 0),
        outputs=outputs,
        path=path,
        fault=jnp.any((index <= accepted[:, None]) & ~on_path, axis=1) & live,
    )
