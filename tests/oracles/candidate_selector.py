"""The candidate selector in float64, from contracts 5.9."""

import numpy as np


def edge_scores(unary, candidates, anchor, query, predecessor, successor):
    batch, positions, count = candidates.shape
    out = np.zeros((batch, positions, count, count))
    for b, i, p, c in np.ndindex(out.shape):
        before = anchor[b] if i == 0 else candidates[b, i - 1, p]
        pairwise = np.sum(predecessor[before] * query[b, i] * successor[candidates[b, i, c]])
        out[b, i, p, c] = unary[b, i, c] + pairwise
    return out


def law(scores, temperature):
    """q of one position from its scores [C]."""
    if temperature <= 0:
        q = np.zeros(len(scores))
        q[lowest_maximum(scores)] = 1.0
        return q
    weights = np.exp((scores - np.max(scores)) / temperature)
    return weights / np.sum(weights)


def draw(q, uniform):
    """Inverse CDF in rank order; the last rank with q > 0 when none is reached."""
    total, last = 0.0, 0
    for rank, mass in enumerate(q):
        total += mass
        if mass > 0:
            last = rank
            if uniform < total:
                return rank
    return last


def lowest_maximum(scores):
    best = 0
    for rank in range(1, len(scores)):
        if scores[rank] > scores[best]:
            best = rank
    return best


def conditional_walk(edges, temperature, uniforms):
    """(ranks [B, K], q [B, K, C])."""
    batch, positions, count, _ = edges.shape
    ranks, laws = np.zeros((batch, positions), int), np.zeros((batch, positions, count))
    for b in range(batch):
        chosen = 0
        for i in range(positions):
            laws[b, i] = law(edges[b, i, chosen], temperature[b])
            if temperature[b] <= 0:
                chosen = lowest_maximum(edges[b, i, chosen])
            else:
                chosen = draw(laws[b, i], uniforms[b, i])
            ranks[b, i] = chosen
    return ranks, laws
