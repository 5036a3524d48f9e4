"""DFlash2 candidate selector: pairwise scores between neighbouring positions, and the walk."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from dflash_jax.ops.dispatch import choose_form
from dflash_jax.pallas import candidate_selector as kernel


@struct.dataclass(kw_only=True)
class Walk:
    """One candidate per position, and the law each was drawn from."""

    # [B, K] int32, rank of the chosen candidate, 0..C-1.
    ranks: jax.Array
    # [B, K] int32, its token id.
    tokens: jax.Array
    # [B, K, C] fp32, exactly as drawn from; one-hot in greedy rows.
    q: jax.Array


def edge_scores(unary, candidates, anchor, query, predecessor, successor):
    """Scores every candidate after every possible predecessor.

    E_i[p, c] = u_i[c] + sum_r predecessor[pred(i, p), r] * g_i[r] * successor[C_i[c], r], with
    pred(0, p) = anchor and pred(i, p) = C_(i-1)[p].

    Args:                                             (K positions, C candidates, R rank)
      unary:       [B, K, C] fp32, scores of the head.
      candidates:  [B, K, C] int32, token ids in rank order.
      anchor:      [B] int32, the token before position 0.
      query:       [B, K, R] float, g.
      predecessor: [V, R] float codebook, rows by token id.
      successor:   [V, R] float codebook, rows by token id.
    Returns:
      [B, K, C, C] fp32, axes predecessor then candidate; all predecessors agree at position 0.
    Numeric: fp32 in this order: predecessor * g, dot with successor (no TF32), unary last.
    Raises: ValueError for shapes.
    Source: the DFlash reference document, candidate selector; contracts 5.9.
    """
    batch, positions, num_candidates = candidates.shape
    rank = predecessor.shape[-1]
    if unary.shape != candidates.shape:
        raise ValueError(f"unary: expected {candidates.shape}, got {unary.shape}")
    if anchor.shape != (batch,) or query.shape != (batch, positions, rank):
        raise ValueError(
            f"anchor, query: expected {(batch,)}, {(batch, positions, rank)}, "
            f"got {anchor.shape}, {query.shape}"
        )
    first = jnp.broadcast_to(anchor[:, None, None], (batch, 1, num_candidates))
    previous = jnp.concatenate([first, candidates[:, :-1]], axis=1)
    left = _rows(predecessor, previous) * query.astype(jnp.float32)[:, :, None]
    pairwise = jnp.einsum(
        "bipr,bicr->bipc", left, _rows(successor, candidates), precision=lax.Precision.HIGHEST
    )
    return unary[:, :, None, :] + pairwise


def conditional_walk(edges, candidates, temperature, uniforms):
    """Walks left to right, each step conditioned on the candidate actually chosen before.

    With s = E_i[j_(i-1)] (row 0 at i = 0):
    temperature <= 0: j_i is the lowest rank with maximal s, q_i its one-hot.
    temperature > 0: q_i = exp((s - max s) / T) / sum; j_i is the first rank with q > 0 whose
    cumulative q exceeds the uniform, else the last rank with q > 0.

    Args:
      edges:       [B, K, C, C] fp32, from edge_scores.
      candidates:  [B, K, C] int32.
      temperature: [B] fp32.
      uniforms:    [B, K] fp32 in [0, 1); unused in greedy rows.
    Returns:
      Walk.
    Numeric: fp32; the draw reads the stored q.
    Raises: ValueError for shapes.
    Source: contracts 5.9.
    """
    batch, positions, num_candidates = candidates.shape
    if edges.shape != (batch, positions, num_candidates, num_candidates):
        raise ValueError(f"edges: expected {(*candidates.shape, num_candidates)}, "
                         f"got {edges.shape}")
    if temperature.shape != (batch,) or uniforms.shape != (batch, positions):
        raise ValueError(
            f"temperature, uniforms: expected {(batch,)}, {(batch, positions)}, "
            f"got {temperature.shape}, {uniforms.shape}"
        )

    def step(chosen, position):
        lattice, draw = position
        scores = jnp.take_along_axis(lattice, chosen[:, None, None], axis=1)[:, 0]
        chosen, q = _choose(scores, temperature, draw)
        return chosen, (chosen, q)

    by_position = (jnp.moveaxis(edges, 1, 0), jnp.moveaxis(uniforms, 1, 0))
    # Unrolled: on a GPU a loop of a few numbers would leave the captured graph of the round.
    _, (ranks, q) = lax.scan(step, jnp.zeros(batch, jnp.int32), by_position, unroll=True)
    ranks = ranks.T
    tokens = jnp.take_along_axis(candidates, ranks[..., None], axis=2)[..., 0]
    return Walk(ranks=ranks, tokens=tokens, q=jnp.moveaxis(q, 0, 1))


def select(
    unary, candidates, anchor, query, predecessor, successor, temperature, uniforms, *,
    implementation="auto",
):
    """`conditional_walk` over `edge_scores`: the path without the lattice where that is less work.

    Args:
      the operands of the two.
      implementation: "xla", "pallas", "interpret" or "auto": on a GPU the kernel. Static.
    Returns:
      Walk.
    Raises: ValueError for shapes; NotImplementedError if a named kernel lacks the case.
    Source: contracts 5.9.
    """
    sizes = candidates.shape[2], predecessor.shape[1]
    lacking = None if kernel.supports(*sizes) else (
        f"powers of two, got {sizes[0]} candidates, rank {sizes[1]}"
    )
    form = choose_form("candidate_selector", implementation, lacking, auto_gpu="pallas")
    if form == "xla":
        edges = edge_scores(unary, candidates, anchor, query, predecessor, successor)
        return conditional_walk(edges, candidates, temperature, uniforms)
    ranks, tokens, q = kernel.walk(
        unary, candidates, anchor, query, predecessor, successor, temperature, uniforms,
        interpret=form == "interpret",
    )
    return Walk(ranks=ranks, tokens=tokens, q=q)


def edge_law(scores, temperature):
    """softmax(scores / T) over the last axis; T = 1 where temperature <= 0. The walk's arithmetic.

    Args:
      scores:      [..., C] fp32, edges of one predecessor each.
      temperature: [...] fp32.
    Returns:
      [..., C] fp32.
    """
    divisor = jnp.where(temperature <= 0, 1.0, temperature)[..., None]
    weights = jnp.exp((scores - jnp.max(scores, axis=-1, keepdims=True)) / divisor)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _choose(scores, temperature, draw):
    """Rank [B] and law [B, C] of one position from scores [B, C]."""
    num_candidates = scores.shape[-1]
    best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    greedy = temperature <= 0
    q = edge_law(scores, temperature)
    # q > 0 as well: a parallel running sum can rise by a last bit over a rank that holds nothing.
    positive = q > 0
    reached = (draw[:, None] < jnp.cumsum(q, axis=-1)) & positive
    last = num_candidates - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    drawn = jnp.where(reached.any(-1), jnp.argmax(reached, axis=-1), last).astype(jnp.int32)
    point = jax.nn.one_hot(best, num_candidates, dtype=jnp.float32)
    return jnp.where(greedy, best, drawn), jnp.where(greedy[:, None], point, q)


def _rows(codebook, ids):
    # Clipped: a padding row of the batch may carry any id.
    return jnp.take(codebook, ids, axis=0, mode="clip").astype(jnp.float32)
