"""Losses of a target and of the drafts.

A draft's head is trained by cross-entropy on the token at each mask's position, weighted by
w_i = exp(-i / gamma) for mask i = 0..K-1: an error at i discards everything behind it. DFlash2 adds
the same weighted cross-entropy over the selector's candidates, scored as the conditional walk
scores them after the true predecessor (the one the walk holds when everything before i was right).
Source: the DFlash paper (position decay); contracts 5.7-5.9 for the scores. The published DFlash2
recipe is not public; the selector's term is that of open trainers (NeMo AutoModel, speculators).
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from dflash_jax.config import DraftConfig, DraftKind
from dflash_jax.ops.linear import linear


@struct.dataclass
class DraftLoss:
    """One batch of blocks.

    total:    scalar, what is minimised.
    head:     scalar, weighted cross-entropy of the head.
    selector: scalar, weighted cross-entropy over candidates; 0 for DFlash.
    tokens_per_round: scalar, 1 + the mean length of the correct prefix of the proposals.
    recall:   [K], share of masks whose token is among the candidates (DFlash: is the argmax).
    """

    total: jax.Array
    head: jax.Array
    selector: jax.Array
    tokens_per_round: jax.Array
    recall: jax.Array


def next_token_loss(logits, tokens, public_vocab: int):
    """Mean cross-entropy of [N, T, V] fp32 scores on the following token, over public rows."""
    scores = public_scores(logits[:, :-1], public_vocab)
    return jnp.mean(cross_entropy(scores, tokens[:, 1:]))


def position_weights(draft_tokens: int, gamma: float):
    """[K] fp32, exp(-i / gamma)."""
    return jnp.exp(-jnp.arange(draft_tokens, dtype=jnp.float32) / gamma)


def draft_loss(
    config: DraftConfig, params, head, hidden, anchor_tokens, labels, proposals, *,
    public_vocab: int, gamma: float, selector_weight: float,
) -> DraftLoss:
    """Loss of mask columns [N, A, K, H].

    Args:
      params: the draft's variables.
      head: [V, H], the target's frozen head, dtype of hidden.
      anchor_tokens: [N, A] int32. labels: [N, A, K] int32 (`block_labels`).
      proposals: [N, A] int32, masks of each block that exist; the others count nowhere.
      public_vocab: V_pub; reserved rows are no choice, as at inference. Static.
    Returns:
      `DraftLoss`.
    """
    exists = jnp.arange(labels.shape[-1]) < proposals[..., None]
    weights = jnp.where(exists, position_weights(labels.shape[-1], gamma), 0.0)
    scores = public_scores(linear(hidden, head, jnp.float32), public_vocab)
    head_loss = _weighted(cross_entropy(scores, labels), weights)
    if config.kind is DraftKind.DFLASH:
        correct = exists & (jnp.argmax(scores, axis=-1) == labels)
        return DraftLoss(
            total=head_loss, head=head_loss, selector=jnp.zeros((), jnp.float32),
            tokens_per_round=_prefix(correct), recall=_share(correct, exists),
        )
    before = jnp.concatenate([anchor_tokens[..., None], labels[..., :-1]], axis=-1)
    ids, edges = walk_scores(config, params, hidden, scores, before)
    is_label = ids == labels[..., None]
    found = is_label.any(-1)
    rank = jnp.argmax(is_label, axis=-1)
    # A label outside the candidates leaves nothing to select: those masks carry no selector loss.
    losses = jnp.where(found, cross_entropy(edges, rank), 0.0)
    selector_loss = _weighted(losses, weights)
    correct = exists & found & (jnp.argmax(edges, axis=-1) == rank)
    return DraftLoss(
        total=head_loss + selector_weight * selector_loss, head=head_loss, selector=selector_loss,
        tokens_per_round=_prefix(correct), recall=_share(found, exists),
    )


def walk_scores(config: DraftConfig, params, hidden, scores, before):
    """The row of the lattice that the walk reads when it holds the given predecessors.

    E[c] = u[c] + sum_r predecessor[before, r] * g_r * successor[C[c], r], as `edge_scores`.

    Args:
      hidden: [..., H]. scores: [..., V] fp32, public rows only. before: [...] int32.
    Returns:
      candidate ids [..., C] int32 in rank order, and E [..., C] fp32.
    """
    selector = params["selector"]
    unary, ids = lax.top_k(scores, config.selector.num_candidates)
    query = linear(hidden, selector["projection"]["kernel"], hidden.dtype).astype(jnp.float32)
    left = _rows(selector["predecessor"], before) * query
    pairwise = jnp.einsum(
        "...r,...cr->...c", left, _rows(selector["successor"], ids),
        precision=lax.Precision.HIGHEST,
    )
    return ids, unary + pairwise


def public_scores(logits, public_vocab: int):
    """Scores without reserved rows: those become the lowest finite number."""
    public = jnp.arange(logits.shape[-1]) < public_vocab
    return jnp.where(public, logits, jnp.finfo(logits.dtype).min)


def cross_entropy(scores, labels):
    """[..., V] fp32 and [...] int32 -> [...] fp32."""
    chosen = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - chosen


def _weighted(losses, weights):
    """Mean over the masks of all blocks, by weight."""
    return jnp.sum(losses * weights) / jnp.sum(weights)


def _share(hits, exists):
    """[N, A, K] booleans -> [K], the share of existing masks that are hits."""
    there = jnp.sum(exists, axis=(0, 1))
    return jnp.sum(hits & exists, axis=(0, 1)) / jnp.maximum(there, 1)


def _prefix(correct):
    """1 + mean length of the leading run of correct masks."""
    return 1.0 + jnp.mean(jnp.sum(jnp.cumprod(correct.astype(jnp.float32), axis=-1), axis=-1))


def _rows(codebook, ids):
    # Widened before the lookup, so that its gradient is summed in fp32.
    return codebook.astype(jnp.float32)[ids]
