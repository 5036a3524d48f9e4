"""Softmax over several key ranges: partial sums per range, then one exact combination.

A range (context pages, a ring, the block's own columns) contributes the running maximum, the sum of
exponentials and the weighted values; `merge` joins two of them. Each range may hold its values in
its own dtype, which is how fp16 context values meet bf16 block values in one softmax.
"""

import jax.numpy as jnp
from flax import struct
from jax import lax

from dflash_jax.ops.dispatch import choose_form


@struct.dataclass
class Partial:
    """Unnormalised attention over one range of keys.

    maximum, total: [B, Hkv, M] fp32, largest score (-inf when nothing is visible), sum of exp.
    values:         [B, Hkv, M, D] fp32, sum of exp times value.
    """

    maximum: jnp.ndarray
    total: jnp.ndarray
    values: jnp.ndarray


def check_block(query, block_key, kv_heads: int) -> None:
    """Raises ValueError unless keys [B, W, Hkv, D] go with queries [B, W, Hq, D]."""
    batch, width, heads, dim = query.shape
    if heads % kv_heads or block_key.shape != (batch, width, kv_heads, dim):
        raise ValueError(
            f"block_key: expected {(batch, width, kv_heads, dim)} with {heads} query heads a "
            f"multiple of {kv_heads}, got {block_key.shape}"
        )


def attention_form(op: str, implementation: str, lacking: str | None, query) -> str:
    """`choose_form` of an attention: "auto" leaves wide fp32 heads, whose tiles would spill
    registers, to XLA."""
    narrow = query.dtype.itemsize == 2 or query.shape[-1] <= 64
    return choose_form(op, implementation, lacking, auto_gpu="pallas" if narrow else "xla")


def fold_heads(query, kv_heads: int):
    """[B, W, Hq, D] -> [B, Hkv, G*W, D]: the G query heads that read one KV head become rows."""
    batch, width, heads, dim = query.shape
    grouped = query.reshape(batch, width, kv_heads, heads // kv_heads, dim)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)


def unfold_heads(folded, width: int):
    """Inverse of `fold_heads`: [B, Hkv, G*W, D] -> [B, W, Hq, D]."""
    batch, kv_heads, rows, dim = folded.shape
    grouped = folded.reshape(batch, kv_heads, rows // width, width, dim)
    return grouped.transpose(0, 3, 1, 2, 4).reshape(batch, width, -1, dim)


def attend(query, key, value, visible, scale: float) -> Partial:
    """Partial attention of folded queries to one range of T keys.

    Args:
      query:   [B, Hkv, M, D] with M = G * W (see `fold_heads`).
      key, value: [B, Hkv, T, D]; rows that no query sees may hold NaN.
      visible: [B, W, T] bool, the same for every head.
      scale:   score multiplier. Static.
    Numeric: scores, exp and sums in fp32; value product with probabilities in the value's dtype.
    """
    groups = query.shape[2] // visible.shape[1]
    mask = jnp.tile(visible, (1, groups, 1))[:, None]
    # Dead value rows are zeroed before the product: 0 * NaN is NaN.
    seen = jnp.any(visible, axis=1)[:, None, :, None]
    value = jnp.where(seen, value, jnp.zeros((), value.dtype))
    scores = _dot("bhmd,bhtd->bhmt", query, key.astype(query.dtype)) * scale
    scores = jnp.where(mask, scores, -jnp.inf)
    # A shift of the exponents: it cancels, so no gradient passes through it.
    maximum = lax.stop_gradient(jnp.max(scores, axis=-1))
    shift = jnp.where(jnp.isfinite(maximum), maximum, 0.0)
    weights = jnp.where(mask, jnp.exp(scores - shift[..., None]), 0.0)
    values = _dot("bhmt,bhtd->bhmd", weights.astype(value.dtype), value)
    return Partial(maximum=maximum, total=jnp.sum(weights, axis=-1), values=values)


def merge(first: Partial, second: Partial) -> Partial:
    """The partial attention over two disjoint ranges."""
    maximum = jnp.maximum(first.maximum, second.maximum)
    peak = jnp.where(jnp.isfinite(maximum), maximum, 0.0)
    left, right = jnp.exp(first.maximum - peak), jnp.exp(second.maximum - peak)
    return Partial(
        maximum=maximum,
        total=first.total * left + second.total * right,
        values=first.values * left[..., None] + second.values * right[..., None],
    )


def normalise(part: Partial):
    """[B, Hkv, M, D] fp32 attention; a row that sees nothing is exactly 0."""
    return part.values / jnp.where(part.total > 0.0, part.total, 1.0)[..., None]


def _dot(spec: str, left, right):
    exact = left.dtype == jnp.float32
    return jnp.einsum(
        spec,
        left,
        right,
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def block_visibility(block_mask, batch: int, width: int, live):
    """The [B, W, W] bool mask inside a block, cut to live rows and columns.

    block_mask: "causal", "full", or a bool array [B, W, W] (row = query column, column = key).
    live:       [B] int32, block columns that exist.
    """
    if isinstance(block_mask, str):
        if block_mask not in ("causal", "full"):
            raise ValueError(f"block_mask: expected 'causal', 'full' or array, got {block_mask!r}")
        square = jnp.ones((width, width), bool)
        mask = jnp.broadcast_to(
            jnp.tril(square) if block_mask == "causal" else square, (batch, width, width)
        )
    else:
        mask = block_mask
    alive = jnp.arange(width)[None, :] < live[:, None]
    return mask & alive[:, None, :] & alive[:, :, None]
