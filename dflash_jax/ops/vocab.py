"""Choices over vocabulary rows: argmax and top-k, with ties decided by rule and never by luck."""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from dflash_jax.ops.dispatch import choose_form
from dflash_jax.ops.linear import linear
from dflash_jax.ops.rounding import rounded
from dflash_jax.pallas import linear_topk as fused
from dflash_jax.pallas import mosaic
from dflash_jax.pallas import vocab as kernel

# lax.top_k runs one program a row on a GPU, so a long row is cut: 97 blocks of 248320.
_BLOCK = 2560


@struct.dataclass(kw_only=True)
class TopK:
    """The best candidates in rank order: score descending, equal scores by lower id."""

    # [..., k] fp32.
    scores: jax.Array
    # [..., k] int32, global token ids.
    ids: jax.Array


@struct.dataclass(kw_only=True)
class Argmax:
    """The largest public logit."""

    # [...] int32, lowest id that attains the maximum; meaningless where not finite.
    index: jax.Array
    # [...] bool, no public logit is NaN and the largest is finite.
    finite: jax.Array


def linear_topk(
    hidden, head, *, k, public_rows, token_ids=None, ids_sorted=False, implementation="auto"
):
    """Keeps the k best rows of a head by fp32 score; equal scores go to the lower global id.

    score[row] = sum_h head[row, h] * hidden[h]; +0 and -0 are equal.

    Args:
      hidden:      [..., H] float.
      head:        [rows, H], dtype of hidden.
      k:           candidates to keep. Static.
      public_rows: rows of a full head that may be proposed; not read with token_ids. Static.
      token_ids:   None (row = id), or [rows] int32, distinct global ids of the rows; then all
        rows take part.
      ids_sorted:  states that token_ids ascend, which saves a sort and a gather. Static.
      implementation: "xla"; "select", XLA's product and then the kernel of `top_k`; "pallas",
        "interpret" or "mosaic", product and selection in one kernel, which wants ids_sorted;
        or "auto": on a GPU "pallas" where it fits. Static.
    Returns:
      TopK.
    Numeric: scores in fp32, never rounded to a logits dtype.
    Raises: ValueError for shapes, dtypes or fewer than k eligible rows; NotImplementedError if a
      named kernel lacks the case.
    Source: contracts 5.8.
    """
    rows = head.shape[0]
    eligible = min(public_rows, rows) if token_ids is None else rows
    if not 0 < k <= eligible:
        raise ValueError(f"k: expected 1..{eligible} eligible rows, got {k}")
    if token_ids is not None and (token_ids.shape != (rows,) or token_ids.dtype != jnp.int32):
        raise ValueError(
            f"token_ids: expected int32 ({rows},), got {token_ids.dtype} {token_ids.shape}"
        )
    tokens = math.prod(hidden.shape[:-1])
    form = _head_form("linear_topk", implementation, hidden, head, _lacking(k))
    if form in ("xla", "select") or (token_ids is not None and not ids_sorted):
        scores = linear(hidden, head, jnp.float32)
        if token_ids is not None and not ids_sorted:
            order = jnp.argsort(token_ids)
            scores, token_ids = scores[..., order], token_ids[order]
        selection = {"select": "pallas", "mosaic": "pallas"}.get(form, form)
        best, index = top_k(scores, k=k, eligible=eligible, implementation=selection)
    else:
        flat, options = hidden.reshape(tokens, -1), dict(k=k, eligible=eligible)
        if form == "mosaic":
            found = fused.stream_k_best(flat, head, **options)
        else:
            found = fused.k_best(flat, head, **options, interpret=form == "interpret")
        best, index = (x.reshape(*hidden.shape[:-1], k) for x in found)
    return TopK(scores=best, ids=index if token_ids is None else token_ids[index])


def top_k(scores, *, k, eligible, implementation="auto"):
    """The k best of the first `eligible` scores, best first; equal ones by lower index.

    Args:
      scores: [..., N] fp32; +0 and -0 are equal; from `eligible` on anything.
      k, eligible: k <= eligible <= N. Static.
      implementation: as in `linear_topk`. Static.
    Returns:
      scores [..., k] fp32 and indices [..., k] int32.
    Source: contracts 5.8.
    """
    form = choose_form("top_k", implementation, _lacking(k), auto_gpu="pallas")
    count = scores.shape[-1]
    if form == "xla":
        scores = jnp.where(scores == 0, 0.0, scores)
        scores = jnp.where(jnp.arange(count) < eligible, scores, -jnp.inf)
        return _top_k_by_blocks(scores, k)
    best = kernel.top_k(
        scores.reshape(-1, count), k=k, eligible=eligible, interpret=form == "interpret"
    )
    return tuple(x.reshape(*scores.shape[:-1], k) for x in best)


def linear_argmax(hidden, head, *, public_rows, logits_dtype, implementation="auto"):
    """Finds the lowest row whose rounded logit is maximal.

    Args:
      hidden:       [..., H] float.
      head:         [rows, H], dtype of hidden.
      public_rows:  rows that take part, the first ones; all rows of an indexed head. Static.
      logits_dtype: the logits are rounded to it before they are compared: ties in it are real.
      implementation: "xla", "pallas", "interpret", "mosaic" or "auto": on a GPU "pallas" where it
        fits. Static.
    Returns:
      [...] int32 row (of an indexed head: not yet a token id).
    Raises: ValueError for shapes, dtypes or no eligible row; NotImplementedError if a named kernel
      lacks the case.
    Source: contracts 5.7.
    """
    if not 0 < public_rows <= head.shape[0]:
        raise ValueError(f"public_rows: expected 1..{head.shape[0]}, got {public_rows}")
    form = _head_form("linear_argmax", implementation, hidden, head)
    if form != "xla":
        flat = hidden.reshape(-1, hidden.shape[-1])
        options = dict(eligible=public_rows, logits_dtype=logits_dtype)
        if form == "mosaic":
            found = fused.stream_lowest_maximum(flat, head, **options)
        else:
            found = fused.lowest_maximum(flat, head, **options, interpret=form == "interpret")
        return found.reshape(hidden.shape[:-1])
    logits = linear(hidden, head, jnp.float32)
    # Explicit: XLA may compare the fp32 values behind a cast, and miss the ties.
    return _lowest_maximum(rounded(logits, logits_dtype), public_rows)


def public_argmax(logits, public_rows):
    """Finds the lowest public id with the largest logit and says whether that is a choice at all.

    Args:
      logits:      [..., V] float; ids from public_rows on may hold anything.
      public_rows: V_pub. Static.
    Returns:
      Argmax.
    Raises: ValueError if public_rows is not in 1..V.
    Source: contracts 7.1 (greedy; no finite candidate is a fault of the row).
    """
    if not 0 < public_rows <= logits.shape[-1]:
        raise ValueError(f"public_rows: expected 1..{logits.shape[-1]}, got {public_rows}")
    public = logits[..., :public_rows]
    finite = jnp.isfinite(jnp.max(public, axis=-1)) & ~jnp.isnan(public).any(axis=-1)
    return Argmax(index=_lowest_maximum(logits, public_rows), finite=finite)


def _lacking(k: int) -> str | None:
    return None if kernel.supports(k) else f"at most {kernel.BLOCK} candidates, got {k}"


def _head_form(op: str, implementation: str, hidden, head, lacking: str | None = None) -> str:
    """The form of a product with a head; `lacking` is what its selection lacks."""
    tokens, width = math.prod(hidden.shape[:-1]), hidden.shape[-1]
    if hidden.dtype != head.dtype or head.shape[1:] != (width,):
        raise ValueError(
            f"head: expected [rows, {width}] {hidden.dtype}, got {head.shape} {head.dtype}"
        )
    if not width:
        raise ValueError(f"head: expected at least one column, got {head.shape}")
    many = f"1..{fused.MAX_TOKENS} tokens, got {tokens}"
    whole = lacking if lacking or fused.supports(tokens) else many
    streamed = whole if whole or mosaic.supports(tokens, head) else (
        f"16-bit heads of multiples of 8 and 64, got {head.shape} {head.dtype}"
    )
    more = {"mosaic": streamed} | ({"select": lacking} if op == "linear_topk" else {})
    return choose_form(op, implementation, whole, auto_gpu="pallas", more=more)


def _lowest_maximum(logits, public_rows):
    # argmax compares values: +0 equals -0, and among equals the lowest index wins.
    return jnp.argmax(logits[..., :public_rows], axis=-1).astype(jnp.int32)


def _top_k_by_blocks(scores, k):
    """lax.top_k in two levels; both keep equal scores in index order, so the result does too."""
    rows = scores.shape[-1]
    if rows <= _BLOCK or k >= _BLOCK:
        return lax.top_k(scores, k)
    blocks = -(-rows // _BLOCK)
    # The padding has the highest indices and the lowest score, and k eligible rows precede it.
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, blocks * _BLOCK - rows)]
    padded = jnp.pad(scores, padding, constant_values=-jnp.inf)
    by_block = padded.reshape(*scores.shape[:-1], blocks, _BLOCK)
    best, index = lax.top_k(by_block, k)
    index = index + _BLOCK * jnp.arange(blocks, dtype=jnp.int32)[:, None]
    flat = (*scores.shape[:-1], blocks * k)
    best, place = lax.top_k(best.reshape(flat), k)
    return best, jnp.take_along_axis(index.reshape(flat), place, axis=-1)
