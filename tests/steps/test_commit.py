"""commit: N = 0 changes nothing, N < kernel - 1 keeps old convolution columns, lanes are apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.steps import commit
from tests import cases
from tests.steps.harness import (
    assert_same_bytes,
    chain_proposal,
    extent_of,
    verify_proposals,
)
from tests.steps.scenes import resumed

# DFlash keeps rings and pages, so that every kind of storage exists.
PAIR = ("moe", "dflash", 7, 3)


@functools.cache
def verified():
    """A host copy of a state after one round over lanes 4, 1, 6, its rows and its scratch."""
    session = resumed(*PAIR)
    models = session.models
    session.round([0, 2])
    lanes = [4, 1, 6]
    rows, greedy = session.rows(lanes), SamplingArrays.greedy(3)
    tokens = np.random.default_rng(0).integers(0, 250, (3, 8))
    tokens[:, 0] = [session.lanes[lane].ledger[-1] for lane in lanes]
    extent = extent_of(models, session.state, rows)
    state, scratch = verify_proposals(
        models, session.params, session.state, rows, greedy, extent,
        jnp.array(tokens.astype(np.int32)),
    )
    return models, cases.host(state), rows, scratch, session


def committed(counts, scratch=None, path=None, rows=None):
    """The state after committing `counts` of the round of `verified`, as NumPy arrays."""
    models, state, own, found, _ = verified()
    rows = rows or own
    scratch = scratch or found
    if path is not None:
        acceptance = scratch.acceptance.replace(path=jnp.array(np.array(path, np.int32)))
        scratch = scratch.replace(acceptance=acceptance)
    state = jax.tree.map(jnp.array, state)
    return cases.host(commit(models, state, rows, scratch, jnp.array(np.array(counts, np.int32))))


def test_nothing_committed_leaves_every_byte():
    assert_same_bytes(committed([0, 0, 0]), verified()[1])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_rows_without_a_lane_commit_nothing_whatever_the_counts(which):
    _, before, _, _, session = verified()
    assert_same_bytes(committed([2, 8, 1], rows=session.nobody(which)), before)


def test_rows_of_zero_and_other_lanes_keep_every_byte():
    models, before, rows, _, session = verified()
    after = committed([0, 5, 0])
    lane, slot = 1, int(session.slot_of[1])
    others = np.arange(models.run.lanes) != lane
    assert_same_bytes(
        jax.tree.map(lambda x: x[others], after.sequence),
        jax.tree.map(lambda x: x[others], before.sequence),
    )
    assert_same_bytes(after.pending.features[others], before.pending.features[others])
    other_slots = np.arange(models.run.slots) != slot
    for part in ("gdn", "continuation"):
        new, old = getattr(after.target, part), getattr(before.target, part)
        assert_same_bytes(
            jax.tree.map(lambda x: x[other_slots], new),
            jax.tree.map(lambda x: x[other_slots], old),
        )
        changed = jax.tree.map(lambda a, b: not np.array_equal(a[slot], b[slot]), new, old)
        assert all(jax.tree.leaves(changed))
    own = np.isin(np.arange(models.run.pages), session.target_pages[lane])
    for new, old in zip(after.target.kv, before.target.kv, strict=True):
        assert_same_bytes(new.key[:, ~own], old.key[:, ~own])
        assert_same_bytes(new.value[:, ~own], old.value[:, ~own])
    assert_same_bytes(after.context, before.context)
    assert_same_bytes((after.target_table, after.draft_table),
                      (before.target_table, before.draft_table))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_d7_conv_history_is_the_last_columns_of_old_and_committed(count):
    models, before, rows, scratch, session = verified()
    after, kept = committed([count] * 3), models.target.gdn.conv_kernel - 1
    for layer, records in enumerate(scratch.verification.gdn_records):
        for row, slot in enumerate(np.asarray(rows.read_slot)):
            columns = np.concatenate(
                [before.target.gdn[layer].conv[slot], records.conv_input[row, :count]]
            )
            np.testing.assert_array_equal(after.target.gdn[layer].conv[slot], columns[-kept:])


@pytest.mark.parametrize("count", [1, 3, 8])
def test_committed_rows_are_the_verified_columns(count):
    """F, anchor, budget, counts, K/V rows, pending features and the continuation."""
    models, before, rows, scratch, session = verified()
    after, run = committed([count] * 3), models.run
    outputs = np.asarray(scratch.acceptance.outputs)
    for row, lane in enumerate(np.asarray(rows.lane)):
        frontier = before.sequence.frontier[lane]
        assert after.sequence.frontier[lane] == frontier + count
        assert after.sequence.context_frontier[lane] == before.sequence.context_frontier[lane]
        assert after.sequence.anchor[lane] == outputs[row, count - 1]
        assert after.sequence.remaining[lane] == before.sequence.remaining[lane] - count
        gained = after.sequence.counts[lane] - before.sequence.counts[lane]
        np.testing.assert_array_equal(
            gained, np.bincount(outputs[row, :count], minlength=len(gained))
        )
        position = frontier + np.arange(count)
        page = session.target_pages[lane][position // run.page_size]
        for pool, (key, value) in zip(
            after.target.kv, scratch.verification.kv_rows, strict=True
        ):
            for leaf, fresh in ((pool.key, key), (pool.value, value)):
                stored = leaf[:, page, position % run.page_size].swapaxes(0, 1)
                np.testing.assert_array_equal(stored, fresh[row, :count])
        pending = after.pending.features[lane]
        np.testing.assert_array_equal(pending[:count], scratch.verification.features[row, :count])
        np.testing.assert_array_equal(pending[count:], before.pending.features[lane, count:])
        np.testing.assert_array_equal(
            after.target.continuation[rows.write_slot[row]],
            scratch.verification.hidden[row, count - 1],
        )


def test_rejected_rows_never_reach_the_cache():
    """Only positions [F, F + N) of the pages change."""
    models, before, rows, _, session = verified()
    after, counts = committed([2, 1, 4]), [2, 1, 4]
    run = models.run
    allowed = np.zeros((run.pages, run.page_size), bool)
    for row, lane in enumerate(np.asarray(rows.lane)):
        position = before.sequence.frontier[lane] + np.arange(counts[row])
        page = session.target_pages[lane][position // run.page_size]
        allowed[page, position % run.page_size] = True
    for new, old in zip(after.target.kv, before.target.kv, strict=True):
        assert_same_bytes(new.key[:, ~allowed], old.key[:, ~allowed])
        assert_same_bytes(new.value[:, ~allowed], old.value[:, ~allowed])


def test_fold_equals_single_columns_bit_for_bit():
    """N records at once, or one column a call in the same frame: the same bytes."""
    models, before, rows, scratch, _ = verified()
    whole = committed([5, 3, 8])
    state, counts = jax.tree.map(jnp.array, before), np.array([5, 3, 8])
    width = models.run.block_width
    for step in range(8):
        # Column `step` becomes the first of the path; the frontier does not matter to the fold.
        path = np.tile((np.arange(width) + step) % width, (3, 1)).astype(np.int32)
        acceptance = scratch.acceptance.replace(path=jnp.array(path))
        one = jnp.array((step < counts).astype(np.int32))
        state = commit(models, state, rows, scratch.replace(acceptance=acceptance), one)
    assert_same_bytes(cases.host(state.target.gdn), whole.target.gdn)


def test_entries_of_the_path_past_the_count_are_never_read():
    expected = committed([2, 3, 1])
    path = np.tile(np.arange(8), (3, 1))
    for row, count in enumerate((2, 3, 1)):
        path[row, count:] = 2**30
    assert_same_bytes(committed([2, 3, 1], path=path), expected)


def test_a_fork_reads_one_slot_and_writes_another():
    """read_slot keeps every byte; write_slot becomes what an in-place commit makes."""
    models, before, rows, scratch, session = verified()
    free = sorted(set(range(models.run.slots)) - {k.slot for k in session.lanes.values()})[:1]
    source = int(rows.read_slot[1])
    write = jnp.array(np.array([rows.write_slot[0], free[0], rows.write_slot[2]], np.int32))
    state = jax.tree.map(jnp.array, before)
    counts = jnp.array(np.array([2, 3, 1], np.int32))
    forked = cases.host(commit(models, state, rows.replace(write_slot=write), scratch, counts))
    in_place = committed([2, 3, 1])
    for part in ("gdn", "continuation"):
        fork, same, old = (
            jax.tree.leaves(getattr(s.target, part)) for s in (forked, in_place, before)
        )
        for new, other, origin in zip(fork, same, old, strict=True):
            np.testing.assert_array_equal(new[free[0]], other[source])
            np.testing.assert_array_equal(new[source], origin[source])


def test_chain_proposal_is_a_chain():
    proposal = chain_proposal(jnp.zeros((2, 4), jnp.int32))
    assert proposal.parent[1].tolist() == [0, 0, 1, 2]
