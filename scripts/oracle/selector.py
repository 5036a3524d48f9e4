"""Checks of the DFlash2 candidate selector: inside a draft golden, and on whole numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.ops.candidate_selector import Walk, conditional_walk, edge_scores
from dflash_jax.ops.vocab import TopK, linear_topk
from dflash_jax.steps import Models, Params
from dflash_jax.steps.models import draft_call, target_call

from .compare import Checks, Exact, Floats, Input
from .kit import Golden
from .loaded import with_shortlist


def check_selector(
    golden: Golden, models: Models, params: Params, hidden: jax.Array, checks: Checks
) -> None:
    """Candidates, lattice and walks after the mask columns `hidden` [1, K, H]."""
    anchor = jnp.asarray(golden["anchor"], jnp.int32)[None]
    best, walk = _greedy(models, params, hidden, anchor)
    edges = draft_call(models, params, "edges", hidden, best, anchor)
    query = models.draft_module.apply(
        {"params": params.draft},
        hidden,
        method=lambda module, x: module.selector.projection(x, jnp.float32),
    )
    checks |= {
        "unary": [Floats(best.scores[0])],
        "candidates": [Exact(np.asarray(best.ids[0]))],
        "hidden_projection": [Floats(query[0])],
        "edge": [Floats(edges[0])],
        "greedy_ranks": [Exact(np.asarray(walk.ranks[0]))],
        "greedy_path": [Exact(np.asarray(walk.tokens[0]))],
    }
    if "forced_ranks" in golden:
        ranks = golden["forced_ranks"]
        path = np.asarray(best.ids[0])[np.arange(len(ranks)), ranks]
        law = forced_law(edges, best.ids, ranks, float(golden["temperature"]))
        checks |= {
            "temperature": [Input()],
            "forced_ranks": [Input()],
            "forced_path": [Exact(path)],
            "forced_q": [Floats(law)],
        }
    if "shortlist_ids" in golden:
        short = with_shortlist(models, params, golden["shortlist_ids"])
        best, walk = _greedy(*short, hidden, anchor)
        checks |= {
            "shortlist_unary": [Floats(best.scores[0])],
            "shortlist_candidates": [Exact(np.asarray(best.ids[0]))],
            "shortlist_greedy_path": [Exact(np.asarray(walk.tokens[0]))],
        }


def _greedy(
    models: Models, params: Params, hidden: jax.Array, anchor: jax.Array
) -> tuple[TopK, Walk]:
    head, public = target_call(models, params, "head_matrix"), models.target.public_vocab
    best = draft_call(models, params, "topk", hidden, head, public)
    zeros = jnp.zeros(hidden.shape[:2], jnp.float32)
    return best, draft_call(models, params, "select", hidden, best, anchor, zeros[:, 0], zeros)


def forced_law(
    edges: jax.Array, candidates: jax.Array, ranks: np.ndarray, temperature: float
) -> np.ndarray:
    """Proposal law [K, C] of each step of a given path.

    A walk of one position reads row 0 of its lattice, so the row of the forced predecessor is put
    there and each step is a walk of its own.
    """
    rows = np.asarray(edges[0])
    previous = np.concatenate([[0], ranks[:-1]])
    chosen = rows[np.arange(len(ranks)), previous]
    lattices = np.repeat(chosen[:, None, None, :], rows.shape[1], axis=2)
    count = len(ranks)
    walk = conditional_walk(
        jnp.asarray(lattices),
        jnp.moveaxis(candidates, 1, 0),
        jnp.full((count,), temperature, jnp.float32),
        jnp.zeros((count, 1), jnp.float32),
    )
    return np.asarray(walk.q[:, 0])


def check_ties(golden: Golden) -> Checks:
    """selector_ties: every sum is exact, so that all of it must be equal."""
    anchor = jnp.asarray(golden["anchor"], jnp.int32)[None]
    logits, count = jnp.asarray(golden["logits"]), golden["candidates"].shape[1]
    # A head of the logits themselves: each position's hidden picks its own row.
    picks = jnp.eye(len(logits), dtype=jnp.float32)
    best = linear_topk(picks, logits.T, k=count, public_rows=logits.shape[1])
    edges = edge_scores(
        best.scores[None],
        best.ids[None],
        anchor,
        jnp.asarray(golden["hidden"])[None],
        jnp.asarray(golden["predecessor_codebook"]),
        jnp.asarray(golden["successor_codebook"]),
    )
    zeros = jnp.zeros((1, len(logits)), jnp.float32)
    walk = conditional_walk(edges, best.ids[None], zeros[:, 0], zeros)
    inputs = ("logits", "hidden", "predecessor_codebook", "successor_codebook", "anchor")
    return {name: [Input()] for name in inputs} | {
        "candidates": [Exact(np.asarray(best.ids))],
        "edge": [Exact(np.asarray(edges[0]))],
        "greedy_ranks": [Exact(np.asarray(walk.ranks[0]))],
        "greedy_path": [Exact(np.asarray(walk.tokens[0]))],
    }
