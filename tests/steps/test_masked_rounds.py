"""Rounds in two halves: the host reads the drafts and gives one mask per column."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.steps import draft_only, judge, speculate
from tests import cases
from tests.steps.harness import Session, assert_same_bytes, extent_of
from tests.steps.scenes import plain_text, resumed

TOKENS = 20  # compared per lane; every lane's budget is larger


def twice_at_most(history):
    """After the same id twice another must follow."""
    allowed = np.ones(cases.TARGETS["dense"].public_vocab, bool)
    if len(history) > 1 and history[-1] == history[-2]:
        allowed[history[-1]] = False
    return allowed


def masked_plain_text(target: str):
    models = cases.tiny_models(target, None, 0, 8)
    session = Session(models, cases.leaning_params(models))
    session.admit(dict(enumerate(cases.prompts(models))), TOKENS)
    return session.run(grammar=twice_at_most)


@pytest.mark.parametrize("combination", [("dense", "dflash", 7, 3), ("moe", "dflash2", 3, 3)])
def test_speculation_under_a_grammar_of_the_drafts_is_plain_decoding_under_it(combination):
    expected = masked_plain_text(combination[0])
    session = resumed(*combination)
    text = session.run(seed=1, grammar=twice_at_most)
    assert {lane: ids[:TOKENS] for lane, ids in text.items()} == expected
    assert max(session.licensed) > 1, "no proposal was ever accepted"
    free = {lane: ids[:TOKENS] for lane, ids in plain_text(combination[0]).items()}
    assert expected != free, "the grammar never mattered"
    for lane, ids in text.items():
        ledger = [*session.lanes[lane].ledger[: -len(ids)], *ids]
        # The first token was chosen before the grammar was in force.
        start = len(ledger) - len(ids) + 1
        assert all(twice_at_most(ledger[:i])[ledger[i]] for i in range(start, len(ledger)))


def sampled(batch: int) -> SamplingArrays:
    """Rows that differ, one of them greedy."""
    controls = [SamplingParams(temperature=0.6 * row, top_p=0.9, seed=row) for row in range(batch)]
    return SamplingArrays.of(controls, cases.TARGETS["dense"].public_vocab)


def halves(session, lanes, controls, allowed):
    """State and scratch of `draft_only` and `judge` on a copy of the session's state."""
    models, params, rows = session.models, session.params, session.rows(lanes)
    state = jax.tree.map(jnp.array, session.state)
    extent = extent_of(models, state, rows)
    state, proposal = draft_only(models, params, state, rows, controls, extent)
    return state, judge(models, params, state, rows, proposal, controls, extent, allowed)


@pytest.mark.parametrize("tree_nodes", [0, pytest.param(12, marks=pytest.mark.slow)])
def test_a_round_in_two_halves_without_a_restriction_is_a_round(tree_nodes):
    session = resumed("dense", "dflash2", 7, 3, tree_nodes=tree_nodes)
    lanes, controls = [4, 0, 6], sampled(3)
    rows = session.rows(lanes)
    columns, public = session.models.run.block_width, session.models.target.public_vocab
    allowed = jnp.ones((3, tree_nodes or columns, public), bool)
    state, scratch = halves(session, lanes, controls, allowed)
    extent = extent_of(session.models, session.state, rows)
    whole = speculate(session.models, session.params, session.state, rows, controls, extent)
    ids = ("accepted", "licensed", "outputs", "path", "fault")
    for name in ids:
        assert_same_bytes(getattr(scratch.acceptance, name), getattr(whole[1].acceptance, name))
    assert_same_bytes(scratch.proposal.tokens, whole[1].proposal.tokens)
    assert_same_bytes(state.sequence, whole[0].sequence)


def test_a_column_that_allows_nothing_is_a_fault_of_its_row_alone():
    session = resumed("dense", "dflash", 7, 3)
    lanes, controls = [4, 0, 6], sampled(3)
    free = np.ones((3, 8, session.models.target.public_vocab), bool)
    barred = free.copy()
    barred[1, 0] = False
    (_, usual), (_, stopped) = (
        halves(session, lanes, controls, jnp.array(mask)) for mask in (free, barred)
    )
    assert np.asarray(stopped.acceptance.fault).tolist() == [False, True, False]
    assert not np.asarray(usual.acceptance.fault).any()
    for name in ("accepted", "licensed", "outputs"):
        one, other = (np.asarray(getattr(x.acceptance, name))[[0, 2]] for x in (stopped, usual))
        assert_same_bytes(one, other)
