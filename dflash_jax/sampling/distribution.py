"""The target's processed distribution, in the reference order of operations.

logits -> bias -> repetition, presence, frequency -> mask -> temperature -> top-k -> min-p and top-p
-> renormalise. Source: contracts 7.1.
"""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.sampling.order import shortest_prefix, sortable, within
from dflash_jax.sampling.params import SamplingArrays


@struct.dataclass
class Law:
    """An unnormalised distribution over public ids: p(v) = weights[v] / total.

    weights: [..., V_pub] fp32, exactly 0 outside the support, 1 at the best candidate.
    total:   [...] fp32, their sum.
    """

    weights: jax.Array
    total: jax.Array

    def probability(self, ids):
        """p of one id per distribution, [...] int32 -> [...] fp32."""
        return jnp.take_along_axis(self.weights, ids[..., None], axis=-1)[..., 0] / self.total


def adjusted_logits(
    logits, sampling: SamplingArrays, counts, prompt_seen, drafts, allowed=None, ancestors=None
):
    """Logits after bias, penalties and masks, column by column.

    Column j counts the committed tokens, its own draft and those of its ancestors (on a chain
    d_1..d_j); never the anchor again, which is counted already.

    Args:                                                                 (B rows, W columns)
      logits:      [B, W, V]; ids >= V_pub are cut.
      counts:      [B, V_pub] int32, published tokens.
      prompt_seen: [B, V_pub] bool.
      drafts:      [B, W - 1] int32, the tokens of columns 1..W-1.
      allowed:     [B, W, V_pub] bool, a mask per column, or None.
      ancestors:   [B, W, W] bool, each column's own bit and its ancestors'; None for a chain.
    Returns:
      [B, W, V_pub] fp32; forbidden ids are -inf.
    Source: contracts 7.1 (steps 1 and 2, bias and repetition before them) and 7.2.
    """
    public = counts.shape[-1]
    raw = logits[..., :public].astype(jnp.float32)
    if sampling.bias.shape[-1]:
        raw = raw + sampling.bias[:, None]
    plain = _penalised(raw, counts[:, None], prompt_seen[:, None], _per_row(sampling))
    if drafts.shape[1]:
        plain = _overlay(plain, raw, sampling, counts, prompt_seen, drafts, ancestors)
    if sampling.allowed.shape[-1]:
        plain = jnp.where(sampling.allowed[:, None], plain, -jnp.inf)
    return plain if allowed is None else jnp.where(allowed, plain, -jnp.inf)


def target_distribution(adjusted, sampling: SamplingArrays, max_candidates: int = 0) -> Law:
    """The law of every column from its adjusted logits.

    Args:
      adjusted: [B, W, V_pub] fp32.
      sampling: rows with temperature 0 get a law too, of no meaning.
      max_candidates: cap on the candidates, 0 for none; 20 is the reference engine's. Static.
    Source: contracts 7.1, steps 4 to 8.
    """
    column = _per_row(sampling)
    heat = jnp.where(column["temperature"] > 0.0, column["temperature"], 1.0)
    best = jnp.max(adjusted, axis=-1, keepdims=True)
    weights = jnp.exp((adjusted - best) / heat)
    keys = sortable(adjusted)
    weights = _keep_top_k(weights, keys, sampling.top_k[:, None, None], max_candidates)
    kept = weights >= column["min_p"]
    weights = jnp.where(kept, _keep_top_p(weights, keys, column["top_p"]), 0.0)
    return Law(weights=weights, total=jnp.sum(weights, axis=-1))


def _keep_top_k(weights, keys, top_k, max_candidates: int):
    size = weights.shape[-1]
    limit = min(size, max_candidates) if max_candidates else size
    wanted = jnp.where((top_k > 0) & (top_k < limit), top_k, limit)
    if not max_candidates:
        return jax.lax.cond(jnp.any(wanted < size), _cut_top_k, _unchanged, weights, keys, wanted)
    return _cut_top_k(weights, keys, wanted)


def _cut_top_k(weights, keys, wanted):
    goal = jnp.broadcast_to(wanted[..., 0].astype(jnp.float32), weights.shape[:-1])
    cut = shortest_prefix(keys, jnp.ones_like(weights), goal)
    return jnp.where(within(keys, cut), weights, 0.0)


def _keep_top_p(weights, keys, top_p):
    return jax.lax.cond(jnp.any(top_p < 1.0), _cut_top_p, _unchanged, weights, keys, top_p)


def _cut_top_p(weights, keys, top_p):
    share = jnp.broadcast_to(top_p[..., 0], weights.shape[:-1])
    # A share may vanish in fp32; the best candidate stays all the same.
    goal = jnp.maximum(share * jnp.sum(weights, axis=-1), jnp.finfo(jnp.float32).tiny)
    cut = shortest_prefix(keys, weights, goal)
    # A share of 1 keeps candidates whose weight vanishes beside the sum.
    return jnp.where(within(keys, cut) | (top_p >= 1.0), weights, 0.0)


def _unchanged(weights, keys, limit):
    del keys, limit
    return weights


def _per_row(sampling: SamplingArrays) -> dict[str, jax.Array]:
    names = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
    return {name: getattr(sampling, name)[:, None, None] for name in names}


def _penalised(raw, counts, seen, column):
    occurs = counts > 0
    scaled = jnp.where(raw > 0.0, raw / column["repetition"], raw * column["repetition"])
    logit = jnp.where(occurs | seen, scaled, raw)
    logit = logit - jnp.where(occurs, column["presence"], 0.0)
    return logit - column["frequency"] * counts.astype(jnp.float32)


def _overlay(plain, raw, sampling, counts, prompt_seen, drafts, ancestors):
    """Recomputes, in every column, the entries of all drafts with the counts of its own path."""
    width, proposals = plain.shape[1], drafts.shape[1]
    # A draft that no row verifies may be any id of the vocabulary matrix.
    ids = jnp.minimum(drafts, plain.shape[-1] - 1)
    same = (ids[:, None, :] == ids[:, :, None]).astype(jnp.int32)
    if ancestors is None:
        before = jnp.arange(proposals)[None, :] < jnp.arange(width)[:, None]
        extra = jnp.einsum("wk,bkj->bwj", before.astype(jnp.int32), same)
    else:
        extra = jnp.einsum("bwk,bkj->bwj", ancestors[:, :, 1:].astype(jnp.int32), same)
    index = jnp.broadcast_to(ids[:, None, :], (len(ids), width, proposals))
    values = _penalised(
        jnp.take_along_axis(raw, index, axis=-1),
        jnp.take_along_axis(counts, ids, axis=-1)[:, None] + extra,
        jnp.take_along_axis(prompt_seen, ids, axis=-1)[:, None],
        _per_row(sampling),
    )
    rows = jnp.arange(len(ids))[:, None, None]
    columns = jnp.arange(width)[None, :, None]
    return plain.at[rows, columns, index].set(values)
