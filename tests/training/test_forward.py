"""The training forward is the inference forward: same masks, same positions, same labels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.draft import DraftColumns, block_positions
from dflash_jax.ops.anchored_attention import anchored_attention
from dflash_jax.ops.sliding_window_attention import sliding_window_attention
from dflash_jax.ops.softmax_attention import softmax_attention
from dflash_jax.state.ring import KVRing
from dflash_jax.steps.models import draft_call
from dflash_jax.training.forward import (
    block_labels,
    draft_forward,
    random_anchors,
    random_proposals,
    target_forward,
    target_logits,
)
from tests.steps.harness import Session
from tests.training import scenes

FP32 = dict(rtol=2e-4, atol=2e-4)


@functools.partial(jax.jit, static_argnums=0)
def blocks(name, params, ids, features, anchors, proposals):
    return draft_forward(
        scenes.DRAFTS[name], scenes.DTYPES, params.draft, params.target["embedding"], ids,
        features, anchors, draft_tokens=scenes.K, proposals=proposals,
    )


# Called eagerly, each operation in them would be a program of its own to compile.
whole_pass = jax.jit(target_forward, static_argnames=("config", "dtypes", "capture"))
anchored = jax.jit(anchored_attention, static_argnames=("window", "causal", "scale"))
softmax = jax.jit(softmax_attention, static_argnames=("block_mask", "scale"))
sliding = jax.jit(sliding_window_attention, static_argnames=("window", "causal", "scale"))


def inference_hidden(session, proposals):
    """Mask hidden of lane 0, as `propose` computes it from the state's context for that P."""
    slot, live = session.rows([0]).write_slot, jnp.full((1,), proposals + 1, jnp.int32)
    return mask_hidden(session.models, session.params, session.state, slot, live)


@functools.partial(jax.jit, static_argnums=0)
def mask_hidden(models, params, state, slot, live):
    frontier = state.sequence.frontier[:1]
    width = models.run.block_width
    masks = jnp.full((1, scenes.K), models.draft.mask_token_id, jnp.int32)
    block = jnp.concatenate([state.sequence.anchor[:1, None], masks], axis=1)
    columns = DraftColumns(
        positions=block_positions(frontier, width, live), frontier=frontier, live=live,
        slot=slot, table=state.draft_table.ids[:1],
    )
    embedded = draft_call(models, params, "embed", block, params.target["embedding"])
    return draft_call(models, params, "block_hidden", embedded, columns, state.context).hidden


@pytest.mark.parametrize("name", scenes.DRAFTS)
def test_the_training_forward_equals_the_block_that_propose_runs(name):
    """Prompts shorter than the window, longer than it, and longer than a ring twice over."""
    models = scenes.models(name)
    params = scenes.pair(name, scenes.shaken_draft(name))
    assert models.draft.window == 12
    for length in (5, 30):
        session = Session(models, params)
        session.admit({0: scenes.tokens()[0, :length].tolist()}, budget=9, chunk=scenes.PROMPT)
        ledger = session.lanes[0].ledger
        ids = np.zeros((1, scenes.LENGTH), np.int32)
        ids[0, : len(ledger)] = ledger
        # Other anchors of the sequence, before and behind, must not disturb the block at F.
        anchors = jnp.array([[2, length, length + 4]], jnp.int32)
        features = scenes.features(models.draft, ids)
        seen = []
        # A block as long as the run's, and DFlash's at the end of a budget; DFlash2 has no other.
        for masks in (scenes.K, 1) if name == "dflash" else (scenes.K,):
            proposals = jnp.array([[scenes.K, masks, scenes.K]], jnp.int32)
            found = blocks(name, params, jnp.asarray(ids), features, anchors, proposals)
            expected = inference_hidden(session, masks)
            np.testing.assert_allclose(found[:, 1, :masks], expected[:, :masks], **FP32)
            assert not np.allclose(found[:, 2, :masks], expected[:, :masks], **FP32)
            seen.append(expected[:, :1])
        if len(seen) > 1:
            assert not np.allclose(*seen, **FP32)  # the number of masks is no detail


def test_a_target_forward_equals_prefill_and_its_features():
    """One pass over a sequence and the library's chunks give the same next token and context."""
    models = scenes.models("dflash")
    params = scenes.pair("dflash", scenes.shaken_draft("dflash"))
    prompt = scenes.tokens()[:1, :30]
    session = Session(models, params)
    session.admit({0: prompt[0].tolist()}, budget=9, chunk=7)
    output = whole_pass(
        scenes.TARGET, scenes.DTYPES, params.target, jnp.asarray(prompt), capture=(1, 3, 0)
    )
    logits = target_logits(scenes.TARGET, params.target, output.hidden[0, -1])
    public = logits[: scenes.TARGET.public_vocab]
    assert int(jnp.argmax(public)) == session.lanes[0].ledger[-1]
    position = jnp.arange(30, dtype=jnp.int32)[None]
    rows = draft_call(models, params, "context_kv", output.features, position)
    page = session.state.context.pages[0].key[:, session.state.draft_table.ids[0, 1]]
    np.testing.assert_allclose(jnp.moveaxis(rows[1][0][0], 1, 0)[:, 16:30], page[:, :14], **FP32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 6, 9])
def test_anchored_attention_equals_ring_and_pages(window, causal):
    rng = np.random.default_rng(1)
    sequences, blocks_each, width, heads, kv, dim, length = 2, 3, 4, 4, 2, 8, 24

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    rows = sequences * blocks_each
    query = draw(rows, width, heads, dim)
    own_key, own_value = draw(rows, width, kv, dim), draw(rows, width, kv, dim)
    key, value = draw(sequences, length, kv, dim), draw(sequences, length, kv, dim)
    frontier = jnp.array([0, 3, 20, 1, 9, 24], jnp.int32)
    live = jnp.array([4, 4, 2, 4, 0, 4], jnp.int32)
    found = anchored(
        query, own_key, own_value, key, value, frontier, live,
        window=window, causal=causal, scale=0.3,
    )
    own = jnp.repeat(jnp.arange(sequences), blocks_each)
    if window is None:
        pages = [jnp.moveaxis(x, 2, 0) for x in (key, value)]
        expected = softmax(
            query, own_key, own_value, *pages, own[:, None], frontier, live,
            block_mask="causal" if causal else "full", scale=0.3,
        )
    else:
        ring = KVRing.zeros(rows, kv, window, dim, jnp.float32, jnp.float32).write(
            key[own], value[own], jnp.arange(rows), jnp.zeros_like(frontier), frontier
        )
        expected = sliding(
            query, own_key, own_value, ring.key, ring.value, jnp.arange(rows), frontier, live,
            window=window, causal=causal, scale=0.3,
        )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a11_the_label_of_a_mask_is_the_token_at_its_position():
    ids = jnp.arange(40, dtype=jnp.int32)[None] * 10
    labels = block_labels(ids, jnp.array([[5, 30]], jnp.int32), 3)
    # Anchor at position 5 is token 50; masks stand at 6, 7, 8.
    assert labels.tolist() == [[[60, 70, 80], [310, 320, 330]]]


def test_anchors_stay_in_their_range_and_spread_over_it():
    drawn = np.asarray(random_anchors(jax.random.key(0), 50, 8, 16, 40))
    assert drawn.min() >= 16 and drawn.max() <= 40
    assert {16, 40} <= set(drawn.ravel().tolist())
    assert all(len(set(row)) == 8 for row in drawn.tolist())


def test_a_share_of_blocks_gets_fewer_masks():
    drawn = np.asarray(random_proposals(jax.random.key(0), (4000,), 7, 0.25))
    assert set(drawn.tolist()) == {1, 2, 3, 4, 5, 6, 7}
    assert abs(np.mean(drawn < 7) - 0.25) < 0.03
    assert np.all(np.asarray(random_proposals(jax.random.key(0), (400,), 7, 0.0)) == 7)
    assert np.all(np.asarray(random_proposals(jax.random.key(0), (400,), 1, 0.5)) == 1)


def test_a_captured_block_out_of_range_is_refused_by_name():
    with pytest.raises(ValueError, match=r"target_layer_ids: expected block ids in \[0, 4\)"):
        target_forward(
            scenes.TARGET, scenes.DTYPES, scenes.target(), jnp.zeros((1, 4), jnp.int32),
            capture=(1, 4),
        )
