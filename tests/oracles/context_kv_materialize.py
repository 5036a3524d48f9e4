"""Context K/V of every draft layer from the projected conditioning (contracts 4.3).

    k = rope_1d(plain_head_rmsnorm(k_raw, key_norm), t);   v = fp16(bf16(v_raw))

Float64 with the named roundings only: DFlash rounds k after the projection and after the norm,
DFlash2 does neither. The rounding of the stored k belongs to the tolerance; the stored v is exact.
"""

import numpy as np


def round_to(x, dtype):
    """Nearest value of the dtype, ties to even, as float64; fp16 overflows to infinity."""
    x = np.asarray(x, np.float64)
    if dtype == "bfloat16":
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.rint(mantissa * 256.0), exponent - 8)
    with np.errstate(over="ignore"):
        return x.astype(dtype).astype(np.float64)


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


def context_key_value(
    projected, key_norm, positions, *, kv_heads, eps, theta, rounded,
    key_dtype="bfloat16", value_dtype="float16",
):
    """Keys and values of all layers.

    Args:
      projected: [B, T, layers * 2 * Hkv * D]; per layer the K rows, then the V rows.
      key_norm: [layers, D]; positions: [B, T].
      rounded: True for DFlash, False for DFlash2.
      key_dtype: of k, and of v before its second rounding; value_dtype: of the stored v.
    Returns:
      (keys, values), both [layers, B, T, Hkv, D] float64.
    """
    batch, length, _ = projected.shape
    layers, head_dim = key_norm.shape
    raw = projected.astype(np.float64)
    raw = raw.reshape(batch, length, layers, 2, kv_heads, head_dim)
    keys = np.zeros((layers, batch, length, kv_heads, head_dim), np.float64)
    values = np.zeros_like(keys)
    for layer, b, t, h in np.ndindex(layers, batch, length, kv_heads):
        key, value = raw[b, t, layer, :, h]
        key = round_to(key, key_dtype) if rounded else key
        key = head_rmsnorm(key, key_norm[layer].astype(np.float64), eps)
        key = round_to(key, key_dtype) if rounded else key
        keys[layer, b, t, h] = rotate(key, positions[b, t], theta)
        values[layer, b, t, h] = round_to(round_to(value, key_dtype), value_dtype)
    return keys, values
