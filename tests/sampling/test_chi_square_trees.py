"""Text emitted through trees has exactly the target's distribution, and planted bugs show.

The full matrix: pytest tests/sampling/test_chi_square_trees.py -m "slow or not slow"
"""

import dataclasses
import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingParams
from dflash_jax.sampling.uniform import Purpose, uniform
from tests.sampling import table_target
from tests.sampling.goodness import LEVEL, assert_fits, fits
from tests.sampling.test_chi_square import CONTROLS, LEAST_ROUNDS

MATRIX = tuple(itertools.product(
    ((1, 4), (2, 4), (3, 8), (3, 32), (7, 16)), (0.5, 1.0, 1.7), CONTROLS
))
# Every temperature and every kind of control.
USUAL = (
    ((2, 4), 0.5, "plain"),
    ((1, 4), 1.0, "mask"),
    ((3, 8), 1.7, "penalties"),
    ((3, 8), 1.0, "filters"),
)
FITS = 10  # four marginals, six pairs
COMPARISONS = FITS * (len(MATRIX) + 1)
PLANTED = LEVEL / COMPARISONS / 1000

# The modules, which functions of the same names may hide.
accept_module = importlib.import_module("dflash_jax.steps.accept_tree")
tree_module = importlib.import_module("dflash_jax.steps.tree")
ordinary_tables = table_target.tables


@functools.cache
def honest(draft_tokens, nodes):
    return table_target.play("dflash2", draft_tokens, nodes)


@pytest.mark.parametrize(
    "shape, temperature, controls",
    [pytest.param(*c, marks=() if c in USUAL else pytest.mark.slow) for c in MATRIX],
)
def test_emitted_tokens_have_the_target_s_law(shape, temperature, controls):
    params = SamplingParams(temperature=temperature, **CONTROLS[controls])
    case = 200 + MATRIX.index((shape, temperature, controls))
    text = table_target.samples(honest(*shape), params, LEAST_ROUNDS, case)
    found = fits(text, table_target.exact_joint(params))
    assert len(found) == FITS
    assert_fits(found, COMPARISONS)


def constructed():
    """Tables in which the second main token decides whether the anchor has a second child.

    The law after the anchor is (0.72, 0.28), the next one (0.5, 0.25, 0.25), so that the priority
    of column 1 is above or below the anchor's; the target likes the second token best.
    """
    base = ordinary_tables()
    laws = np.full((table_target.LONGEST, table_target.CANDIDATES), 1e-9)
    laws[:, :3] = 0.5, 0.25, 0.25
    laws[0, :3] = 0.72, 0.28, 1e-9
    shape = base.unary.shape
    after = np.full(base.after.shape, 30.0)
    after[:, : table_target.V_PUB] = np.log([0.2, 0.5, 0.1, 0.1, 0.04, 0.03, 0.02, 0.01])
    return dataclasses.replace(
        base, after=after.astype(np.float32), before=np.zeros_like(base.before),
        candidates=np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape),
        unary=np.broadcast_to(np.log(laws), shape).astype(np.float32),
        query=np.zeros_like(base.query),
    )


def judged(draft_tokens, nodes, rounds=60_000, **controls):
    """Fits of the library as it is now, traced anew."""
    params = SamplingParams(**controls)
    game = table_target.play("dflash2", draft_tokens, nodes)
    text = table_target.samples(game, params, rounds, case=98)
    return fits(text, table_target.exact_joint(params))


def assert_caught(found):
    assert min(fit.p_value for fit in found) < PLANTED, found
    with pytest.raises(AssertionError, match="expected p"):
        assert_fits([fit for fit in found if not fit.impossible], COMPARISONS)


def test_draws_that_decide_which_columns_exist_are_not_used_again(monkeypatch):
    """Keyed by position as on a chain, a deep draw comes again in the next round: it must show."""
    monkeypatch.setattr(table_target, "tables", constructed)
    assert_fits(judged(2, 4, temperature=1.0), COMPARISONS)

    def by_position(sequence, takes_tree, positions):
        step = jnp.arange(positions, dtype=jnp.int32)
        position = sequence.frontier[:, None] + step
        return uniform(sequence.seed[:, None], position, Purpose.PROPOSAL, 0)

    monkeypatch.setattr(table_target, "walk_uniforms", by_position)
    assert_caught(judged(2, 4, temperature=1.0))


def test_planted_bug_the_law_of_a_sibling_is_not_renormalised(monkeypatch):
    monkeypatch.setattr(
        accept_module, "_without", lambda law, taken: jnp.where(taken, 0.0, law)
    )
    assert_caught(judged(1, 4, temperature=1.0))


def test_planted_bug_a_sibling_is_judged_by_the_whole_law(monkeypatch):
    monkeypatch.setattr(accept_module, "_without", lambda law, taken: law)
    assert_caught(judged(1, 4, temperature=1.0))


def test_planted_bug_a_column_exists_only_if_its_own_draw_is_likely(monkeypatch):
    add_child = tree_module._add_child

    def afterwards(growth, column, *arguments):
        grown = add_child(growth, column, *arguments)
        parent = grown.parent[:, column]
        share = jnp.take_along_axis(
            grown.at(parent).law, grown.rank[:, column][:, None], axis=1
        )[:, 0]
        keeps = (parent < column) & (share > 0.2)

        def choose(new, old):
            return jnp.where(keeps.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        return jax.tree.map(choose, grown, growth)

    monkeypatch.setattr(tree_module, "_add_child", afterwards)
    assert_caught(judged(1, 3, temperature=1.0))


def test_planted_bug_penalties_of_the_main_chain_in_every_column(monkeypatch):
    adjusted = accept_module.adjusted_logits

    def chained(logits, sampling, counts, seen, drafts, allowed, ancestors):
        return adjusted(logits, sampling, counts, seen, drafts, allowed, None)

    monkeypatch.setattr(accept_module, "adjusted_logits", chained)
    assert_caught(judged(3, 8, temperature=1.0, **CONTROLS["penalties"]))


def test_planted_bug_the_correction_forgets_the_siblings(monkeypatch):
    terminal = accept_module._terminal

    def forgetful(law, refused, proposal, sequence, last, top):
        whole = accept_module._at_candidates(law, proposal)[1]
        return terminal(law, refused.replace(left=whole), proposal, sequence, last, top)

    monkeypatch.setattr(accept_module, "_terminal", forgetful)
    assert_caught(judged(1, 4, temperature=1.0))
