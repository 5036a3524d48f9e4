"""Starts a sequence: empties its state, runs the prompt in chunks, draws the first token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from dflash_jax.ops.indices import DROP
from dflash_jax.ops.vocab import public_argmax
from dflash_jax.sampling.distribution import adjusted_logits, target_distribution
from dflash_jax.sampling.order import inverse_cdf
from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.sampling.uniform import Purpose, uniform
from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.state.gdn import GdnState
from dflash_jax.steps.materialize import materialize_features
from dflash_jax.steps.models import Models, Params, target_call
from dflash_jax.target import TargetColumns


@struct.dataclass
class Admission:
    """What a request fixes when it enters a lane.

    remaining:  [B] int32, outputs it may publish.
    capacity:   [B] int32, positions it may occupy.
    rope_delta: [B] int32, next rotation position minus token count at the prompt's end; 0 for text.
    seed:       [B, 2] uint32, (low, high).
    target_pages, draft_pages: [B, max_pages] int32; an unmapped entry is the page count.
    """

    remaining: jax.Array
    capacity: jax.Array
    rope_delta: jax.Array
    seed: jax.Array
    target_pages: jax.Array
    draft_pages: jax.Array


@struct.dataclass
class PrefillChunk:
    """The next T prompt positions of each row; columns >= length are dead.

    tokens:     [B, T] int32.
    length:     [B] int32, live columns, 0..T.
    positions:  [B, T, 3] int32, rotation positions (time, height, width).
    embeddings: [B, T, H] rows to use instead of the embedding where `replaced`, or [B, 0, H] when
      nothing is replaced.
    replaced:   [B, T] bool (vision placeholders), or [B, 0].
    """

    tokens: jax.Array
    length: jax.Array
    positions: jax.Array
    embeddings: jax.Array
    replaced: jax.Array

    @classmethod
    def text(cls, models: Models, tokens, length, frontier) -> "PrefillChunk":
        """A chunk without replaced rows whose rotation positions are the cache positions."""
        tokens, frontier = np.asarray(tokens, np.int32), np.asarray(frontier, np.int32)
        position = frontier[:, None] + np.arange(tokens.shape[1], dtype=np.int32)
        empty = (tokens.shape[0], 0, models.target.hidden)
        return cls(
            tokens=jnp.array(tokens),
            length=jnp.array(np.asarray(length, np.int32)),
            positions=jnp.array(np.repeat(position[:, :, None], 3, axis=2)),
            embeddings=jnp.zeros(empty, models.run.dtypes.activation_dtype),
            replaced=jnp.zeros(empty[:2], bool),
        )


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def begin(models: Models, state: DecodeState, rows: Rows, admission: Admission) -> DecodeState:
    """Gives each row an empty sequence: frontiers 0, zero GDN images, its pages. ✎ Donates `state`.

    Rings, pages and pending features keep their old bytes: they are dead until written again.
    """
    del models
    live = state.sequence.live(rows.lane)
    zero = jnp.zeros_like(admission.remaining)
    sequence = state.sequence.put(
        rows.lane,
        live,
        frontier=zero,
        context_frontier=zero,
        anchor=zero,
        rope_delta=admission.rope_delta,
        remaining=admission.remaining,
        capacity=admission.capacity,
        counts=jnp.zeros((), jnp.int32),
        prompt_seen=jnp.zeros((), bool),
        seed=admission.seed,
    )

    def emptied(image: GdnState) -> GdnState:
        blank = jax.tree.map(jnp.zeros_like, image.rows(rows.write_slot))
        return image.put(rows.write_slot, blank, live.astype(jnp.int32))

    target = state.target.replace(gdn=tuple(emptied(image) for image in state.target.gdn))
    tables = {
        "target_table": (state.target_table, admission.target_pages),
        "draft_table": (state.draft_table, admission.draft_pages),
    }
    mapped = {
        name: table.replace(ids=table.ids.at[rows.lane].set(pages, **DROP))
        for name, (table, pages) in tables.items()
    }
    return state.replace(sequence=sequence, target=target, **mapped)


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def prefill_chunk(
    models: Models, params: Params, state: DecodeState, rows: Rows, chunk: PrefillChunk
) -> DecodeState:
    """Runs the next prompt positions through the target and into the context. ✎ Donates `state`.

    Requires F_ctx = F. Afterwards both have grown by the chunk's length and the continuation is the
    hidden of its last column. The result does not depend on how a prompt is cut, up to rounding.

    Source: contracts 4.5 and 10.
    """
    before = state.sequence.gather(rows.lane)
    chunk = chunk.replace(length=jnp.where(state.sequence.live(rows.lane), chunk.length, 0))
    table = state.target_table.rows(rows.lane)
    columns = TargetColumns.chained(
        positions=chunk.positions, frontier=before.frontier, live=chunk.length, table=table,
        slot=rows.read_slot,
    )
    embedded = target_call(models, params, "embed", chunk.tokens)
    if chunk.replaced.shape[1]:
        supplied = chunk.embeddings.astype(embedded.dtype)
        embedded = jnp.where(chunk.replaced[:, :, None], supplied, embedded)
    output = target_call(models, params, "prefill", embedded, columns, state.target)
    # Orders every read of the state before the writes below: otherwise XLA copies the pools.
    output = lax.optimization_barrier(output)

    kv = tuple(
        pages.write(key, value, table, before.frontier, chunk.length)
        for pages, (key, value) in zip(state.target.kv, output.kv_rows, strict=True)
    )
    gdn = tuple(
        layer.put(rows.write_slot, image, chunk.length)
        for layer, image in zip(state.target.gdn, output.gdn, strict=True)
    )
    last = jnp.maximum(chunk.length - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(output.hidden, last, axis=1)[:, 0]
    slot = jnp.where(chunk.length > 0, rows.write_slot, state.target.continuation.shape[0])
    target = state.target.replace(
        kv=kv, gdn=gdn, continuation=state.target.continuation.at[slot].set(hidden, **DROP)
    )
    sequence = state.sequence.mark_prompt(rows.lane, chunk.tokens, chunk.length)
    sequence = sequence.put(
        rows.lane, chunk.length > 0, frontier=before.frontier + chunk.length
    )
    state = state.replace(target=target, sequence=sequence)
    return materialize_features(
        models, params, state, rows, output.features, before.frontier, chunk.length
    )


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def first_token(
    models: Models, params: Params, state: DecodeState, rows: Rows, sampling: SamplingArrays
) -> tuple[DecodeState, jax.Array]:
    """Chooses the token after the prompt from the continuation. ✎ Donates `state`.

    It becomes the anchor, is counted, and is charged to the budget like any published token.

    Returns:
      the state, and fault [B] bool: the row has no finite candidate (NaN logits, or a mask that
      forbids everything). Its anchor means nothing and must not be published.
    Source: contracts 10 and 9.5.
    """
    live = state.sequence.live(rows.lane)
    continuation = state.target.continuation
    hidden = continuation[jnp.minimum(rows.write_slot, continuation.shape[0] - 1)]
    logits = target_call(models, params, "logits", hidden)[:, None]
    before = state.sequence.gather(rows.lane)
    token, finite = _choose(models, logits, before, sampling)
    remaining = before.remaining
    sequence = state.sequence.count_tokens(rows.lane, token[:, None], live.astype(jnp.int32))
    sequence = sequence.put(rows.lane, live, anchor=token, remaining=remaining - 1)
    return state.replace(sequence=sequence), live & ~finite


def _choose(models: Models, logits, before, sampling: SamplingArrays):
    """The token after the prompt, [B] int32, and whether any is finite, from logits [B, 1, V]."""
    public = models.target.public_vocab
    if sampling.greedy_only:
        best = public_argmax(logits[:, 0], public)
        return best.index, best.finite
    drafts = jnp.zeros((len(logits), 0), jnp.int32)
    adjusted = adjusted_logits(logits, sampling, before.counts, before.prompt_seen, drafts)
    best = public_argmax(adjusted[:, 0], public)
    law = target_distribution(adjusted, sampling, models.run.max_candidates)
    u = uniform(before.seed, before.frontier, Purpose.PREFILL, 0)
    drawn, _ = inverse_cdf(law.weights[:, 0], u)
    return jnp.where(sampling.temperature > 0.0, drawn, best.index), best.finite
