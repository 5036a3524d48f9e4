"""Choices over a vocabulary by sorting Python tuples."""

import numpy as np


def scores(hidden, head):
    """[N, rows] float64 of hidden [N, H]."""
    return np.array([[np.sum(row * h) for row in head] for h in hidden])


def topk(score, k, ids):
    """(scores [k], ids [k]) of one score row; ids[i] is None for a row that takes no part."""
    order = [(-(s + 0.0), i) for s, i in zip(score, ids, strict=True) if i is not None]
    order = sorted((0.0 if s == 0 else s, i) for s, i in order)[:k]
    return [0.0 - s for s, _ in order], [i for _, i in order]


def lowest_maximum(score, public_rows):
    best = 0
    for row in range(1, public_rows):
        if score[row] > score[best]:
            best = row
    return best
