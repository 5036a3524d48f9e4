"""A figure over prompts with its 95% bootstrap interval."""

import dataclasses

import numpy as np

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure and its 95% bootstrap interval over prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def resamples(count: int, seed: int) -> np.ndarray:
    """[RESAMPLES, count] how often each prompt is drawn, with replacement."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(count, np.full(count, 1.0 / count), size=RESAMPLES)


def ratio(numerator: np.ndarray, denominator: np.ndarray, weights: np.ndarray) -> Interval:
    """Sum over sum, with the percentiles of the same over the resamples.

    Args: numerator, denominator: [prompts]. weights: of `resamples`.
    """
    below = weights @ denominator
    drawn = (weights @ numerator)[below > 0] / below[below > 0]
    value = numerator.sum() / denominator.sum() if denominator.sum() else float("nan")
    if not len(drawn):
        return Interval(value=value, low=value, high=value)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(value=float(value), low=float(low), high=float(high))
