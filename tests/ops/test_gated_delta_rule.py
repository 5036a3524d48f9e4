"""Verification by the gated delta rule against its float64 recurrence: chains and trees."""

import dataclasses

import numpy as np
import pytest

from tests.ops.gated_delta_inputs import (
    BATCH,
    CHAIN,
    FORMS,
    POISON,
    TREES,
    WIDTH,
    Columns,
    compiled_verify,
    fold_kept,
    fold_records,
    ints,
    make_columns,
    make_state,
    poisoned,
    prefill,
    records,
    root_paths,
    take_columns,
    verify,
)
from tests.oracles import gated_delta_rule as oracle
from tests.tolerances import FP32, FP32_CHAIN, assert_close, assert_same_bits

CASES = pytest.mark.parametrize(
    "chain, form",
    [
        (True, "xla"),
        (True, "interpret"),
        pytest.param(True, "pallas", marks=pytest.mark.gpu),
        (False, "xla"),
        (False, "interpret"),
        pytest.param(False, "pallas", marks=pytest.mark.gpu),
    ],
)

# --- verification against the recurrence -------------------------------------------------------


@FORMS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chain_follows_the_recurrence(form, dtype):
    columns, state = make_columns(BATCH, WIDTH, dtype=dtype), make_state(BATCH)
    live = [6, 5, 3, 1, 0]
    actual = verify(columns, state, CHAIN, live, chain=True, form=form)
    assert actual.dtype == np.float32
    for b in range(BATCH):
        row = [x[b] for x in columns.all()]
        assert_close(actual[b], oracle.sequence(state[b], *row, live[b])[0], FP32_CHAIN)


@FORMS
@pytest.mark.parametrize("live", [6, 5, 2, 1])
def test_tree_columns_follow_their_root_path(live, form):
    columns, state = make_columns(BATCH, WIDTH), make_state(BATCH)
    actual = verify(columns, state, TREES, [live] * BATCH, chain=False, form=form)
    for b in range(BATCH):
        row = [x[b] for x in columns.all()]
        assert_close(actual[b], oracle.tree(state[b], *row, TREES[b], live), FP32_CHAIN)


@FORMS
def test_random_wide_trees_follow_their_root_path(form):
    rng = np.random.default_rng(5)
    batch, width = 8, 17
    parent = [[0, *(rng.integers(0, c) for c in range(1, width))] for _ in range(batch)]
    columns, state = make_columns(batch, width, seed=6), make_state(batch)
    live = rng.integers(width - 4, width + 1, batch)
    actual = verify(columns, state, parent, live, chain=False, form=form)
    for b in range(batch):
        row = [x[b] for x in columns.all()]
        assert_close(actual[b], oracle.tree(state[b], *row, parent[b], live[b]), FP32_CHAIN)


@FORMS
def test_a_chain_shaped_tree_is_the_chain(form):
    """Up to the rounding of the read; the states are equal bit for bit (test_gated_delta_fold)."""
    columns, state, live = make_columns(BATCH, WIDTH), make_state(BATCH), [6, 4, 2, 1, 0]
    chain, tree = (
        verify(columns, state, CHAIN, live, chain=flag, form=form) for flag in (True, False)
    )
    assert_close(tree, chain, FP32)


@FORMS
def test_a_tree_path_is_the_chain_of_its_columns(form):
    columns, state = make_columns(BATCH, WIDTH), make_state(BATCH)
    tree = verify(columns, state, TREES, [WIDTH] * BATCH, chain=False, form=form)
    for column in range(WIDTH):
        paths, depth = root_paths(column)
        along = columns.map(lambda x, at=paths: take_columns(x, at))
        chain = verify(along, state, CHAIN, depth, chain=True, form=form)
        for b in range(BATCH):
            assert_close(chain[b, depth[b] - 1], tree[b, column], FP32)


def test_d11_the_read_sees_the_decayed_state():
    """alpha = 0.1: delta = 0.5 * (5 - 0.1 * 2) = 2.4 and M = 0.2 + 2.4; undecayed it were 1.7."""
    key = np.zeros((1, 1, 1, 4), np.float32)
    key[..., 0] = 2.0**10
    decay = np.log(np.array([[[[0.1, np.exp(0.5)]]]], np.float32))
    value, state = np.full((1, 1, 1, 1), 5.0, np.float32), np.zeros((1, 1, 1, 4), np.float32)
    state[..., 0] = 2.0
    columns = Columns(query=key, key=key, value=value, decay=decay)
    expected = np.array([[[[2.6, 0.0, 0.0, 0.0]]]])
    assert_close(fold_records(columns, state, [1]), expected, FP32_CHAIN)
    for chain in (True, False):
        # The query is the key, and 1 / sqrt(Dk) is 1/2.
        out = verify(columns, state, [[0]], [1], chain=chain)
        assert_close(out, np.full((1, 1, 1, 1), 1.3), FP32_CHAIN)
    out, moved = prefill(columns, state, [1])
    assert_close(out, np.full((1, 1, 1, 1), 1.3), FP32_CHAIN)
    assert_close(moved, expected, FP32_CHAIN)


def test_d12_value_head_reads_its_group_of_key_heads():
    """48 value and 16 key heads: head j uses key head j // 3, for k and for q."""
    key_heads, value_heads, dim = 16, 48, 4
    key = np.zeros((key_heads, 1, key_heads, dim), np.float32)
    key[..., 0] = 1.0
    query = np.zeros_like(key)
    query[..., 1] = 1.0
    for row in range(key_heads):
        # Row h: only key head h has its query along its key.
        query[row, 0, row] = key[row, 0, row]
    decay = np.zeros((key_heads, 1, value_heads, 2), np.float32)
    decay[..., 1] = 1.0
    columns = Columns(
        query=query,
        key=key,
        value=np.ones((key_heads, 1, value_heads, 3), np.float32),
        decay=decay,
    )
    state = np.zeros((key_heads, value_heads, 3, dim), np.float32)
    outputs = [
        verify(columns, state, np.zeros((key_heads, 1)), [1] * key_heads, chain=chain)
        for chain in (True, False)
    ]
    outputs.append(prefill(columns, state, [1] * key_heads)[0])
    for out in outputs:
        for row in range(key_heads):
            heads = np.flatnonzero(np.abs(out[row, 0]).max(axis=-1) > 0)
            assert heads.tolist() == [3 * row, 3 * row + 1, 3 * row + 2]


@CASES
def test_rows_do_not_mix(chain, form):
    columns, state, live = make_columns(BATCH, WIDTH), make_state(BATCH), ints([6, 5, 3, 1, 0])
    order, parent = np.array([3, 0, 4, 2, 1]), CHAIN if chain else TREES
    shuffled = columns.map(lambda x: x[order])
    whole = verify(columns, state, parent, live, chain=chain, form=form)
    mixed = verify(shuffled, state[order], parent[order], live[order], chain=chain, form=form)
    assert_same_bits(mixed, whole[order])


# --- dead columns ------------------------------------------------------------------------------


@CASES
def test_columns_from_live_on_are_exactly_zero(chain, form):
    live = [6, 4, 2, 1, 0]
    columns, state = poisoned(make_columns(BATCH, WIDTH), live, "nan"), make_state(BATCH)
    out = verify(columns, state, CHAIN if chain else TREES, live, chain=chain, form=form)
    for b, count in enumerate(live):
        assert_same_bits(out[b, count:], np.zeros_like(out[b, count:]))
        assert count == 0 or np.abs(out[b, :count]).min() > 0


@POISON
@CASES
def test_dead_columns_never_leak(chain, form, poison):
    live, parent = [6, 4, 2, 1, 0], CHAIN if chain else TREES
    columns, state = make_columns(BATCH, WIDTH), make_state(BATCH)
    clean = verify(columns, state, parent, live, chain=chain, form=form)
    dirty = verify(poisoned(columns, live, poison), state, parent, live, chain=chain, form=form)
    assert_same_bits(dirty, clean)


@CASES
@pytest.mark.parametrize("idle", [8, 2**31 - 1, -1, -8, -(2**31)])
def test_rows_read_their_slot_and_idle_rows_none(chain, form, idle):
    """States lie anywhere in a pool of NaN; a row whose slot is out of range has no live column."""
    columns, state = make_columns(BATCH, WIDTH), make_state(BATCH)
    live, parent = ints([6, 4, 2, 0, 5]), CHAIN if chain else TREES
    direct = verify(columns, state, parent, live, chain=chain, form=form)
    pool = np.full((8, *state.shape[1:]), np.nan, np.float32)
    slot = ints([5, 0, 6, idle, 2])
    pool[slot[[0, 1, 2, 4]]] = state[[0, 1, 2, 4]]
    call = compiled_verify(chain, form)
    assert_same_bits(np.asarray(call(*columns.read(), pool, slot, parent, live)[0]), direct)


# --- refused calls -----------------------------------------------------------------------------


def test_wrong_calls_are_refused():
    columns, state = make_columns(2, 3), make_state(2)
    kept = records(columns, state)
    for call in (fold_records, lambda _, *rest: fold_kept(kept, *rest)):
        with pytest.raises(ValueError, match="recurrent: expected"):
            call(columns, state.swapaxes(2, 3), [1, 1])
    with pytest.raises(ValueError, match="query, key: expected float32, got bfloat16, bfloat16"):
        compiled_verify(True, "xla")(*columns.all(), state, *[ints([0, 0])] * 3)
    with pytest.raises(ValueError, match="recurrent: expected"):
        prefill(columns, state[:, :5], [1, 1])
    with pytest.raises(ValueError, match="decay: expected"):
        fold_records(dataclasses.replace(columns, decay=columns.decay[..., 0]), state, [1, 1])
    with pytest.raises(ValueError, match="implementation: expected"):
        verify(columns, state, np.zeros((2, 3)), [1, 1], chain=True, form="scan")
    narrow = dataclasses.replace(columns, value=columns.value[..., :5])
    with pytest.raises(NotImplementedError, match="gated_delta_rule"):
        fold_records(narrow, state[:, :, :5], [1, 1], form="interpret")
    with pytest.raises(NotImplementedError, match="gated_delta_prefill: .* value 5"):
        prefill(narrow, state[:, :, :5], [1, 1], form="interpret")
