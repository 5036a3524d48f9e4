"""Chunked prefill by the gated delta rule against its float64 recurrence."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import gated_delta_rule as module
from dflash_jax.ops.gated_delta_rule import gated_delta_prefill
from dflash_jax.pallas import gated_delta_prefill as kernels
from tests.ops.gated_delta_inputs import (
    FORMS,
    POISON,
    Columns,
    compiled_prefill,
    ints,
    make_columns,
    make_state,
    poisoned,
    prefill,
)
from tests.oracles import gated_delta_rule as oracle
from tests.tolerances import FP32_CHAIN, assert_close, assert_same_bits

EDGES = (1, 2, 63, 64, 65, 127, 128, 129)


def assert_rows_follow_the_recurrence(columns, state, live, form):
    """Dead columns hold NaN; their outputs are exactly zero."""
    dirty = poisoned(columns, live, "nan")
    actual, moved = prefill(dirty, state, live, form=form)
    assert actual.dtype == moved.dtype == np.float32
    for b, count in enumerate(live):
        outputs, final = oracle.sequence(state[b], *(x[b] for x in columns.all()), count)
        assert_close(actual[b], outputs, FP32_CHAIN)
        assert_close(moved[b], final, FP32_CHAIN)
        assert_same_bits(actual[b, count:], np.zeros_like(actual[b, count:]))


def assert_prefill_follows_the_recurrence(length, live, form, *, seed=0):
    """One sequence for all rows: row b stops after live[b] columns."""
    columns, state = make_columns(1, length, seed=seed), make_state(1)
    row = [x[0] for x in columns.all()]
    outputs, _ = oracle.sequence(state[0], *row, length)
    batch = len(live)
    repeated = columns.map(lambda x: np.repeat(x, batch, axis=0))
    repeated = poisoned(repeated, live, "nan")
    actual, moved = prefill(repeated, np.repeat(state, batch, axis=0), live, form=form)
    for b, count in enumerate(live):
        expected = np.where(np.arange(length)[:, None, None] < count, outputs, 0.0)
        assert_close(actual[b], expected, FP32_CHAIN)
        assert not actual[b, count:].any()
    trajectory = [state[0].astype(np.float64)]
    for t in range(length):
        trajectory.append(oracle.step(trajectory[-1], row[1][t], row[2][t], row[3][t]))
    assert_close(moved, np.stack([trajectory[count] for count in live]), FP32_CHAIN)


@FORMS
def test_prefill_follows_the_recurrence_at_every_live_count(form):
    live = [0, 1, 16, 17, 33, 63, 64, 65, 70] if form == "interpret" else list(range(71))
    assert_prefill_follows_the_recurrence(70, live, form)


@pytest.mark.parametrize(
    "length, form",
    [*((n, "xla") for n in EDGES), *((n, "interpret") for n in (1, 63, 64, 65)),
     *(pytest.param(n, "pallas", marks=pytest.mark.gpu) for n in EDGES)],
)
def test_prefill_follows_the_recurrence_at_chunk_edges(length, form):
    assert module.CHUNK == kernels.CHUNK == 64
    live = sorted({0, 1, length - 1, length})
    assert_prefill_follows_the_recurrence(length, live, form, seed=length)


@FORMS
@pytest.mark.parametrize("value_heads, dtype", [(2, "float32"), (4, "bfloat16"), (6, "bfloat16")])
def test_ragged_rows_of_any_group_follow_the_recurrence(form, value_heads, dtype):
    """Value heads per key head: 1, 2 and 3."""
    columns, state = make_columns(3, 130, dtype=dtype), make_state(3)[:, :value_heads]
    columns = dataclasses.replace(
        columns, value=columns.value[:, :, :value_heads], decay=columns.decay[:, :, :value_heads]
    )
    assert_rows_follow_the_recurrence(columns, state, [130, 64, 66], form)


@pytest.mark.parametrize("length", range(1, 14))
def test_prefill_follows_the_recurrence_for_short_chunks(length, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4)
    columns, state = make_columns(2, length, seed=length), make_state(2)
    live = ints([length, length // 2])
    actual, moved = jax.jit(lambda *x: gated_delta_prefill(*x))(*columns.all(), state, live)
    for b in range(2):
        row = [x[b] for x in columns.all()]
        outputs, final = oracle.sequence(state[b], *row, live[b])
        assert_close(actual[b], outputs, FP32_CHAIN)
        assert_close(moved[b], final, FP32_CHAIN)


@FORMS
@pytest.mark.parametrize(
    "rate", [0.0, pytest.param(1e-3, marks=pytest.mark.slow), 5.0,
             pytest.param(60.0, marks=pytest.mark.slow)]
)
def test_prefill_follows_the_recurrence_for_weak_and_strong_decay(rate, form):
    columns, state = make_columns(2, 70), make_state(2)
    columns.decay[..., 0] = -rate
    assert_rows_follow_the_recurrence(columns, state, [70, 67], form)


@FORMS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_keys_that_resemble_one_another_follow_the_recurrence(sign, form):
    """No decay and full strength: powers of the triangle of a block grow to 10^18 here."""
    columns, state = make_columns(2, 70), make_state(2)
    common = columns.key[:, :1].astype(np.float32) * sign ** np.arange(70)[:, None, None]
    key = (common + 0.05 * columns.key.astype(np.float32)).astype(jnp.bfloat16)
    decay = np.broadcast_to(np.float32([0.0, 1.0]), columns.decay.shape).copy()
    columns = dataclasses.replace(columns, key=key, decay=decay)
    assert_rows_follow_the_recurrence(columns, state, [70, 67], form)


@FORMS
def test_prefill_of_no_live_column_keeps_the_state(form):
    columns, state = poisoned(make_columns(2, 70), [0, 0], "nan"), make_state(2)
    outputs, moved = prefill(columns, state, [0, 0], form=form)
    assert not outputs.any()
    assert_same_bits(moved, state)


@POISON
@FORMS
def test_dead_prefill_columns_never_leak(poison, form):
    live = [70, 65, 7, 1, 0]
    columns, state = make_columns(5, 70), make_state(5)
    clean = prefill(columns, state, live, form=form)
    dirty = prefill(poisoned(columns, live, poison), state, live, form=form)
    for actual, expected in zip(dirty, clean, strict=True):
        assert_same_bits(actual, expected)


@FORMS
@pytest.mark.parametrize("place", ["state", "key", "value", "decay"])
def test_nan_before_a_column_is_nan_in_it(place, form):
    """With the bits that a GPU gives a NaN, which carry over where they are rounded as a number."""
    columns, state = make_columns(1, 70, dtype="float32"), make_state(1)
    nan = np.uint32(0x7FFFFFFF).view(np.float32)
    if place == "state":
        state[:, :, 3, 5] = nan
    else:
        getattr(columns, place)[:, 5, ..., 1] = nan
    outputs, moved = prefill(columns, state, [70], form=form)
    lines = slice(None) if place in ("key", "decay") else {"state": 3, "value": 1}[place]
    assert np.isnan(outputs[0, 6:, :, lines]).all() and np.isnan(moved[0, :, lines]).all()


@FORMS
@pytest.mark.parametrize("cut", [1, pytest.param(35, marks=pytest.mark.slow), 64, 69])
def test_d10_prefill_in_two_chunks_is_prefill_in_one(cut, form):
    columns, state = make_columns(2, 70), make_state(2)
    whole, final = prefill(columns, state, [70, 70], form=form)
    first, between = prefill(columns, state, [cut, cut], form=form)
    rest = columns.map(lambda x: np.roll(x, -cut, axis=1))
    second, moved = prefill(rest, between, [70 - cut] * 2, form=form)
    joined = np.concatenate([first[:, :cut], second[:, : 70 - cut]], axis=1)
    assert_close(joined, whole, FP32_CHAIN)
    assert_close(moved, final, FP32_CHAIN)


@FORMS
def test_d9_packed_rows_are_separate(form):
    columns, state, live = make_columns(3, 70), make_state(3), [70, 13, 64]
    packed = prefill(columns, state, live, form=form)
    for b in range(3):
        alone = columns.map(lambda x, at=b: x[at : at + 1])
        single = prefill(alone, state[b : b + 1], live[b : b + 1], form=form)
        for actual, expected in zip(packed, single, strict=True):
            assert_close(actual[b : b + 1], expected, FP32_CHAIN)


# --- official geometry: on a GPU -----------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["xla", "pallas"])
@pytest.mark.parametrize(
    "key_heads, value_heads, live", [
        (16, 48, [1024]), (16, 32, [1024, 0, 961]), (16, 48, [1, 65, 100, 63, 64, 0, 128, 7]),
    ],
)
def test_official_heads_follow_the_recurrence(key_heads, value_heads, live, form):
    batch, length, dim = len(live), max(live), 128
    rng = np.random.default_rng(3)

    def normal(heads):
        return rng.standard_normal((batch, length, heads, dim)).astype(jnp.bfloat16)

    gates = (batch, length, value_heads)
    decay = np.stack([-rng.exponential(0.1, gates), rng.uniform(0.0, 1.0, gates)], axis=-1)
    columns = Columns(
        query=normal(key_heads), key=normal(key_heads), value=normal(value_heads),
        decay=decay.astype(np.float32),
    )
    state = rng.standard_normal((batch, value_heads, dim, dim)).astype(np.float32)
    assert_rows_follow_the_recurrence(columns, state, live, form)


@pytest.mark.gpu
def test_the_kernel_gives_the_same_bits_every_time():
    columns, state = make_columns(3, 1000), make_state(3)
    call = compiled_prefill("pallas")
    first = [np.asarray(x) for x in call(*columns.all(), state, ints([1000, 999, 64]))]
    for _ in range(20):
        for again, expected in zip(
            call(*columns.all(), state, ints([1000, 999, 64])), first, strict=True
        ):
            assert_same_bits(np.asarray(again), expected)
