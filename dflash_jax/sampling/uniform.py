"""The stateless generator of all draws: 24 random bits from (seed, position, purpose, sub).

64-bit arithmetic is done on pairs of uint32 (low, high), so that jax needs no 64-bit mode.
"""

import enum

import jax.numpy as jnp
import numpy as np

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_POSITION = 0xD1B54A32D192ED03
_SUB = 0x2545F4914F6CDD1D


class Purpose(enum.IntEnum):
    """What a draw is for; purposes keep the streams of one position apart."""

    PREFILL = 0
    DECODE = 1
    ACCEPT = 2
    CORRECTION = 3
    BONUS = 4
    PROPOSAL = 5


def seed_words(seed):
    """Splits a seed 0 <= seed < 2^64 into uint32 [2] (low, high) on the host.

    Raises: ValueError outside that range; jax without 64-bit mode would keep the low word only.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: expected 0 <= seed < 2^64, got {seed}")
    return np.array([seed & _WORD, seed >> 32], np.uint32)


def uniform(seed, position, purpose, sub):
    """Draws one number in [0, 1) for every key.

    k1 = mix(seed ^ position * c1);  k2 = mix(k1 ^ (purpose << 21) ^ sub * c2), modulo 2^64 with
    mix the splitmix64 finalizer; the result is (k2 >> 40) * 2^-24. No row, lane or slot enters.

    Args:
      seed:     [..., 2] uint32 (low, high).
      position: int, or int32/uint32 [...], in tokens; reinterpreted as uint32.
      purpose:  Purpose, or int32/uint32 [...].
      sub:      int, or int32/uint32 [...]; 0 on a chain.
    Returns:
      fp32 of the broadcast shape of seed[..., 0], position, purpose and sub; a multiple of 2^-24.
    Raises: ValueError for a seed that is not uint32 [..., 2] or keys of other dtypes.
    Source: contracts 5.10 (which draw uses which key).
    """
    if seed.dtype != jnp.uint32 or seed.shape[-1:] != (2,):
        raise ValueError(f"seed: expected uint32 [..., 2], got {seed.dtype} {seed.shape}")
    position, purpose, sub = _u32("position", position), _u32("purpose", purpose), _u32("sub", sub)
    key = _xor((seed[..., 0], seed[..., 1]), _multiply((position, _zero(position)), _POSITION))
    shifted = (purpose << np.uint32(21), purpose >> np.uint32(11))
    key = _xor(_xor(_mix(key), shifted), _multiply((sub, _zero(sub)), _SUB))
    top_bits = _mix(key)[1] >> np.uint32(8)
    return top_bits.astype(jnp.float32) * jnp.float32(2.0**-24)


def _u32(name, value):
    if isinstance(value, int):
        return jnp.uint32(int(value) & _WORD)
    if value.dtype not in (jnp.int32, jnp.uint32):
        raise ValueError(f"{name}: expected int32 or uint32, got {value.dtype}")
    return value.astype(jnp.uint32)


def _zero(word):
    return jnp.zeros_like(word)


def _words(constant):
    return np.uint32(constant & _WORD), np.uint32(constant >> 32)


def _mix(x):
    x = _add(x, _GOLDEN)
    x = _multiply(_xor(x, _shift_right(x, 30)), _MIX_1)
    x = _multiply(_xor(x, _shift_right(x, 27)), _MIX_2)
    return _xor(x, _shift_right(x, 31))


def _xor(a, b):
    return a[0] ^ b[0], a[1] ^ b[1]


def _shift_right(a, bits):
    low = (a[0] >> np.uint32(bits)) | (a[1] << np.uint32(32 - bits))
    return low, a[1] >> np.uint32(bits)


def _add(a, constant):
    low, high = _words(constant)
    total = a[0] + low
    return total, a[1] + high + (total < low).astype(jnp.uint32)


def _multiply(a, constant):
    low, high = _words(constant)
    return a[0] * low, _high_word(a[0], low) + a[0] * high + a[1] * low


def _high_word(a, b):
    """The upper 32 bits of the 64-bit product of two uint32, from products of 16-bit halves."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a_low, a_high, b_low, b_high = a & mask, a >> half, b & mask, b >> half
    middle = a_high * b_low + ((a_low * b_low) >> half)
    carry = ((middle & mask) + a_low * b_high) >> half
    return a_high * b_high + (middle >> half) + carry
