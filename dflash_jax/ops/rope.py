"""Rotary position embedding, half-split: full width on one axis, partial width on three."""

import jax.numpy as jnp
import numpy as np
from jax import lax

_DIGITS = 4


def rope_1d(x, positions, theta):
    """Rotates every head over its full width by scalar positions.

    With f_j = theta^(-2j/D), angle = position * f_j and h = D/2:
    out[j] = x[j] cos - x[j+h] sin;  out[j+h] = x[j+h] cos + x[j] sin.

    Args:
      x:         [B, T, heads, D] float; read as fp32.
      positions: [B, T] int32, absolute cache positions in tokens.
      theta:     base of the frequencies. Static.
    Returns:
      [B, T, heads, D] fp32.
    Numeric: angles within 2e-6 rad of position * f_j (float64), at every int32 position.
    Raises: ValueError for shapes, an odd D or positions that are not int32.
    Source: contracts 0.3, 4.3 and 5.2 (the draft).
    """
    head_dim = x.shape[-1]
    _check(x, positions, positions.shape == x.shape[:2], head_dim)
    cos, sin = _cos_sin(positions[..., None], head_dim, theta)
    return _rotate(x.astype(jnp.float32), cos, sin)


def mrope_partial(x, positions, *, theta, rotary_dim, mrope_section):
    """Rotates the first rotary_dim dims of every head by three-axis positions.

    Pair j < rotary_dim/2 has f_j = theta^(-2j/rotary_dim) and reads axis 1 if j % 3 == 1 and
    j < 3*mrope_section[1], axis 2 if j % 3 == 2 and j < 3*mrope_section[2], else axis 0. The
    half-split is inside the rotated dims; dims from rotary_dim on pass unchanged.

    Args:
      x:             [B, T, heads, D] float; read as fp32.
      positions:     [B, T, 3] int32 (time, height, width), equal for text.
      theta:         base of the frequencies. Static.
      rotary_dim:    rotated dims, even, at most D. Static.
      mrope_section: pairs of each axis, sum rotary_dim/2. Static.
    Returns:
      [B, T, heads, D] fp32.
    Numeric: as rope_1d.
    Raises: ValueError for shapes, rotary_dim, or sections that the assignment above does not meet.
    Source: contracts 6.3.3 (the target).
    """
    _check(x, positions, positions.shape == (*x.shape[:2], 3), rotary_dim)
    axis_of_pair = interleaved_axes(rotary_dim, mrope_section)
    cos, sin = _cos_sin(positions[..., axis_of_pair], rotary_dim, theta)
    wide = x.astype(jnp.float32)
    rotated = _rotate(wide[..., :rotary_dim], cos, sin)
    return jnp.concatenate([rotated, wide[..., rotary_dim:]], axis=-1)


def turn_fractions(rotary_dim, theta):
    """Byte k of a position turns pair j by byte * [k, j] / 2^32, whole turns dropped.

    The highest byte is signed.

    Args:
      rotary_dim, theta: as in `mrope_partial`. Static.
    Returns:
      [4, rotary_dim / 2] uint32, a NumPy array.
    """
    pair = np.arange(rotary_dim // 2, dtype=np.float64)
    turns_per_token = float(theta) ** (-2.0 * pair / rotary_dim) / (2.0 * np.pi)
    power = 256.0 ** np.arange(_DIGITS)[:, None]
    return (np.rint(np.mod(turns_per_token * power, 1.0) * 2.0**32) % 2.0**32).astype(np.uint32)


def _check(x, positions, shape_fits, rotary_dim):
    if x.ndim != 4:
        raise ValueError(f"x: expected [B, T, heads, D], got {x.shape}")
    if not shape_fits:
        raise ValueError(f"positions: expected [B, T] or [B, T, 3] of {x.shape}, "
                         f"got {positions.shape}")
    if positions.dtype != jnp.int32:
        raise ValueError(f"positions: expected int32, got {positions.dtype}")
    if rotary_dim % 2 or not 0 < rotary_dim <= x.shape[-1]:
        raise ValueError(f"rotary_dim: expected even, in 2..{x.shape[-1]}, got {rotary_dim}")


def interleaved_axes(rotary_dim, mrope_section):
    """The axis of every pair under the assignment of `mrope_partial`: [rotary_dim / 2], NumPy.

    Raises: ValueError if the assignment does not give every axis its pairs.
    """
    pair = np.arange(rotary_dim // 2)
    axes = np.zeros_like(pair)
    for axis in (1, 2):
        axes[(pair % 3 == axis) & (pair < 3 * mrope_section[axis])] = axis
    pairs_by_axis = tuple(np.bincount(axes, minlength=3).tolist())
    if pairs_by_axis != tuple(mrope_section):
        raise ValueError(f"mrope_section: expected {pairs_by_axis} for rotary_dim {rotary_dim}, "
                         f"got {tuple(mrope_section)}")
    return axes


def _cos_sin(positions, rotary_dim, theta):
    """cos and sin of positions * f_j, [..., rotary_dim/2] fp32.

    position * f_j in fp32 is off by 8e-3 rad near 262144, so the product is taken in turns
    (angle / 2 pi) as a 32-bit fraction, where integer overflow is the wanted reduction to one
    turn. A position is split into bytes, the highest signed; byte k times frac(256^k f_j / 2 pi),
    rounded on the host to 2^-32 turns, errs by at most 2^-25 turns. Three bytes reach 2^24 tokens.
    """
    fractions = turn_fractions(rotary_dim, theta)
    turns = jnp.uint32(0)
    for digit, fraction in enumerate(fractions):
        byte = positions >> (8 * digit)
        if digit < _DIGITS - 1:
            byte = byte & 255
        turns = turns + byte.astype(jnp.uint32) * jnp.asarray(fraction)
    signed = lax.bitcast_convert_type(turns, jnp.int32).astype(jnp.float32)
    angle = signed * float(2.0 * np.pi / 2.0**32)
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x, cos, sin):
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
