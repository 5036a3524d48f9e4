"""The short convolution in float64: walks from each column through its ancestors."""

import numpy as np


def causal_conv1d_silu(u, history, taps, parent):
    """u [B, W, C], history [B, kernel-1, C], taps [C, kernel], parent [B, W]."""
    kernel = taps.shape[1]
    out = np.zeros(u.shape)
    for b, c in np.ndindex(u.shape[:2]):
        lineage = [c]
        while lineage[-1] != 0:
            lineage.append(parent[b, lineage[-1]])
        inputs = [u[b, column] for column in lineage] + list(history[b][::-1])
        total = np.zeros(u.shape[2])
        for lag in range(kernel):
            total = total + taps[:, kernel - 1 - lag] * inputs[lag]
        out[b, c] = total / (1.0 + np.exp(-total))
    return out


def shift_history(history, u, path, count):
    out = np.zeros_like(history)
    for b in range(len(history)):
        rows = list(history[b]) + [u[b, path[b, i]] for i in range(count[b])]
        for r in range(history.shape[1]):
            out[b, r] = rows[len(rows) - history.shape[1] + r]
    return out
