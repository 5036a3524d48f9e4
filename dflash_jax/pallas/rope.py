"""Rotation angles inside a kernel."""

import jax.numpy as jnp
import numpy as np

# sin(a) / a and cos(a) as polynomials of a^2 on |a| <= pi/4, within an fp32 step (Cephes, sinf).
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1, 1.0)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2, -0.5, 1.0)


def turn(fractions, position):
    """cos and sin of the angles that a position gives to every pair.

    The turned part of a circle is the sum of ops/rope.py, which wraps in int32 as in uint32. Its
    quarter is cut off as an integer, so that no general reduction of an angle is compiled.

    Args:
      fractions: ref [digits, pairs] int32, `turn_fractions` of ops/rope.py.
      position: int32, a scalar or [pairs].
    Returns:
      two fp32 [pairs].
    """
    digits, turns = fractions.shape[0], jnp.int32(0)
    for digit in range(digits):
        byte = position >> (8 * digit)
        if digit < digits - 1:
            byte = byte & 255
        turns = turns + byte * fractions[digit, :]
    quarter = (turns + (1 << 29)) >> 30
    angle = (turns - (quarter << 30)).astype(jnp.float32) * np.float32(2.0 * np.pi / 2.0**32)
    square = angle * angle
    sin, cos = angle * _polynomial(_SIN, square), _polynomial(_COS, square)
    odd = (quarter & 1) == 1
    return (
        _negated(jnp.where(odd, sin, cos), ((quarter + 1) & 2) == 2),
        _negated(jnp.where(odd, cos, sin), (quarter & 2) == 2),
    )


def _polynomial(coefficients, x):
    total = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + np.float32(coefficient)
    return total


def _negated(x, where):
    return jnp.where(where, -x, x)
