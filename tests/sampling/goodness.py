"""The chi-square test of counts against exact probabilities."""

import dataclasses
import itertools

import numpy as np
from scipy import stats

SMALLEST = 5.0  # expectation below which cells are pooled
LEVEL = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """`impossible` counts samples of probability zero: any is a failure whatever `p_value` says."""

    name: str
    statistic: float
    freedom: int
    p_value: float
    impossible: int


def chi_square(name: str, counts, law) -> Fit:
    """Pearson's test of counts against a law of the same shape; rare cells are pooled."""
    counts, law = np.ravel(counts), np.ravel(law)
    impossible = int(counts[law <= 0].sum())
    expected = law * counts.sum()
    order = np.argsort(expected)
    rare = max(int((expected < SMALLEST).sum()), 1)
    while rare < len(order) and expected[order[:rare]].sum() < SMALLEST:
        rare += 1
    pooled, kept = order[:rare], order[rare:]
    seen = np.append(counts[kept], counts[pooled].sum())
    wanted = np.append(expected[kept], expected[pooled].sum())
    statistic = float(np.sum((seen - wanted) ** 2 / wanted))
    freedom = len(wanted) - 1
    p_value = float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0
    return Fit(
        name=name, statistic=statistic, freedom=freedom, p_value=p_value, impossible=impossible
    )


def fits(tokens, joint) -> list[Fit]:
    """Every marginal and every joint pair of tokens [N, T] under the law [V] * T."""
    length, size = tokens.shape[1], joint.shape[0]
    found = []
    for kept in (*[(i,) for i in range(length)], *itertools.combinations(range(length), 2)):
        dropped = tuple(i for i in range(length) if i not in kept)
        cells = np.ravel_multi_index([tokens[:, i] for i in kept], (size,) * len(kept))
        counts = np.bincount(cells, minlength=size ** len(kept))
        name = ",".join(str(i + 1) for i in kept)
        found.append(chi_square(name, counts, joint.sum(axis=dropped)))
    return found


def assert_fits(found: list[Fit], comparisons: int) -> None:
    """Every fit has p > LEVEL after a Bonferroni correction, and nothing impossible occurred."""
    for fit in found:
        assert fit.impossible == 0, f"{fit}: tokens of probability zero"
        assert fit.p_value > LEVEL / comparisons, f"{fit}: expected p > {LEVEL / comparisons:.1e}"
