"""Routed experts in float64, one token and one expert at a time."""

import numpy as np


def route(logits, k):
    """(experts [T, k], weights [T, k])."""
    experts, weights = np.zeros((len(logits), k), int), np.zeros((len(logits), k))
    for t, row in enumerate(logits):
        probs = np.exp(row - np.max(row))
        probs = probs / np.sum(probs)
        chosen = sorted(range(len(row)), key=lambda e: (-(row[e] + 0.0), e))[:k]
        experts[t] = chosen
        weights[t] = probs[chosen] / np.sum(probs[chosen])
    return experts, weights


def expert_mlp(x, experts, weights, gate_up, down):
    inner = down.shape[2]
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for e, w in zip(experts[t], weights[t], strict=True):
            gate, up = gate_up[e, :inner] @ x[t], gate_up[e, inner:] @ x[t]
            out[t] += w * (down[e] @ (gate / (1.0 + np.exp(-gate)) * up))
    return out
