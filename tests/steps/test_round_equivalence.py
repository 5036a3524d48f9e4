"""Claim 1: greedy speculative output is plain greedy output, token for token, in float32."""

import collections

import numpy as np
import pytest

from tests import cases
from tests.steps.harness import Session
from tests.steps.poison import poison_with
from tests.steps.scenes import HUGE, budget, plain_text, resumed
from tests.tolerances import FP32_CHAIN, assert_close


def check_equivalence(combination):
    target, draft, _, _ = combination
    expected = {lane: text[: budget(lane)] for lane, text in plain_text(target).items()}
    session = resumed(*combination)
    assert session.run(seed=1) == expected
    assert max(session.licensed) > 1, "no proposal was ever accepted"
    poisoned = resumed(*combination, before=poison_with(np.nan, HUGE, -HUGE))
    assert poisoned.run(seed=2) == expected


@pytest.mark.parametrize("combination", cases.covering_combinations(), ids=str)
def test_speculative_text_is_plain_text(combination):
    check_equivalence(combination)


@pytest.mark.slow
@pytest.mark.parametrize(
    "combination",
    [c for c in cases.every_combination() if c not in cases.covering_combinations()],
    ids=str,
)
def test_speculative_text_is_plain_text_in_every_combination(combination):
    check_equivalence(combination)


def test_the_combinations_cover_all_pairs_of_values():
    chosen, every = cases.covering_combinations(), cases.every_combination()
    for first in range(4):
        for second in range(first):
            seen = {(c[first], c[second]) for c in chosen}
            assert seen == {(c[first], c[second]) for c in every}


def test_draft_less_rounds_agree_at_every_batch_size():
    models = cases.tiny_models("dense", None, 0, 3)
    session = Session(models, cases.leaning_params(models))
    for lanes in ((0, 1, 2), (3, 4, 5), (6, 7)):
        prompts = cases.prompts(models)
        session.admit({lane: prompts[lane] for lane in lanes}, 12)
    text = session.run(seed=4)
    assert text == {lane: full[:12] for lane, full in plain_text("dense").items()}


ORACLE_CASES = (
    ("dense", "dflash", 15, 8),
    ("moe", "dflash2", 15, 3),
    ("dense", "dflash2", 3, 1),
    ("moe", "dflash", 1, 1),
)


@pytest.mark.parametrize("combination", ORACLE_CASES, ids=str)
def test_d3_oracle_proposals_wrong_at_every_position(combination):
    """Each A in 0..K occurs, the text stays plain, and so do the recurrent and conv states."""
    target, _, draft_tokens, _ = combination
    session = resumed(*combination, before=poison_with(np.nan, HUGE))
    extend_budgets(session, 48 - budget(0))
    expected, rng = plain_text(target), np.random.default_rng(0)
    planned, seen = collections.Counter(), collections.Counter()
    while live := [lane for lane, known in session.lanes.items() if len(known.text) < 48]:
        chosen = rng.permutation(live)[: session.models.run.batch].tolist()
        proposals, accepted = {}, {}
        for lane in chosen:
            done = len(session.lanes[lane].text)
            # The rarest A so far, and among those the longest, while there is room for it.
            wanted = min(range(draft_tokens + 1), key=lambda a: (planned[a], -a))
            planned[wanted] += done + draft_tokens < 48
            accepted[lane] = wanted
            proposals[lane] = oracle(expected[lane][done:], draft_tokens, wanted)
        scratch = session.round(chosen, proposals=proposals)
        for row, lane in enumerate(chosen):
            text = session.lanes[lane].text
            assert text[:48] == expected[lane][: len(text)]
            if len(text) < 48:
                assert scratch.acceptance.accepted[row] == accepted[lane]
                seen[accepted[lane]] += 1
    assert set(seen) == set(range(draft_tokens + 1))
    check_states(session, target)


def extend_budgets(session, extra: int):
    """Lets every lane publish `extra` tokens more."""
    sequence = session.state.sequence
    sequence = sequence.replace(remaining=sequence.remaining + extra)
    session.state = session.state.replace(sequence=sequence)
    for known in session.lanes.values():
        known.remaining += extra


def oracle(future, draft_tokens, accepted):
    """K proposals: the true continuation, false right after the first `accepted`."""
    tokens = (future + [0] * draft_tokens)[:draft_tokens]
    if accepted < draft_tokens:
        tokens[accepted] = (tokens[accepted] + 1) % 250
    return tokens


def check_states(session, target):
    """GDN images after the last round equal those of a chunked prefill of the same tokens."""
    models = cases.tiny_models(target, None, 0, 8)
    fresh = Session(models, cases.leaning_params(models))
    history = {lane: known.ledger[: known.frontier] for lane, known in session.lanes.items()}
    fresh.admit(history, 2)
    slots = session.slot_of
    for ours, theirs in zip(session.state.target.gdn, fresh.state.target.gdn, strict=True):
        assert_close(ours.recurrent[slots], theirs.recurrent[slots], FP32_CHAIN)
        assert_close(ours.conv[slots], theirs.conv[slots], FP32_CHAIN)
    continuation = session.state.target.continuation
    assert_close(continuation[slots], fresh.state.target.continuation[slots], FP32_CHAIN)


def test_e7_keeping_any_part_of_a_round_leaves_plain_text():
    """The host may keep any N <= L of each row, and the next round continues from there."""
    session = resumed("moe", "dflash", 7, 8, before=poison_with(np.nan, HUGE))
    rng = np.random.default_rng(9)
    kept = collections.Counter()

    def some(lane, licensed):
        count = int(rng.integers(0, licensed + 1))
        kept[licensed - count] += 1
        return count

    expected = {lane: text[: budget(lane)] for lane, text in plain_text("moe").items()}
    assert session.run(seed=3, keep=some) == expected
    assert len(kept) > 3
