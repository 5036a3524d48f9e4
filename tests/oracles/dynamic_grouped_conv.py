"""The dynamic grouped convolution of DFlash2 in float64, from contracts 5.5, element by element."""

import numpy as np


def normed(x, weight, eps):
    out = np.zeros(x.shape)
    for b, i in np.ndindex(x.shape[:2]):
        out[b, i] = weight * x[b, i] / np.sqrt(np.mean(x[b, i] ** 2) + eps)
    return out


def increments(n, projection, taps):
    """[B, W, 2, taps, groups]; projection row = (side*taps + tap)*groups + group."""
    groups = projection.shape[0] // (2 * taps)
    out = np.zeros((*n.shape[:2], 2, taps, groups))
    for b, i, s, t, g in np.ndindex(out.shape):
        out[b, i, s, t, g] = np.sum(projection[(s * taps + t) * groups + g] * n[b, i])
    return out


def apply_taps(x, base, delta):
    group_width = x.shape[2] // delta.shape[3]
    out = np.zeros(x.shape)
    for b, i, h in np.ndindex(x.shape):
        for t in range(base.shape[0]):
            if i >= t:
                out[b, i, h] += (base[t, h] + delta[b, i, t, h // group_width]) * x[b, i - t, h]
    return out


def prepare(x, norm_weight, base, projection, eps):
    """(prepared, finish_delta), both unrounded."""
    n = normed(x, norm_weight, eps)
    d = increments(n, projection, base.shape[1])
    return apply_taps(n, base[0], d[:, :, 0]), d[:, :, 1]


def finish(residual, z, base, finish_delta):
    return residual + apply_taps(z, base[1], finish_delta)
