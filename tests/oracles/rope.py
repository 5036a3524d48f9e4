"""Half-split rotary embedding in float64, one pair at a time."""

import numpy as np


def angle(position, pair, rotary_dim, theta):
    return float(position) * theta ** (-2.0 * pair / rotary_dim)


def rope_1d(x, positions, theta):
    """x [B, T, heads, D], positions [B, T]."""
    out = np.array(x, np.float64)
    half = x.shape[-1] // 2
    for b, t, h, j in np.ndindex(*x.shape[:3], half):
        a = angle(positions[b, t], j, x.shape[-1], theta)
        _turn(x, out, (b, t, h), j, half, a)
    return out


def mrope_partial(x, positions, theta, rotary_dim, mrope_section):
    """x [B, T, heads, D], positions [B, T, 3]."""
    out = np.array(x, np.float64)
    half = rotary_dim // 2
    for b, t, h, j in np.ndindex(*x.shape[:3], half):
        if j % 3 == 1 and j < 3 * mrope_section[1]:
            axis = 1
        elif j % 3 == 2 and j < 3 * mrope_section[2]:
            axis = 2
        else:
            axis = 0
        a = angle(positions[b, t, axis], j, rotary_dim, theta)
        _turn(x, out, (b, t, h), j, half, a)
    return out


def _turn(x, out, head, j, half, a):
    first, second = x[head][j], x[head][j + half]
    out[head][j] = first * np.cos(a) - second * np.sin(a)
    out[head][j + half] = second * np.cos(a) + first * np.sin(a)
