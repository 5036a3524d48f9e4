"""The emitted text has exactly the target's distribution, and planted bugs show.

Rounds over a table target, about 80 thousand rows and 200 thousand rounds a case. The full matrix,
some minutes: pytest tests/sampling/test_chi_square.py -m "slow or not slow"
"""

import functools
import importlib
import itertools
import types

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.candidate_selector import conditional_walk
from dflash_jax.sampling import distribution
from dflash_jax.sampling.params import SamplingParams
from tests.sampling import table_target
from tests.sampling.goodness import LEVEL, assert_fits, chi_square, fits

CONTROLS = {
    "plain": {},
    "filters": dict(top_k=3, top_p=0.8, min_p=0.05),
    "penalties": dict(presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.3),
    "mask": dict(allowed_ids=(0, 2, 3, 5, 6)),
}
MATRIX = tuple(
    itertools.product(("dflash", "dflash2"), (1, 3, 7), (0.5, 1.0, 1.7), CONTROLS)
)
# Every value of every factor; every pair of (draft, K) and of (draft, temperature).
USUAL = (
    ("dflash", 1, 0.5, "filters"),
    ("dflash", 3, 1.0, "penalties"),
    ("dflash", 7, 1.7, "plain"),
    ("dflash2", 1, 1.0, "mask"),
    ("dflash2", 3, 1.7, "filters"),
    ("dflash2", 7, 0.5, "penalties"),
)
LEAST_ROUNDS = 200_000
FITS = 10  # four marginals, six pairs
COMPARISONS = FITS * len(MATRIX)
# What a planted bug has to reach: far beyond what any honest case may.
PLANTED = LEVEL / COMPARISONS / 1000

# The module, which the function of the same name hides.
accept_module = importlib.import_module("dflash_jax.steps.accept")


@functools.cache
def honest(draft, draft_tokens):
    return table_target.play(draft, draft_tokens)


@pytest.mark.parametrize(
    "draft, draft_tokens, temperature, controls",
    [pytest.param(*c, marks=() if c in USUAL else pytest.mark.slow) for c in MATRIX],
)
def test_emitted_tokens_have_the_target_s_law(draft, draft_tokens, temperature, controls):
    params = SamplingParams(temperature=temperature, **CONTROLS[controls])
    case = MATRIX.index((draft, draft_tokens, temperature, controls))
    text = table_target.samples(honest(draft, draft_tokens), params, LEAST_ROUNDS, case)
    found = fits(text, table_target.exact_joint(params))
    assert len(found) == FITS
    assert_fits(found, COMPARISONS)


def assert_caught(draft, draft_tokens, **controls):
    """The library as it is now, traced anew, fails the test with few rounds."""
    params = SamplingParams(**controls)
    text = table_target.samples(table_target.play(draft, draft_tokens), params, 30_000, case=99)
    found = fits(text, table_target.exact_joint(params))
    assert min(fit.p_value for fit in found) < PLANTED, found
    with pytest.raises(AssertionError, match="expected p"):
        assert_fits([fit for fit in found if not fit.impossible], COMPARISONS)


def test_planted_bug_q_is_recomputed_at_another_temperature(monkeypatch):
    def recomputed(edges, candidates, temperature, uniforms):
        walk = conditional_walk(edges, candidates, temperature, uniforms)
        before = jnp.pad(walk.ranks[:, :-1], ((0, 0), (1, 0)))
        scores = jnp.take_along_axis(edges, before[:, :, None, None], axis=2)[:, :, 0]
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        return walk.replace(q=weights / weights.sum(-1, keepdims=True))

    monkeypatch.setattr(table_target, "conditional_walk", recomputed)
    assert_caught("dflash2", 1, temperature=0.5)


def test_planted_bug_correction_from_p_instead_of_the_residual(monkeypatch):
    monkeypatch.setattr(accept_module, "_residual", lambda p, proposal, accepted: p)
    assert_caught("dflash2", 1, temperature=1.0)


def test_planted_bug_residual_without_clamp(monkeypatch):
    def unclamped(p, proposal, accepted):
        del accepted  # with K = 1 a rejection is at position 0
        ids, q = proposal.candidates[:, 0], proposal.q[:, 0]
        return p.at[jnp.arange(len(ids))[:, None], ids].add(-q, mode="drop")

    monkeypatch.setattr(accept_module, "_residual", unclamped)
    assert_caught("dflash2", 1, temperature=1.0)


def test_planted_bug_penalties_without_accepted_history(monkeypatch):
    monkeypatch.setattr(distribution, "_overlay", lambda plain, *unused: plain)
    assert_caught("dflash", 3, temperature=1.0, **CONTROLS["penalties"])


def test_planted_bug_accept_key_is_reused_for_the_correction(monkeypatch):
    purpose = accept_module.Purpose
    reused = {item.name: int(item) for item in purpose} | {"CORRECTION": int(purpose.ACCEPT)}
    monkeypatch.setattr(accept_module, "Purpose", types.SimpleNamespace(**reused))
    assert_caught("dflash", 1, temperature=1.0)


def test_chi_square_pools_rare_cells_and_counts_impossible_ones():
    law = np.array([0.5, 0.3, 0.1998, 0.0001, 0.0001, 0.0])
    fit = chi_square("x", np.array([500, 300, 199, 1, 0, 0]), law)
    assert fit.impossible == 0 and fit.freedom == 2
    assert fit.statistic < 0.1 and fit.p_value > 0.9
    assert chi_square("x", np.array([500, 300, 198, 1, 0, 1]), law).impossible == 1
    assert chi_square("x", np.array([400, 400, 199, 1, 0, 0]), law).p_value < 1e-6
