"""Claim 1 for trees: greedy rounds over trees give plain greedy text; and one trace serves all."""


import numpy as np
import pytest

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
# Each value of each factor, and each width beside each kind of target.
USUAL = (
    ("dense", 3, 8, 5), ("moe", 7, 1, 9), ("moe", 3, 3, 8), ("dense", 15, 1, 20),
    ("dense", 7, 8, 16), ("moe", 15, 3, 24), ("moe", 7, 8, 32), ("dense", 3, 3, 32),
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
    check_equivalence(*combination, before=poison_with(np.nan, HUGE))
