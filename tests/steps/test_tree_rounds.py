"""Claim 1 for trees: greedy rounds over trees give plain greedy text; and one trace serves all."""


import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.state.sequence import SequenceState, round_extent
from dflash_jax.steps import commit, speculate
from tests import cases
from tests.steps.poison import poison_with
from tests.steps.scenes import HUGE, budget, plain_text, resumed

DEPTHS, LARGEST = (3, 7, 15), 32


def widths(draft_tokens):
    return (draft_tokens + 2, draft_tokens + 5, draft_tokens + 9, LARGEST)


EVERY = tuple(
    (target, k, b, width)
    for target in cases.TARGETS for k in DEPTHS for b in cases.BATCHES for width in widths(k)
)
# Each value of each factor, and no two of them together everywhere.
USUAL = (
    ("dense", 3, 8, 5), ("moe", 7, 1, 12), ("dense", 15, 3, 24), ("moe", 3, 3, 32),
)


def check_equivalence(target, draft_tokens, batch, nodes, before=None):
    """Plain text, and how often a path left the main chain."""
    expected = {lane: text[: budget(lane)] for lane, text in plain_text(target).items()}
    session = resumed(target, "dflash2", draft_tokens, batch, before, tree_nodes=nodes)
    rng, left = np.random.default_rng(1), 0
    while live := [lane for lane, known in session.lanes.items() if known.live]:
        scratch = session.round(rng.permutation(live)[:batch].tolist())
        accepted = np.asarray(scratch.acceptance.accepted)
        for path, count in zip(np.asarray(scratch.acceptance.path), accepted, strict=True):
            left += bool((path[: count + 1] > draft_tokens).any())
    assert {lane: known.text for lane, known in session.lanes.items()} == expected
    assert max(session.licensed) > 1, "no proposal was ever accepted"
    return left


@pytest.mark.parametrize(
    "combination",
    [pytest.param(c, marks=() if c in USUAL else pytest.mark.slow, id=str(c)) for c in EVERY],
)
def test_greedy_trees_give_plain_text(combination):
    left = check_equivalence(*combination, before=poison_with(np.nan, HUGE))
    # The draft of the dense pair agrees with its target where it agrees at all.
    assert left or combination[0] == "dense" or combination not in USUAL


def test_one_trace_serves_trees_chains_and_every_set_of_rows():
    """Different budgets, rows with and without a tree, parts of a licence kept: no compile."""
    session = resumed("dense", "dflash2", 3, 8, tree_nodes=5)
    session.round([1, 2, 3])
    first = speculate._cache_size(), commit._cache_size()
    session.round([7])
    session.run(keep=lambda lane, licensed: max(licensed - lane % 2, 0) or licensed)
    assert (speculate._cache_size(), commit._cache_size()) == first


def test_rows_without_budget_or_room_for_a_tree_keep_their_chain():
    remaining = jnp.array([99, 8, 7, 1, 99, 99, 99, 99, 99], jnp.int32)
    room = jnp.array([99, 99, 99, 99, 12, 11, 8, 7, 0], jnp.int32)
    rows = SequenceState.zeros(9, 3).replace(
        frontier=jnp.full((9,), 20, jnp.int32), remaining=remaining, capacity=20 + room
    )
    found = round_extent(rows, draft_tokens=7, whole_block=True, tree_nodes=12)
    assert found.proposals.tolist() == [7, 7, 6, 0, 7, 7, 7, 6, 0]
    assert found.columns.tolist() == [12, 12, 7, 1, 12, 8, 8, 7, 0]
    assert found.draft_columns.tolist() == [8] * 8 + [0]
