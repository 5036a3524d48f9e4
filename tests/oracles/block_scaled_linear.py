"""Float64 block-scaled matrices, written from the formula of checkpoints.md 4.3, entry by entry."""

import numpy as np


def dequantise(values, scale, rows, columns):
    """w[o, i] = values[o, i] * scale[o // rows, i // columns]; values [out, in]."""
    out, inner = values.shape
    weights = np.empty((out, inner))
    for o in range(out):
        for i in range(inner):
            weights[o, i] = np.float64(values[o, i]) * np.float64(scale[o // rows, i // columns])
    return weights


def quantise(weights, rows, columns):
    """(values in [-448, 448] not yet rounded to float8, scale) with scale = largest / 448."""
    out, inner = weights.shape
    values = np.zeros((out, inner))
    scale = np.ones((-(-out // rows), -(-inner // columns)))
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            block = np.s_[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns]
            if largest := np.abs(weights[block]).max():
                scale[r, c] = largest / 448
            values[block] = weights[block] / scale[r, c]
    return values, scale
