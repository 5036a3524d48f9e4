"""Norms in float64, one row at a time."""

import numpy as np


def plain_rmsnorm(x, weight, eps):
    return _rows(x, lambda row: weight * row / np.sqrt(np.mean(row**2) + eps))


def offset_rmsnorm(x, weight, eps):
    return _rows(x, lambda row: (1.0 + weight) * row / np.sqrt(np.mean(row**2) + eps))


def gated_rmsnorm(x, gate, weight, eps):
    return plain_rmsnorm(x, weight, eps) * gate / (1.0 + np.exp(-gate))


def l2norm(x):
    return _rows(x, lambda row: row / np.sqrt(np.sum(row**2) + 1e-6))


def _rows(x, rule):
    out = np.zeros(x.shape)
    for index in np.ndindex(x.shape[:-1]):
        out[index] = rule(x[index])
    return out
