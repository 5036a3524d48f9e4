"""materialize: F_ctx = F, exactly the pending rows move, and nothing else does (claims 4 and 5)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.ring import live_interval
from dflash_jax.steps import materialize, speculate
from dflash_jax.steps.models import draft_call
from tests import cases
from tests.steps.harness import Session, assert_same_bytes, extent_of
from tests.steps.scenes import resumed
from tests.tolerances import FP32_CHAIN, assert_close

CASES = {"dflash": ("moe", "dflash", 7, 3), "dflash2": ("dense", "dflash2", 3, 3)}
LANES = (5, 0, 6)


@functools.cache
def scene(draft):
    """A session with pending features on the lanes 5 and 0, and a host copy of its state."""
    session = resumed(*CASES[draft])
    for lanes in ([5, 0, 3], [5, 0, 3], [3]):
        session.round(lanes)
    return session, cases.host(session.state)


def materialized(draft, lanes=LANES, state=None, rows=None):
    session, before = scene(draft)
    state = jax.tree.map(jnp.array, state or before)
    rows = rows or session.rows(list(lanes))
    return cases.host(materialize(session.models, session.params, state, rows))


def addressed(session, before, lanes):
    """Ring indices [slots, S] and page places [pages, page] that the lanes' pending rows own."""
    run, window = session.models.run, session.models.draft.window
    ring = np.zeros((run.slots, window), bool)
    pages = np.zeros((run.pages, run.page_size), bool)
    for lane in lanes:
        position = np.arange(before.sequence.context_frontier[lane], before.sequence.frontier[lane])
        ring[session.lanes[lane].slot, position % window] = True
        page = session.draft_pages[lane][position // run.page_size]
        pages[page, position % run.page_size] = True
    return ring, pages


def check_context(session, before, after, lanes):
    """Context bytes differ only where the lanes' pending rows belong."""
    ring, pages = addressed(session, before, lanes)
    for new, old in zip(after.context.rings, before.context.rings, strict=True):
        for leaf in ("key", "value"):
            pair = [getattr(x, leaf).swapaxes(1, 2) for x in (new, old)]
            assert_same_bytes(*(x[~ring] for x in pair))
            assert (pair[0][ring] != pair[1][ring]).any(axis=(-2, -1)).all()
    for new, old in zip(after.context.pages, before.context.pages, strict=True):
        for leaf in ("key", "value"):
            pair = [getattr(x, leaf) for x in (new, old)]
            assert_same_bytes(*(x[:, ~pages] for x in pair))
            assert (pair[0][:, pages] != pair[1][:, pages]).any(axis=(0, -1)).all()


@pytest.mark.parametrize("draft", CASES)
def test_g6_only_the_addressed_rows_of_rings_and_pages_change(draft):
    session, before = scene(draft)
    after = materialized(draft)
    assert before.sequence.frontier[5] > before.sequence.context_frontier[5]
    check_context(session, before, after, (5, 0))
    for lane in LANES:
        assert after.sequence.context_frontier[lane] == before.sequence.frontier[lane]
    assert_same_bytes(
        after.sequence.replace(context_frontier=before.sequence.context_frontier), before.sequence
    )
    assert_same_bytes(
        (after.target, after.pending, after.target_table, after.draft_table),
        (before.target, before.pending, before.target_table, before.draft_table),
    )


@pytest.mark.parametrize("draft", CASES)
def test_g6_a_round_moves_only_the_context_and_no_block_row_survives(draft):
    session, before = scene(draft)
    state, rows = jax.tree.map(jnp.array, before), session.rows(list(LANES))
    extent = extent_of(session.models, state, rows)
    after, _ = speculate(
        session.models, session.params, state, rows, SamplingArrays.greedy(3), extent
    )
    after = cases.host(after)
    check_context(session, before, after, (5, 0))
    for new, old in zip(
        jax.tree.leaves(after.replace(context=())),
        jax.tree.leaves(materialized(draft).replace(context=())),
        strict=True,
    ):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("draft", CASES)
def test_materializing_twice_changes_nothing(draft):
    once = materialized(draft)
    assert_same_bytes(materialized(draft, state=once), once)


@pytest.mark.parametrize("draft", CASES)
def test_idle_rows_change_nothing(draft):
    session, before = scene(draft)
    for rows in (session.rows([]), *map(session.nobody, range(3))):
        assert_same_bytes(materialized(draft, rows=rows), before)


@pytest.mark.parametrize("draft", CASES)
def test_rounds_build_the_context_of_a_fresh_prefill(draft):
    """After rounds and materialize, rings and pages hold what prefilling the ledger gives."""
    session, _ = scene(draft)
    ours = materialized(draft)
    models = cases.tiny_models(*CASES[draft][:2], max(cases.DRAFT_TOKENS), 8)
    fresh = Session(models, cases.leaning_params(models))
    fresh.admit({lane: session.lanes[lane].ledger[:-1] for lane in LANES}, 9)
    theirs = cases.host(fresh.state)
    window, size = models.draft.window, models.run.page_size
    for lane in LANES:
        first, end = live_interval(ours.sequence.context_frontier[lane], window)
        index = np.arange(int(first), int(end)) % window
        position = np.arange(int(end))
        page = session.draft_pages[lane][position // size]
        for leaf in ("key", "value"):
            for new, old in zip(ours.context.rings, theirs.context.rings, strict=True):
                rows = [getattr(x, leaf)[session.lanes[lane].slot][:, index] for x in (new, old)]
                assert_close(*rows, FP32_CHAIN)
            for new, old in zip(ours.context.pages, theirs.context.pages, strict=True):
                rows = [getattr(x, leaf)[:, page, position % size] for x in (new, old)]
                assert_close(*rows, FP32_CHAIN)


@pytest.mark.parametrize("draft", CASES)
def test_rows_are_rotated_by_their_absolute_cache_positions(draft):
    """Position F_ctx + j for pending column j, and neither the column nor the ring index."""
    session, before = scene(draft)
    after, lane, window = materialized(draft), 5, session.models.draft.window
    position = np.arange(before.sequence.context_frontier[lane], before.sequence.frontier[lane])
    features = before.pending.features[lane : lane + 1, : len(position)]
    rows = draft_call(
        session.models, session.params, "context_kv", jnp.array(features),
        jnp.array(position.astype(np.int32)[None]),
    )
    ring = after.context.rings[0]
    slot = session.lanes[lane].slot
    for leaf, expected in zip((ring.key, ring.value), rows[0], strict=True):
        assert_close(leaf[slot][:, position % window].swapaxes(0, 1), expected[0], FP32_CHAIN)


@pytest.mark.parametrize("draft", CASES)
def test_claim_5_pending_rows_are_the_features_of_their_positions(draft):
    """Column j < F - F_ctx belongs to position F_ctx + j; later columns are never read."""
    session, before = scene(draft)
    lane = 5
    covered, frontier = (
        int(getattr(before.sequence, name)[lane]) for name in ("context_frontier", "frontier")
    )
    count = frontier - covered
    assert 0 < count <= session.models.run.block_width
    moved = materialized(draft, lanes=(lane,))
    changed = jax.tree.map(np.array, before)
    changed.pending.features[lane, count:] = np.nan
    assert_same_bytes(materialized(draft, lanes=(lane,), state=changed).context, moved.context)
    changed.pending.features[lane, count - 1] += 1.0
    other = materialized(draft, lanes=(lane,), state=changed)
    slot, window = session.lanes[lane].slot, session.models.draft.window
    for new, old in zip(other.context.rings, moved.context.rings, strict=True):
        differs = (new.key[slot] != old.key[slot]).any(axis=(0, -1))
        assert np.flatnonzero(differs).tolist() == [(frontier - 1) % window]
