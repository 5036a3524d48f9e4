"""Attention of a prompt's chunk over paged context and over the chunk's earlier columns.

Implements: ops/softmax_attention.py, `softmax_attention`.
Matches when: W > 32, causal; page and head_dim are powers of two, at least 16.
Assumes: table entries of positions below the frontier are mapped.

A program owns some columns of a query head and walks all keys they see, with the running maximum,
sum and values in registers. Only the last step over the context and the steps along the chunk's
diagonal need masks; the others see everything. Later columns see more, so they start first.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import (
    WHOLE,
    broadcast,
    dot,
    gpu_call,
    is_power_of_two,
    load,
    shared,
    store,
)

_LOG2_E = math.log2(math.e)
ROWS, ACROSS = (slice(None), None), (None, slice(None))  # a vector along either axis


@dataclass(frozen=True)
class Tiles:
    """Columns of a program, keys of a step, which divide them, warps, and steps in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int = 2

    @classmethod
    def of(cls, query, page: int) -> "Tiles":
        """For queries [B, W, Hq, D] and pages of so many positions."""
        if query.dtype == jnp.float32:  # products without tensor cores
            return cls(rows=16, keys=16, num_warps=4)
        return cls(rows=128, keys=min(page, 32), num_warps=8, num_stages=3)


def supports(page: int, dim: int, block_mask) -> bool:
    """Whether the kernel takes such pages, heads and masks."""
    causal = isinstance(block_mask, str) and block_mask == "causal"
    return causal and all(is_power_of_two(n) and n >= 16 for n in (page, dim))


@shared("scale", "interpret", "tiles")
def attend(
    query, block_key, block_value, key_pages, value_pages, table, frontier, live, gate=None, *,
    scale: float, interpret: bool, tiles: Tiles | None = None,
):
    """[B, W, Hq, D] in query's dtype, columns >= live exactly zero. Arguments as in the op."""
    batch, width, heads, _ = query.shape
    tiles = tiles or Tiles.of(query, key_pages.shape[2])
    operands = (query, block_key, block_value, key_pages, value_pages, table, frontier, live)
    operands += () if gate is None else (gate,)
    return gpu_call(
        _kernel(tiles, scale),
        name="softmax_attention_chunk",
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(heads, pl.cdiv(width, tiles.rows), batch),
        in_specs=[WHOLE] * len(operands),
        out_specs=WHOLE,
        interpret=interpret,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(*operands)


def _kernel(tiles: Tiles, scale: float):
    rows, keys = tiles.rows, tiles.keys

    def kernel(
        query, block_key, block_value, key_pages, value_pages, table, frontier, live, *gate_and_out
    ):
        *gate, out = gate_and_out
        _, width, heads, dim = query.shape
        _, num_pages, page, _ = key_pages.shape
        head, row = pl.program_id(0), pl.program_id(2)
        group = head // (heads // block_key.shape[2])
        begin = (pl.num_programs(1) - 1 - pl.program_id(1)) * rows
        count, length = jnp.minimum(live[row], width), frontier[row]
        column = begin + jnp.arange(rows, dtype=jnp.int32)
        alive = jnp.broadcast_to((column < count)[ROWS], (rows, dim))
        across = jnp.arange(dim, dtype=jnp.int32)[ACROSS]
        place = broadcast(row, column[ROWS], head, across)
        queries = load(query.at[place], mask=alive, other=0.0)

        def read(refs, at, seen):
            if seen is None:
                return tuple(load(ref.at[broadcast(*at)]) for ref in refs)
            mask = jnp.broadcast_to(seen[ROWS], (keys, dim))
            return tuple(load(ref.at[broadcast(*at)], mask=mask, other=0.0) for ref in refs)

        def context(masked, index, carry):
            first = index * keys
            number = jnp.clip(table[row, first // page], 0, num_pages - 1)
            offset = jnp.arange(keys, dtype=jnp.int32)
            seen = first + offset < length if masked else None
            at = group, number, ((first & page - 1) + offset)[ROWS], across
            visible = jnp.broadcast_to(seen[ACROSS], (rows, keys)) if masked else None
            return _absorb(
                carry, queries, *read((key_pages, value_pages), at, seen), visible, scale
            )

        def block(masked, index, carry):
            other = index * keys + jnp.arange(keys, dtype=jnp.int32)
            seen = other < count if masked else None
            visible = (other[ACROSS] <= column[ROWS]) & seen[ACROSS] if masked else None
            at = row, other[ROWS], group, across
            return _absorb(
                carry, queries, *read((block_key, block_value), at, seen), visible, scale
            )

        carry = (
            jnp.full((rows,), -jnp.inf, jnp.float32), jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, dim), jnp.float32),
        )
        for step, clear, end in (
            (context, length, length), (block, begin, jnp.minimum(begin + rows, count))
        ):
            busy, clear = begin < count, clear // keys  # steps that need no mask
            for masked, first, stop in ((False, 0, clear), (True, clear, pl.cdiv(end, keys))):
                stop = jnp.where(busy, stop, 0)
                carry = lax.fori_loop(first, stop, functools.partial(step, masked), carry)
        mixed = (carry[2] / jnp.where(carry[1] > 0.0, carry[1], 1.0)[ROWS]).astype(out.dtype)
        if gate:
            opening = load(gate[0].at[place], mask=alive, other=0.0).astype(jnp.float32)
            mixed = (mixed.astype(jnp.float32) * jax.nn.sigmoid(opening)).astype(out.dtype)
        mixed = jnp.where(alive, mixed, jnp.zeros((), out.dtype))
        store(out.at[place], mixed, mask=jnp.broadcast_to((column < width)[ROWS], mixed.shape))

    return kernel


def _absorb(carry, queries, key, value, visible, scale):
    """The running maximum, in powers of two, sum and values after some more keys; None: all seen.

    Values that nobody may see are zero.
    """
    top, total, values = carry
    scores = dot(queries, key.astype(queries.dtype).T) * (scale * _LOG2_E)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    shift = jnp.where(higher > -jnp.inf, higher, 0.0)
    weights, shrink = jnp.exp2(scores - shift[ROWS]), jnp.exp2(top - shift)
    return (
        higher,
        total * shrink + jnp.sum(weights, axis=1),
        values * shrink[ROWS] + dot(weights.astype(value.dtype), value),
    )
