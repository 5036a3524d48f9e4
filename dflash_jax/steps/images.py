"""State images: whole slots and pages copied on the device, to the host and back.

An image is everything a sequence needs at one frontier F with F_ctx = F: the GDN states, the
continuation and the draft rings of a slot, and the pages that cover [0, F). The numbers of the
sequence (ids, counts, budget, seed) are known to the host and return with `resume`. Pending
features are never part of an image: `materialize` comes first.

A copy is a read, which makes new arrays, and then a write in place: in one program XLA might copy
the pools to order the two. Source: contracts 3.2 and 10.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dflash_jax.ops.indices import DROP
from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.state.gdn import GdnState
from dflash_jax.state.pages import KVPages
from dflash_jax.state.ring import KVRing

PAGE_GROUP = 16  # pages that one call moves between device and host


@struct.dataclass
class SlotImage:
    """One slot: the arrays of `GdnState`, `KVRing` and the continuation without their slot axis."""

    gdn: tuple[GdnState, ...]
    rings: tuple[KVRing, ...]
    continuation: jax.Array


@struct.dataclass
class PageGroup:
    """Some pages of both pools: key and value [Hkv, n, page, D] of every layer."""

    target: tuple[KVPages, ...]
    draft: tuple[KVPages, ...]


@struct.dataclass
class Resumption:
    """What the host knows of a sequence that enters a lane at a frontier above 0.

    frontier:   [B] int32, F; F_ctx is the same.
    anchor:     [B] int32, the token at position F; any value when a prompt goes on from here.
    rope_delta, remaining, capacity: [B] int32, as in `Admission`.
    seed:       [B, 2] uint32.
    prompt:     [B, C] int32, ids of the prompt processed so far; `prompt_tokens` [B] of them count.
    published:  [B, C] int32, ids published, the anchor included; `published_tokens` [B] count.
    target_pages, draft_pages: [B, max_pages] int32; an unmapped entry is the page count.
    """

    frontier: jax.Array
    anchor: jax.Array
    rope_delta: jax.Array
    remaining: jax.Array
    capacity: jax.Array
    seed: jax.Array
    prompt: jax.Array
    prompt_tokens: jax.Array
    published: jax.Array
    published_tokens: jax.Array
    target_pages: jax.Array
    draft_pages: jax.Array


@functools.partial(jax.jit, donate_argnames="state")
def resume(state: DecodeState, rows: Rows, resumption: Resumption) -> DecodeState:
    """Sets the numbers and pages of each row's lane; its slot and pages hold the image already.

    Donates `state`. Counts and prompt marks follow from the ids alone.
    """
    live = state.sequence.live(rows.lane)
    sequence = state.sequence.put(
        rows.lane,
        live,
        frontier=resumption.frontier,
        context_frontier=resumption.frontier,
        anchor=resumption.anchor,
        rope_delta=resumption.rope_delta,
        remaining=resumption.remaining,
        capacity=resumption.capacity,
        counts=jnp.zeros((), jnp.int32),
        prompt_seen=jnp.zeros((), bool),
        seed=resumption.seed,
    )
    sequence = sequence.mark_prompt(rows.lane, resumption.prompt, resumption.prompt_tokens)
    sequence = sequence.count_tokens(
        rows.lane, resumption.published, resumption.published_tokens
    )
    tables = {
        "target_table": (state.target_table, resumption.target_pages),
        "draft_table": (state.draft_table, resumption.draft_pages),
    }
    mapped = {
        name: table.replace(ids=table.ids.at[rows.lane].set(pages, **DROP))
        for name, (table, pages) in tables.items()
    }
    return state.replace(sequence=sequence, **mapped)


@jax.jit
def read_slot(state: DecodeState, slot) -> SlotImage:
    """A copy of one slot, dead bytes included; `slot` is a scalar int32."""
    image = SlotImage(
        gdn=state.target.gdn, rings=state.context.rings, continuation=state.target.continuation
    )
    return jax.tree.map(lambda x: x[jnp.minimum(slot, x.shape[0] - 1)], image)


@jax.jit
def read_pages(state: DecodeState, target_ids, draft_ids) -> PageGroup:
    """Copies of pages: ids [n] int32 of either pool; what an id out of range gives is dead."""

    def taken(ids):
        return lambda x: x[:, jnp.minimum(ids, x.shape[1] - 1)]

    return PageGroup(
        target=jax.tree.map(taken(target_ids), state.target.kv),
        draft=jax.tree.map(taken(draft_ids), state.context.pages),
    )


@functools.partial(jax.jit, donate_argnames="state")
def write_slot(state: DecodeState, slot, image: SlotImage) -> DecodeState:
    """Puts an image into a slot. Donates `state`."""

    def put(x, one):
        return x.at[slot].set(one, **DROP)

    target = state.target.replace(
        gdn=jax.tree.map(put, state.target.gdn, image.gdn),
        continuation=put(state.target.continuation, image.continuation),
    )
    rings = jax.tree.map(put, state.context.rings, image.rings)
    return state.replace(target=target, context=state.context.replace(rings=rings))


@functools.partial(jax.jit, donate_argnames="state")
def write_pages(state: DecodeState, target_ids, draft_ids, group: PageGroup) -> DecodeState:
    """Puts pages into the pools; ids [n] int32, out of range ones drop. Donates `state`."""

    def put(ids):
        return lambda x, some: x.at[:, ids].set(some, **DROP)

    target = jax.tree.map(put(target_ids), state.target.kv, group.target)
    draft = jax.tree.map(put(draft_ids), state.context.pages, group.draft)
    return state.replace(
        target=state.target.replace(kv=target), context=state.context.replace(pages=draft)
    )


def page_groups(target_pages, draft_pages, num_pages: int):
    """The ids of an image's pages as (target, draft) int32 arrays of PAGE_GROUP ids each.

    Missing ids are `num_pages`; a draft without full layers has none. There is at least one group.
    """
    for first in range(0, max(len(target_pages), len(draft_pages), 1), PAGE_GROUP):
        group = []
        for pages in (target_pages, draft_pages):
            ids = np.full((PAGE_GROUP,), num_pages, np.int32)
            some = pages[first : first + PAGE_GROUP]
            ids[: len(some)] = some
            group.append(ids)
        yield tuple(group)
