"""The emitted text has exactly the target's distribution, and planted bugs show.

Rounds over a table target, about 80 thousand rows and 200 thousand rounds a case. The full matrix,
some minutes: pytest tests/sampling/test_chi_square.py -m "slow or not slow"
"""

import functools
import itertools

import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingParams
from tests.sampling import planted, table_target
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


@pytest.mark.parametrize(
    "plant, draft, draft_tokens, temperature, controls",
    [
        (planted.q_recomputed, "dflash2", 1, 0.5, "plain"),
        (planted.correction_from_p, "dflash2", 1, 1.0, "plain"),
        (planted.residual_without_clamp, "dflash2", 1, 1.0, "plain"),
        (planted.penalties_without_history, "dflash", 3, 1.0, "penalties"),
        (planted.accept_key_reused, "dflash", 1, 1.0, "plain"),
    ],
)
def test_planted_bug_is_caught(monkeypatch, plant, draft, draft_tokens, temperature, controls):
    params = SamplingParams(temperature=temperature, **CONTROLS[controls])
    plant(monkeypatch)
    text = table_target.samples(table_target.play(draft, draft_tokens), params, 30_000, case=99)
    found = fits(text, table_target.exact_joint(params))
    assert min(fit.p_value for fit in found) < PLANTED
    with pytest.raises(AssertionError, match="expected p|probability zero"):
        assert_fits(found, COMPARISONS)


def test_chi_square_pools_rare_cells_and_counts_impossible_ones():
    law = np.array([0.5, 0.3, 0.1998, 0.0001, 0.0001, 0.0])
    fit = chi_square("x", np.array([500, 300, 199, 1, 0, 0]), law)
    assert fit.impossible == 0 and fit.freedom == 2
    assert fit.statistic < 0.1 and fit.p_value > 0.9
    assert chi_square("x", np.array([500, 300, 198, 1, 0, 1]), law).impossible == 1
    assert chi_square("x", np.array([400, 400, 199, 1, 0, 0]), law).p_value < 1e-6
