"""Context K/V of every draft layer from the conditioning c_t (contracts 4.3).

    k = rope_1d(plain_head_rmsnorm(W_ck c_t, key_norm), t);   v = fp16(bf16(W_cv c_t))

Float64 with the named roundings only: DFlash rounds k to bf16 after the projection and after the
norm, DFlash2 does neither. The rounding of the stored k belongs to the tolerance.
"""

import numpy as np


def bfloat16(x):
    """Nearest bf16 value of a float64, ties to even (normal range)."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.rint(mantissa * 256.0), exponent - 8)


def head_rmsnorm(x, weight, eps):
    """weight * x / sqrt(mean(x^2) + eps) of one head [D]."""
    return weight * x / np.sqrt(np.mean(x * x) + eps)


def rotate(x, position, theta):
    """Half-split rotation of one head [D] over all its dimensions."""
    half = x.shape[0] // 2
    out = np.zeros_like(x)
    for j in range(half):
        angle = float(position) * float(theta) ** (-2.0 * j / x.shape[0])
        out[j] = x[j] * np.cos(angle) - x[j + half] * np.sin(angle)
        out[j + half] = x[j + half] * np.cos(angle) + x[j] * np.sin(angle)
    return out


def context_key_value(conditioning, kernel, key_norm, positions, *, kv_heads, eps, theta, rounded):
    """Keys and values of all layers.

    Args:
      conditioning: [B, T, H].
      kernel: [layers * 2 * Hkv * D, H]; per layer the K rows, then the V rows, heads outermost.
      key_norm: [layers, D]; positions: [B, T].
      rounded: True for DFlash (bf16 after projection and norm), False for DFlash2.
    Returns:
      (keys float64, values fp16), both [layers, B, T, Hkv, D].
    """
    batch, length, _ = conditioning.shape
    layers, head_dim = key_norm.shape
    raw = np.einsum("bth,oh->bto", conditioning.astype(np.float64), kernel.astype(np.float64))
    raw = raw.reshape(batch, length, layers, 2, kv_heads, head_dim)
    keys = np.zeros((layers, batch, length, kv_heads, head_dim), np.float64)
    values = np.zeros(keys.shape, np.float16)
    boundary = bfloat16 if rounded else (lambda x: x)
    for layer, b, t, h in np.ndindex(layers, batch, length, kv_heads):
        k = boundary(raw[b, t, layer, 0, h])
        k = boundary(head_rmsnorm(k, key_norm[layer].astype(np.float64), eps))
        keys[layer, b, t, h] = rotate(k, positions[b, t], theta)
        values[layer, b, t, h] = bfloat16(raw[b, t, layer, 1, h]).astype(np.float16)
    return keys, values
