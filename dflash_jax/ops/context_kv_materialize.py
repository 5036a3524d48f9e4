"""Context keys and values of every draft layer from one conditioning feature per position."""

import jax.numpy as jnp

from dflash_jax.ops.dispatch import choose_form
from dflash_jax.ops.kv_write import write_pages, write_ring
from dflash_jax.ops.norm import plain_rmsnorm
from dflash_jax.ops.rope import rope_1d, turn_fractions
from dflash_jax.ops.rounding import round_to
from dflash_jax.pallas import context_kv_materialize as kernel
from dflash_jax.pallas.common import added


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


def store_context(
    projected, key_norm, stores, slot, table, start, count, *, paged, eps, theta, rounded,
    implementation="auto",
):
    """Stores columns j < count at positions start + j of every layer's ring or pages.

    Args:                                                          (B rows, T columns, N layers)
      projected: as in `context_kv_materialize`, or [parts, B, T, ...] whose sum it is.
      key_norm: [N, D] fp32.
      stores: per layer (key, value), as `write_ring` or `write_pages` takes them; their dtypes are
        key_dtype and value_dtype, and all layers of a kind have one shape.
      slot:   [B] int32, ring of each row; an idle row's is out of range.
      table:  [B, max_pages] int32, pages of each row; an unmapped entry is out of range.
      start, count: [B] int32.
      paged:  per layer, True for pages and False for a ring. Static.
      eps, theta, rounded: as in `context_kv_materialize`. Static.
      implementation: "xla", "pallas", "interpret" or "auto": on a GPU the kernel. Static.
    Returns:
      stores with the addressed rows replaced; every other byte is unchanged.
    Raises: ValueError for shapes; NotImplementedError if a named kernel lacks the case.
    Source: contracts 4.3 to 4.5.
    """
    layers, dim = key_norm.shape
    if len(stores) != layers or len(paged) != layers:
        raise ValueError(f"stores, paged: expected {layers}, got {len(stores)}, {len(paged)}")
    (first, _), heads_axis = stores[0], 0 if paged[0] else 1
    kv_heads = first.shape[heads_axis]
    batch, width = slot.shape[0], layers * 2 * kv_heads * dim
    lines = start.shape[0], count.shape[0], table.shape[0]
    if lines != (batch,) * 3:
        raise ValueError(f"start, count, table: expected {batch} rows, got {lines}")
    shape = projected.shape
    if len(shape) not in (3, 4) or (shape[-3], shape[-1]) != (batch, width):
        raise ValueError(f"projected: expected [..., {batch}, T, {width}], got {shape}")
    parts, tokens = projected if len(shape) == 4 else projected[None], shape[-2]
    lacking = None if kernel.supports(dim) else f"heads of a power of two, got {dim}"
    form = choose_form("context_kv_materialize", implementation, lacking, auto_gpu="pallas")
    if form != "xla":
        return kernel.store(
            parts, key_norm, jnp.asarray(turn_fractions(dim, theta).view("int32")), stores,
            slot, table, start, count, paged=paged, rule=kernel.Rule(eps=eps, rounded=rounded),
            interpret=form == "interpret",
        )
    positions = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    rows = context_kv_materialize(
        added(parts), key_norm, positions, kv_heads=kv_heads, eps=eps, theta=theta, rounded=rounded,
        key_dtype=first.dtype, value_dtype=stores[0][1].dtype,
    )

    def written(store, new, is_paged):
        if is_paged:
            return write_pages(store, new, table, start, count)
        return write_ring(store, new, slot, start, count)

    return tuple(
        tuple(written(array, new, is_paged) for array, new in zip(pair, made, strict=True))
        for pair, made, is_paged in zip(stores, rows, paged, strict=True)
    )
