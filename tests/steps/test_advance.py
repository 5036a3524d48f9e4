"""advance: the bytes of commit and speculate one after the other, and of neither without N."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.steps import advance, commit, empty_scratch, speculate
from tests import cases
from tests.steps.harness import Session, assert_same_bytes, extent_of

# Columns of a round; 0 is a chain.
BOTH = pytest.mark.parametrize("nodes", [0, 5])


@functools.cache
def prefilled():
    """Three lanes of a tiny pair, of which the first two have had a round: features are pending."""
    models = cases.tiny_models("dense", "dflash2", 3, 3)
    session, prompts = Session(models, cases.leaning_params(models)), cases.prompts(models)
    session.admit({lane: prompts[lane] for lane in range(3)}, lambda lane: 24 + lane)
    session.round([1, 0])
    return session


@functools.cache
def scene(nodes):
    """Models, parameters, rows, and host copies of a state and of the scratch of its round."""
    session = prefilled()
    models, rows = session.models.with_tree(nodes), session.rows([2, 0, 1])
    sampling, state = SamplingArrays.greedy(3), jax.tree.map(jnp.copy, session.state)
    first = started(models, session.params, state, rows, sampling)
    return models, session.params, rows, sampling, *cases.host(first[:2])


def started(models, params, state, rows, sampling):
    """The first round of a state."""
    scratch = empty_scratch(models, params, state, rows, sampling)
    return advance(models, params, state, rows, sampling, scratch, np.zeros((3,), np.int32))


def on_device(tree):
    return jax.tree.map(jnp.array, tree)


def counts_of(nodes, kinds):
    """N of each row: "all" of its licence, or a number."""
    licensed = scene(nodes)[-1].acceptance.licensed
    pairs = zip(kinds, licensed, strict=True)
    return np.array([own if kind == "all" else kind for kind, own in pairs], np.int32)


def committed(nodes, counts, rows):
    """The state of a scene after `commit` alone."""
    models, _, _, _, state, scratch = scene(nodes)
    return commit(models, on_device(state), rows, on_device(scratch), counts)


@BOTH
@pytest.mark.parametrize("kinds", [("all",) * 3, ("all", 0, 1), (0, 1, "all")], ids=str)
def test_it_leaves_the_bytes_of_commit_and_a_round_begun_after_it(nodes, kinds):
    models, params, rows, sampling, state, scratch = scene(nodes)
    counts = counts_of(nodes, kinds)
    expected = cases.host(
        started(models, params, committed(nodes, counts, rows), rows, sampling)
    )
    actual = advance(
        models, params, on_device(state), rows, sampling, on_device(scratch), counts
    )
    assert_same_bytes(actual, expected)
    summary, width = expected[2], models.run.block_width
    assert summary[:, width].min() >= 1
    assert summary[:, width + 2].tolist() == [nodes or width] * 3


@pytest.mark.parametrize(
    "nodes", [0, pytest.param(5, marks=pytest.mark.slow)]
)
def test_a_round_that_is_begun_leaves_the_bytes_of_speculate(nodes):
    models, params, rows, sampling, state, _ = scene(nodes)
    extent = extent_of(models, on_device(state), rows)
    expected = cases.host(speculate(models, params, on_device(state), rows, sampling, extent))
    new, left, summary = started(models, params, on_device(state), rows, sampling)
    assert_same_bytes((new, left), expected)
    acceptance, width = expected[1].acceptance, models.run.block_width
    np.testing.assert_array_equal(summary[:, :width], acceptance.outputs)
    numbers = (acceptance.licensed, extent.proposals, extent.columns, acceptance.fault)
    np.testing.assert_array_equal(summary[:, width:], np.stack(numbers, axis=1))


@BOTH
def test_nothing_of_a_scratch_is_seen_where_nothing_is_committed(nodes):
    """Not of nan either, nor of indices far out of range."""
    models, params, rows, sampling, state, _ = scene(nodes)
    expected = cases.host(started(models, params, on_device(state), rows, sampling))
    scratch = jax.tree.map(
        ill, empty_scratch(models, params, on_device(state), rows, sampling)
    )
    nothing = np.zeros((3,), np.int32)
    actual = advance(models, params, on_device(state), rows, sampling, scratch, nothing)
    assert_same_bytes(actual, expected)


def ill(leaf):
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.full_like(leaf, jnp.nan)
    return jnp.full_like(leaf, True if leaf.dtype == bool else 2**30)


def test_a_fork_that_has_been_committed_is_read_where_it_was_written():
    """Rows that read one slot and write another: the next round reads what the commit wrote."""
    models, params, rows, sampling, state, scratch = scene(0)
    free = next(slot for slot in range(models.run.slots) if slot not in np.array(rows.read_slot))
    forked = rows.replace(write_slot=rows.write_slot.at[0].set(free))
    later, counts = forked.replace(read_slot=forked.write_slot), counts_of(0, ("all", 0, 1))
    expected = cases.host(
        started(models, params, committed(0, counts, forked), later, sampling)
    )
    actual = advance(
        models, params, on_device(state), forked, sampling, on_device(scratch), counts
    )
    assert_same_bytes(actual, expected)


def test_rounds_of_any_rows_and_counts_share_one_trace():
    models, params, rows, sampling, state, scratch = scene(0)
    state, scratch = on_device(state), on_device(scratch)
    counts, none = counts_of(0, ("all",) * 3), np.zeros((3,), np.int32)
    idle = rows.replace(lane=jnp.full_like(rows.lane, models.run.lanes))
    state, scratch, _ = advance(models, params, state, rows, sampling, scratch, counts)
    known = advance._cache_size()
    for some, number in ((rows, none), (idle, none), (rows, none), (rows, counts)):
        state, scratch, summary = advance(models, params, state, some, sampling, scratch, number)
    assert advance._cache_size() == known
    assert summary[:, models.run.block_width].min() >= 1


@BOTH
def test_a_limit_beyond_the_licence_adopts_all_of_it_and_the_summary_takes_the_last_ones_place(
    nodes,
):
    models, params, rows, sampling, state, scratch = scene(nodes)
    counts, width = counts_of(nodes, ("all",) * 3), models.run.block_width
    expected = cases.host(advance(
        models, params, on_device(state), rows, sampling, on_device(scratch), counts
    ))
    most = jnp.full((3,), width, jnp.int32)
    last = jnp.full(expected[2].shape, 7, jnp.int32)
    actual = advance(
        models, params, on_device(state), rows, sampling, on_device(scratch), most, last
    )
    assert_same_bytes(actual, expected)
    assert last.is_deleted()


@BOTH
@pytest.mark.parametrize("kind", ["first id", "last id", "id behind L", "fault", "budget", "room"])
def test_a_row_that_the_device_sees_end_is_idle_in_the_next_round(nodes, kind):
    """The bytes of a commit up to the end and a round without the row; the others go on."""
    models, params, rows, sampling, state, scratch = scene(nodes)
    state, scratch = on_device(state), on_device(scratch)
    licensed, outputs = (np.array(x) for x in (
        scratch.acceptance.licensed, scratch.acceptance.outputs
    ))
    row = int(licensed.argmax())
    lane, most = int(rows.lane[row]), jnp.full((3,), models.run.block_width, jnp.int32)
    counts, ended, eos_ids = licensed.copy(), True, np.full((3, 4), -1, np.int32)
    if kind == "first id":
        eos_ids[row, 2], counts[row] = outputs[row, 0], 1
    elif kind == "last id":
        eos_ids[row, 0] = outputs[row, licensed[row] - 1]
        counts[row] = outputs[row].tolist().index(eos_ids[row, 0]) + 1
    elif kind == "id behind L":  # also another row's id
        own = set(outputs[row, : licensed[row]].tolist())
        eos_ids[row] = next(n for n in range(99) if n not in own)
        ended = False
        outputs[row, licensed[row]:] = eos_ids[row, 0]
        scratch = scratch.replace(acceptance=scratch.acceptance.replace(outputs=jnp.array(outputs)))
    elif kind == "fault":
        fault = scratch.acceptance.fault.at[row].set(True)
        scratch = scratch.replace(acceptance=scratch.acceptance.replace(fault=fault))
        counts[row] = 0
    else:
        sequence = state.sequence
        left = dict(remaining=sequence.remaining.at[lane].set(int(licensed[row]))) if (
            kind == "budget"
        ) else dict(capacity=sequence.capacity.at[lane].set(
            int(sequence.frontier[lane] + licensed[row])
        ))
        state = state.replace(sequence=sequence.replace(**left))
    copy = jax.tree.map(jnp.copy, (state, scratch))
    after, run = commit(models, copy[0], rows, copy[1], counts), models.run
    others = rows if not ended else rows.replace(
        lane=rows.lane.at[row].set(run.lanes), read_slot=rows.read_slot.at[row].set(run.slots),
        write_slot=rows.write_slot.at[row].set(run.slots),
    )
    expected = cases.host(started(models, params, after, others, sampling))
    actual = advance(
        models, params, state, rows, sampling, scratch, most, None, jnp.array(eos_ids)
    )
    assert_same_bytes(actual, expected)
    assert (expected[2][row, models.run.block_width] == 0) == ended


def test_a_round_that_is_begun_ends_no_row():
    """Whatever an older scratch says of ids, budgets and faults."""
    models, params, rows, sampling, state, scratch = scene(0)
    expected = cases.host(started(models, params, on_device(state), rows, sampling))
    eos_ids = jnp.array(scratch.acceptance.outputs)
    scratch = scratch.replace(acceptance=scratch.acceptance.replace(
        fault=np.ones_like(scratch.acceptance.fault)
    ))
    actual = advance(
        models, params, on_device(state), rows, sampling, on_device(scratch),
        np.zeros((3,), np.int32), None, eos_ids,
    )
    assert_same_bytes(actual, expected)


def test_eos_ids_of_another_shape_are_refused():
    models, params, rows, sampling, state, scratch = scene(0)
    for shape in ((3,), (2, 4), (1, 3, 4)):
        with pytest.raises(ValueError, match=r"eos_ids: expected \[3, E\]"):
            advance(
                models, params, state, rows, sampling, scratch, np.zeros((3,), np.int32), None,
                np.zeros(shape, np.int32),
            )
