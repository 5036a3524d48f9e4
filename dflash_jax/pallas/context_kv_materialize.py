"""Context keys and values of all draft layers, from the projection into storage in one launch.

Implements: ops/context_kv_materialize.py, `store_context`.
Matches when: the head dim is a power of two, at least 2.

A program takes one position and one head of one layer. It adds the projection's parts, rounds,
norms and rotates the key, rounds the value, and writes both where the position lives: at its place
in the layer's ring, or in a page. A position that is not to be stored ends its program before it
reads the projection.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, added, gpu_call, is_power_of_two
from dflash_jax.pallas.rope import turn


@dataclass(frozen=True)
class Rule:
    """What the formula fixes: epsilon of the norm, and the roundings of DFlash (`rounded`)."""

    eps: float
    rounded: bool


def supports(head_dim: int) -> bool:
    """Whether the kernel takes heads of this width."""
    return head_dim >= 2 and is_power_of_two(head_dim)


def store(
    projected, key_norm, fractions, stores, slot, table, start, count, *,
    paged: Sequence[bool], rule: Rule, interpret: bool,
):
    """Writes columns j < count of every row at positions start + j of every layer, in place.

    Args:                                          (B rows, T columns, N layers, D head dim)
      projected: [parts, B, T, N * 2 * Hkv * D] fp32 summands, per layer K rows then V rows.
      key_norm: [N, D] fp32.
      fractions: [digits, D / 2] int32, see ops/rope.py.
      stores: per layer (key, value): rings [slots, Hkv, S, D], pages [Hkv, pages, page, D].
      slot, start, count: [B] int32. table: [B, max_pages] int32.
      paged: per layer, whether its store is pages.
    Returns:
      the stores; the same buffers if the caller donates them.
    """
    parts, batch, tokens, width = projected.shape
    layers, dim = key_norm.shape
    flat = [array for pair in stores for array in pair]
    lines = projected.reshape(parts, batch * tokens, width)
    small = (lines, key_norm, fractions, slot, table, start, count)
    written = gpu_call(
        _kernel(tokens, tuple(paged), rule),
        name="context_kv_materialize",
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat),
        grid=(batch * tokens, width // (2 * layers * dim), layers),
        in_specs=[WHOLE] * (len(small) + len(flat)),
        out_specs=(WHOLE,) * len(flat),
        aliases={len(small) + i: i for i in range(len(flat))},
        interpret=interpret,
        num_warps=1,
    )(*small, *flat)
    return tuple(zip(written[::2], written[1::2], strict=True))


def _kernel(tokens: int, paged: tuple[bool, ...], rule: Rule):
    def kernel(projected, key_norm, fractions, slot, table, start, count, *refs):
        stores = list(zip(*[iter(refs[len(refs) // 2 :])] * 2, strict=True))
        line, head = pl.program_id(0), pl.program_id(1)
        row, column = line // tokens, line % tokens
        live = jnp.minimum(count[row], tokens)
        position = start[row] + column
        places = {
            False: lambda ring: _ring_place(ring, slot[row], position, head, live - column),
            True: lambda pages: _page_place(pages, table, row, position, head),
        }
        for kind, place_of in places.items():
            layers = [layer for layer, is_paged in enumerate(paged) if is_paged == kind]
            if not layers:
                continue
            place, stored = place_of(stores[layers[0]][0])
            for layer in layers:

                @pl.when((pl.program_id(2) == layer) & (column < live) & stored)
                def _(layer=layer, place=place):
                    cos, sin = turn(fractions, position)
                    raw = _halves(projected, line, head, layer, key_norm.shape)
                    _write(stores[layer], place, *raw, key_norm, layer, cos, sin, rule)

    return kernel


def _ring_place(ring, slot, position, head, columns_left):
    """Where a position lives in its ring, and whether: a later column may take its place."""
    slots, _, capacity, _ = ring.shape
    place = slot, head, position % capacity
    return place, (slot >= 0) & (slot < slots) & (columns_left <= capacity)


def _page_place(pages, table, row, position, head):
    """Where a position lives in the pages, and whether it is mapped."""
    _, num_pages, page, _ = pages.shape
    block, last = position // page, table.shape[1] - 1
    page_id = table[row, jnp.minimum(block, last)]
    place = head, page_id, position % page
    return place, (block <= last) & (page_id >= 0) & (page_id < num_pages)


def _halves(projected, line, head, layer, norm_shape):
    """Key and value of a head, each as its first and its second half: the rotation pairs them."""
    layers, dim = norm_shape
    parts, _, width = projected.shape
    heads = width // (2 * layers * dim)

    def half(side, first):
        at = pl.ds(((2 * layer + side) * heads + head) * dim + first, dim // 2)
        return added(projected[part, line, at] for part in range(parts))

    return ([half(side, first) for first in (0, dim // 2)] for side in (0, 1))


def _write(store, place, raw_key, raw_value, key_norm, layer, cos, sin, rule: Rule):
    key, value = store
    dim, half = key_norm.shape[1], key_norm.shape[1] // 2
    halves = [pl.ds(0, half), pl.ds(half, half)]
    if rule.rounded:
        raw_key = [_round(x, key.dtype) for x in raw_key]
    squares = sum(jnp.sum(x * x) for x in raw_key)
    scale = lax.rsqrt(squares / dim + rule.eps)
    low, high = (x * scale * key_norm[layer, at] for x, at in zip(raw_key, halves, strict=True))
    if rule.rounded:
        low, high = _round(low, key.dtype), _round(high, key.dtype)
    rotated = low * cos - high * sin, high * cos + low * sin
    for at, turned, plain in zip(halves, rotated, raw_value, strict=True):
        key[(*place, at)] = turned.astype(key.dtype)
        value[(*place, at)] = _round(plain, key.dtype).astype(value.dtype)


def _round(x, dtype):
    """fp32 values rounded to dtype."""
    return x.astype(dtype).astype(jnp.float32)
