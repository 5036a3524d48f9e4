"""Ends of requests, and rounds in which rows, lanes and slots are mixed up."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DtypePolicy
from tests import cases
from tests.steps.harness import Session, assert_same_bytes
from tests.steps.poison import poison_with
from tests.steps.scenes import HUGE, budget, plain_text, resumed


def with_limits(session, *, remaining=None, capacity=None):
    """The session with other budgets or capacities: {lane: number}."""
    sequence = session.state.sequence
    for lane, left in (remaining or {}).items():
        session.lanes[lane].remaining = left
        sequence = sequence.replace(remaining=sequence.remaining.at[lane].set(left))
    for lane, limit in (capacity or {}).items():
        session.lanes[lane].capacity = limit
        sequence = sequence.replace(capacity=sequence.capacity.at[lane].set(limit))
    session.state = session.state.replace(sequence=sequence)
    return session


@pytest.mark.parametrize("combination", [("moe", "dflash", 7, 3), ("dense", "dflash2", 3, 3)])
def test_e8_near_capacity_p_shrinks_to_zero_and_no_write_leaves_the_lane(combination):
    """Each lane ends with F = capacity exactly; a full block would run past it."""
    session = resumed(*combination, before=poison_with(np.nan, HUGE))
    room = {lane: known.frontier + 1 + lane for lane, known in session.lanes.items()}
    with_limits(session, capacity=room)
    text, sizes = plain_text(combination[0]), collections.Counter()
    while live := [lane for lane, known in session.lanes.items() if known.live]:
        chosen = live[:3]
        spare = [room[lane] - session.lanes[lane].frontier - 1 for lane in chosen]
        scratch = session.round(chosen)
        for row, left in enumerate(spare):
            allowed = min(combination[2], left)
            assert scratch.acceptance.accepted[row] <= allowed
            sizes[allowed] += 1
    assert sizes[0] and sizes[combination[2]]
    for lane, known in session.lanes.items():
        assert known.frontier == room[lane]
        assert known.text == text[lane][: len(known.text)]
        assert session.state.sequence.frontier[lane] == room[lane]


def test_a_full_lane_writes_its_last_page_and_no_other():
    """Capacity max_context: the last position of the last page is written, pages of others not."""
    session = resumed("moe", "dflash", 7, 3)
    lane, end = 5, cases.MAX_CONTEXT
    extra = with_limits(session, remaining={lane: 500})
    others = np.isin(np.arange(session.models.run.pages), session.target_pages[lane], invert=True)
    before = cases.host(session.state.target.kv)
    while extra.lanes[lane].live:
        extra.round([lane])
    assert session.lanes[lane].frontier == end
    after = cases.host(session.state.target.kv)
    last = session.target_pages[lane][-1]
    for new, old in zip(after, before, strict=True):
        assert_same_bytes(new.key[:, others], old.key[:, others])
        assert (new.key[:, last, -1] != old.key[:, last, -1]).any()


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_budget_of_one_verifies_the_anchor_alone(left):
    session = with_limits(resumed("moe", "dflash", 7, 3), remaining={4: left})
    while session.lanes[4].live:
        session.round([4, 2, 1])
    known = session.lanes[4]
    assert known.text == plain_text("moe")[4][: 1 + left]
    assert known.remaining == 0


def test_e7_after_an_end_inside_a_block_state_and_text_agree():
    """EOS at every index of a licensed block: F counts what was emitted, and no more."""
    ended = collections.Counter()
    for seed in range(3):
        session = resumed("moe", "dflash", 7, 8)
        rng = np.random.default_rng(seed)
        while live := [
            lane for lane, known in session.lanes.items() if known.live and len(known.text) < 20
        ]:
            cut = {}

            def keep(lane, licensed, cut=cut, rng=rng):
                cut[lane] = int(rng.integers(1, licensed + 1))
                return cut[lane]

            session.round(live, keep)
            ended.update(cut.values())
            frontiers = np.asarray(session.state.sequence.frontier)
            for lane in live:
                known = session.lanes[lane]
                assert frontiers[lane] == known.prompt + len(known.text) - 1
                assert known.text == plain_text("moe")[lane][: len(known.text)]
    assert set(ended) == set(range(1, 9))


@pytest.mark.parametrize("combination", [("moe", "dflash", 7, 3), ("dense", "dflash2", 3, 3)])
def test_c11_permuted_rows_give_permuted_outputs_and_the_same_state(combination):
    first, second = resumed(*combination), resumed(*combination)
    for lanes in ([3, 0, 6], [6, 3, 1]):
        ours, theirs = first.round(lanes), second.round(lanes[::-1])
        assert_same_bytes(
            cases.host(ours), jax.tree.map(lambda x: np.asarray(x)[::-1], cases.host(theirs))
        )
    assert_same_bytes(cases.host(first.state), cases.host(second.state))


def test_permuted_lanes_slots_and_pages_change_nothing_else():
    """The same rounds on a state whose lanes, slots and pages are renamed: the same bytes."""
    combination = ("moe", "dflash", 7, 3)
    first, second = resumed(*combination), resumed(*combination)
    run = first.models.run
    rng = np.random.default_rng(11)
    lane, slot, page, draft_page = (
        rng.permutation(n) for n in (run.lanes, run.slots, run.pages, run.pages)
    )
    second.state = jax.tree.map(jnp.array, renamed(first, lane, slot, page, draft_page))
    second.slot_of = np.empty_like(first.slot_of)
    second.slot_of[lane] = slot[first.slot_of]
    known = {}
    for old in first.lanes:
        known[int(lane[old])] = second.lanes[old]
        known[int(lane[old])].slot = int(second.slot_of[lane[old]])
    second.lanes = known
    for lanes in ([3, 0, 6], [5, 3]):
        ours, theirs = first.round(lanes), second.round([int(lane[n]) for n in lanes])
        live = len(lanes)
        assert_same_bytes(*(
            jax.tree.map(lambda x, n=live: np.asarray(x)[:n], s) for s in (ours, theirs)
        ))
    assert_same_bytes(
        cases.host(second.state), renamed(first, lane, slot, page, draft_page)
    )


def renamed(session, lane, slot, page, draft_page):
    """The state with lane n moved to lane[n], and so on, as NumPy arrays."""
    state = cases.host(session.state)

    def moved(tree, to, axis=0):
        def move(x):
            out = np.empty_like(x)
            np.moveaxis(out, axis, 0)[to] = np.moveaxis(x, axis, 0)
            return out

        return jax.tree.map(move, tree)

    target = state.target.replace(
        kv=moved(state.target.kv, page, 1), gdn=moved(state.target.gdn, slot),
        continuation=moved(state.target.continuation, slot),
    )
    context = state.context.replace(
        rings=moved(state.context.rings, slot), pages=moved(state.context.pages, draft_page, 1)
    )
    tables = {
        name: moved(
            getattr(state, name).replace(ids=names[getattr(state, name).ids].astype(np.int32)), lane
        )
        for name, names in (("target_table", page), ("draft_table", draft_page))
    }
    return state.replace(
        target=target, context=context, pending=moved(state.pending, lane),
        sequence=moved(state.sequence, lane), **tables,
    )


@pytest.mark.parametrize(
    "pair",
    [("dense", "dflash2"), pytest.param(("moe", "dflash"), marks=pytest.mark.slow)],
    ids=str,
)
def test_g1_bf16_text_is_plain_text_up_to_a_near_tie(pair):
    """The default dtypes under strict promotion; a first difference needs a small top-2 margin."""
    texts, margins = {}, {}
    for draft, draft_tokens in ((None, 0), (pair[1], 3)):
        models = cases.tiny_models(pair[0], draft, draft_tokens, 8, dtypes=DtypePolicy())
        session = Session(models, cases.leaning_params(models), poison_with(np.nan, HUGE))
        session.admit(dict(enumerate(cases.prompts(models))), budget)
        if draft is not None:
            texts[draft] = session.run(seed=3)
            continue
        while live := [lane for lane, known in session.lanes.items() if known.live]:
            scratch = session.round(live)
            top = np.sort(np.asarray(scratch.verification.logits[:, 0, :250], np.float32))[:, -2:]
            for row, lane in enumerate(live):
                place = (lane, len(session.lanes[lane].text) - 1)
                margins[place] = (top[row, 1] - top[row, 0]) / np.abs(top[row, 1])
        texts[None] = {lane: known.text for lane, known in session.lanes.items()}
    equal = 0
    for lane, plain in texts[None].items():
        ours = texts[pair[1]][lane]
        assert len(ours) == len(plain)
        first = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=True)) if a != b), None)
        assert first is None or margins.get((lane, first), 0.0) < 2.0**-6, (lane, first)
        equal += first is None
    assert equal >= 4
