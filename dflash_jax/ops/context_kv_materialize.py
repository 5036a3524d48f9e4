"""Context keys and values of every draft layer from one conditioning feature per position."""

from dflash_jax.ops.norm import plain_rmsnorm
from dflash_jax.ops.rope import rope_1d
from dflash_jax.ops.rounding import round_to


def context_kv_materialize(
    projected, key_norm, positions, *, kv_heads, eps, theta, rounded, key_dtype, value_dtype
):
    """Norms, rotates and rounds the projected context of all draft layers.

    k = rope_1d(plain_head_rmsnorm(k_raw, key_norm), position); v = v_raw.

    Args:                                                          (B rows, T positions, N layers)
      projected: [B, T, N * 2 * Hkv * D] fp32, per layer the K rows then the V rows, unrounded.
      key_norm:  [N, D] fp32.
      positions: [B, T] int32, absolute cache positions in tokens.
      kv_heads, eps, theta: the draft's. Static.
      rounded:   DFlash: k_raw and the normed key are rounded to key_dtype too; DFlash2: only the
        rotated key is. Static.
      key_dtype:   dtype of stored keys, and of v_raw before its second rounding. Static.
      value_dtype: dtype of stored values. Static.
    Returns:
      per layer a pair: key [B, T, Hkv, D] key_dtype, value [B, T, Hkv, D] value_dtype.
    Numeric: the roundings of contracts 4.3 and no others.
    Source: contracts 4.3.
    """
    layers, dim = key_norm.shape
    batch, tokens, width = projected.shape
    if width != layers * 2 * kv_heads * dim:
        raise ValueError(f"projected: expected {layers * 2 * kv_heads * dim} rows, got {width}")
    split = projected.reshape(batch, tokens, layers, 2, kv_heads, dim)

    def layer_rows(layer: int):
        key = split[:, :, layer, 0]
        if rounded:
            key = round_to(key, key_dtype)
        key = plain_rmsnorm(key, key_norm[layer], eps)
        if rounded:
            key = round_to(key, key_dtype)
        key = rope_1d(key, positions, theta).astype(key_dtype)
        value = round_to(split[:, :, layer, 1], key_dtype)
        return key, value.astype(value_dtype)

    return tuple(layer_rows(layer) for layer in range(layers))
