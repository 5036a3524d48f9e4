"""prefill: any cut of a prompt gives the same state; replaced rows, positions, lanes used again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.steps import begin, commit, first_token, prefill_chunk, speculate
from dflash_jax.steps.models import target_call
from dflash_jax.steps.prefill import PrefillChunk
from tests import cases
from tests.steps.harness import Session, assert_same_bytes, extent_of
from tests.steps.poison import poison_with
from tests.steps.scenes import HUGE, budget, plain_text, prefilled
from tests.tolerances import FP32_CHAIN, assert_close


@pytest.mark.parametrize(("pair", "chunk"), [(("dense", "dflash"), 48), (("moe", "dflash2"), 5)])
def test_d10_the_cut_of_a_prompt_does_not_matter(pair, chunk):
    """Chunks longer and shorter than the window; a long chunk leaves only S rows in a ring."""
    expected, lanes = prefilled(*pair, False)
    models = cases.tiny_models(*pair, max(cases.DRAFT_TOKENS), 8)
    session = Session(models, cases.leaning_params(models))
    session.admit(dict(enumerate(cases.prompts(models))), budget, chunk=chunk)
    assert [known.ledger for known in session.lanes.values()] == [
        known.ledger for known in lanes.values()
    ]
    ours = cases.host(session.state)
    assert_same_bytes(ours.sequence, expected.sequence)
    # What no prompt reached is zero in both: the states as a whole agree.
    jax.tree.map(
        lambda a, e: assert_close(a, e, FP32_CHAIN),
        (ours.target.gdn, ours.target.continuation, ours.target.kv, ours.context.pages),
        (expected.target.gdn, expected.target.continuation, expected.target.kv,
         expected.context.pages),
    )
    for new, old in zip(ours.context.rings, expected.context.rings, strict=True):
        assert_close(new.key, old.key, FP32_CHAIN)
        assert_close(new.value, old.value, FP32_CHAIN)
    assert_same_bytes(ours.pending, expected.pending)


def test_prefill_writes_the_sequence_numbers():
    state, lanes = prefilled("dense", "dflash", False)
    for lane, known in lanes.items():
        sequence = jax.tree.map(lambda x, n=lane: x[n], state.sequence)
        assert sequence.frontier == sequence.context_frontier == known.prompt
        assert sequence.remaining == budget(lane) - 1
        assert np.flatnonzero(sequence.counts).tolist() == [known.ledger[-1]]
        seen = np.flatnonzero(sequence.prompt_seen).tolist()
        assert seen == sorted(set(known.ledger[: known.prompt]))


def test_e1_a_second_shorter_request_in_the_same_lanes():
    """No byte of the first request matters to the second: text as if it were alone."""
    models = cases.tiny_models("moe", "dflash", 7, 3)
    session = Session(models, cases.leaning_params(models), poison_with(HUGE, np.nan))
    prompts, text = cases.prompts(models), plain_text("moe")
    session.admit({0: prompts[1], 1: prompts[5], 2: prompts[6]}, 10)
    session.run(seed=5)
    session.admit({2: prompts[0], 0: prompts[4], 1: prompts[2]}, 20)
    assert session.run(seed=6) == {2: text[0][:20], 0: text[4][:20], 1: text[2][:20]}


def prefilled_session():
    """A session of three lanes, a state in which they have a prompt, and full chunks for them."""
    models = cases.tiny_models("moe", "dflash", 7, 3)
    state, _ = prefilled("moe", "dflash", False)
    pending = state.pending.replace(features=state.pending.features[:, :8])
    session = Session(models, cases.leaning_params(models))
    tokens = np.full((3, cases.CHUNK), 5, np.int32)
    chunk = PrefillChunk.text(models, tokens, [cases.CHUNK] * 3, [0, 0, 0])
    return session, state.replace(pending=pending), chunk


def assert_changes_nothing(session, before, step, rows, **rest):
    state = jax.tree.map(jnp.array, before)
    after = step(session.models, state=state, rows=rows, **rest)
    if step is first_token:
        after, fault = after
        assert not fault.any()  # an idle row has none, whatever its dead bytes hold
    assert_same_bytes(cases.host(after), before)


def test_idle_rows_and_empty_chunks_change_nothing():
    session, before, full = prefilled_session()
    idle, live = session.rows([]), session.rows([0, 1, 2])
    empty = full.replace(length=jnp.zeros((3,), jnp.int32))
    for step, rows, rest in (
        (begin, idle, {"admission": session.admission([], [], [])}),
        (prefill_chunk, idle, {"params": session.params, "chunk": empty}),
        (prefill_chunk, live, {"params": session.params, "chunk": empty}),
        (first_token, idle, {"params": session.params, "sampling": SamplingArrays.greedy(3)}),
    ):
        assert_changes_nothing(session, before, step, rows, **rest)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_rows_without_a_lane_change_nothing_whatever_they_bring(which):
    """Whole chunks and pages for lanes that do not exist, negative ones too, with slots or not."""
    session, before, chunk = prefilled_session()
    for step, rest in (
        (begin, {"admission": session.admission([0, 1, 2], [9, 9, 9], [40, 40, 40])}),
        (prefill_chunk, {"params": session.params, "chunk": chunk}),
        (first_token, {"params": session.params, "sampling": SamplingArrays.greedy(3)}),
    ):
        assert_changes_nothing(session, before, step, session.nobody(which), **rest)


# --- replaced embeddings, three-axis positions, rotation offset: one row, 24 columns ---

TOKENS, PLAIN = 24, ("dense", None, 0, 1)


@functools.cache
def one_row():
    models = cases.tiny_models(*PLAIN, chunk=TOKENS)
    return models, Session(models, cases.leaning_params(models))


def text_after(chunk, rope_delta=0, count=10):
    """State after the chunk as host arrays, and the greedy text that follows."""
    models, session = one_row()
    rows, greedy = session.rows([0]), SamplingArrays.greedy(1)
    state = begin(models, models.zeros(), rows, session.admission([0], [count], [100], rope_delta))
    state = prefill_chunk(models, session.params, state, rows, chunk)
    after, text = cases.host(state), []
    state, _ = first_token(models, session.params, state, rows, greedy)
    for _ in range(count):
        text.append(int(state.sequence.anchor[0]))
        extent = extent_of(models, state, rows)
        state, scratch = speculate(models, session.params, state, rows, greedy, extent)
        state = commit(models, state, rows, scratch, scratch.acceptance.licensed)
    return after, text


def chunk_of(positions=None, replaced=None, embeddings=None):
    """A random prompt of 24 tokens, always with an embeddings operand."""
    models, session = one_row()
    tokens = np.random.default_rng(8).integers(0, 250, (1, TOKENS)).astype(np.int32)
    chunk = PrefillChunk.text(models, tokens, [TOKENS], [0])
    if embeddings is None:
        embeddings = np.zeros((1, TOKENS, models.target.hidden), np.float32)
    if replaced is None:
        replaced = np.zeros((1, TOKENS), bool)
    chunk = chunk.replace(embeddings=jnp.array(embeddings), replaced=jnp.array(replaced))
    return chunk if positions is None else chunk.replace(positions=jnp.array(positions))


def test_rows_replaced_by_their_own_embeddings_change_no_byte():
    models, session = one_row()
    chunk = chunk_of()
    rows = target_call(models, session.params, "embed", chunk.tokens)
    replaced = np.arange(TOKENS)[None] % 3 == 0
    ours, text = text_after(chunk_of(replaced=replaced, embeddings=rows))
    expected, plain = text_after(chunk)
    assert_same_bytes(ours, expected)
    assert text == plain
    # Dead embeddings may be NaN; live ones are used.
    spoiled = np.where(replaced[:, :, None], np.asarray(rows), np.nan)
    assert_same_bytes(text_after(chunk_of(replaced=replaced, embeddings=spoiled))[0], expected)
    other, _ = text_after(chunk_of(replaced=replaced, embeddings=-np.asarray(rows)))
    assert not np.array_equal(other.target.continuation, expected.target.continuation)


def test_each_rotation_axis_counts():
    plain = np.repeat(np.arange(TOKENS, dtype=np.int32)[None, :, None], 3, axis=2)
    expected, _ = text_after(chunk_of(positions=plain))
    seen = []
    for axis in range(3):
        moved = plain.copy()
        moved[:, 4:12, axis] = 4
        after, _ = text_after(chunk_of(positions=moved))
        keys = after.target.kv[0].key
        assert not np.array_equal(keys, expected.target.kv[0].key)
        seen.append(keys)
    assert not np.array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[1], seen[2])


def test_rope_delta_continues_the_rotation_of_the_prompt():
    """Rotation is relative: a prompt shifted by 7 with a delta of 7 says what it says unshifted."""
    plain = np.repeat(np.arange(TOKENS, dtype=np.int32)[None, :, None], 3, axis=2)
    expected_state, expected = text_after(chunk_of(positions=plain))
    shifted_state, shifted = text_after(chunk_of(positions=plain + 7), rope_delta=7)
    assert shifted == expected
    assert not np.array_equal(
        shifted_state.target.kv[0].key, expected_state.target.kv[0].key
    )
    logits = [
        first_logits(chunk_of(positions=plain + 7), delta) for delta in (7, 0)
    ] + [first_logits(chunk_of(positions=plain), 0)]
    assert_close(logits[0], logits[2], FP32_CHAIN)
    assert np.abs(logits[1] - logits[2]).max() > 1e-3


def first_logits(chunk, rope_delta):
    """Verify logits of the anchor after the chunk."""
    models, session = one_row()
    rows, greedy = session.rows([0]), SamplingArrays.greedy(1)
    state = begin(models, models.zeros(), rows, session.admission([0], [4], [100], rope_delta))
    state = prefill_chunk(models, session.params, state, rows, chunk)
    state, _ = first_token(models, session.params, state, rows, greedy)
    extent = extent_of(models, state, rows)
    _, scratch = speculate(models, session.params, state, rows, greedy, extent)
    return np.asarray(scratch.verification.logits)
