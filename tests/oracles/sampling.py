"""Processed distributions and exact acceptance in float64 with a plain sort, from contracts 7.

Everything is one column of one request; logits and laws are arrays over the public ids.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

PREFILL, DECODE, ACCEPT, CORRECTION, BONUS, PROPOSAL = range(6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Controls:
    """What one request asks for, as the represented (fp32) numbers."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    allowed: Sequence[int] | None = None

    @classmethod
    def of(cls, params) -> "Controls":
        """The controls of an object with the fields of `SamplingParams`, rounded to fp32."""

        def number(name):
            return float(np.float32(getattr(params, name)))

        return cls(
            temperature=number("temperature"),
            top_k=params.top_k,
            top_p=number("top_p"),
            min_p=number("min_p"),
            presence=number("presence_penalty"),
            frequency=number("frequency_penalty"),
            repetition=number("repetition_penalty"),
            bias={token: float(np.float32(value)) for token, value in params.logit_bias.items()},
            allowed=params.allowed_ids,
        )


def adjusted(logits, controls: Controls, counts, prompt_seen, drafts=(), allowed=None):
    """Steps 1 and 2: bias, repetition, presence, frequency, masks; `drafts` are d_1..d_j."""
    out = np.array(logits, np.float64)
    for token in range(len(out)):
        count = int(counts[token]) + sum(1 for draft in drafts if draft == token)
        value = out[token] + controls.bias.get(token, 0.0)
        if count > 0 or prompt_seen[token]:
            factor = controls.repetition
            value = value / factor if value > 0 else value * factor
        value -= controls.presence * (count > 0) + controls.frequency * count
        forbidden = controls.allowed is not None and token not in controls.allowed
        if forbidden or (allowed is not None and not allowed[token]):
            value = -np.inf
        out[token] = value
    return out


def ranked(values) -> list[int]:
    """Ids in the order of candidates: value descending, id ascending."""
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def target_distribution(values, controls: Controls, max_candidates: int = 0):
    """Steps 4 to 8: p over all ids from adjusted logits, at temperature > 0."""
    order = [token for token in ranked(values) if values[token] > -np.inf]
    for limit in (controls.top_k, max_candidates):
        if limit:
            order = order[:limit]
    best = values[order[0]]
    weights = [np.exp((values[token] - best) / controls.temperature) for token in order]
    goal = controls.top_p * sum(weights)
    p, reached = np.zeros(len(values)), 0.0
    for token, weight in zip(order, weights, strict=True):
        if weight < controls.min_p:
            break
        p[token] = weight
        reached += weight
        if controls.top_p < 1 and reached >= goal:
            break
    return p / p.sum()


def inverse_cdf(weights, u: float) -> int:
    """First id, in id order, whose cumulative weight exceeds u times the total."""
    goal, cumulative, last = u * np.sum(weights), 0.0, -1
    for token, weight in enumerate(weights):
        cumulative += weight
        if weight > 0:
            last = token
            if goal < cumulative:
                return token
    return last


def accept_chain(laws, drafts, retained, draw):
    """One round of a sampled row.

    Args:
      laws: p of columns 0..P.
      drafts: d_1..d_P.
      retained: q of each position as {id: probability}.
      draw: (purpose, offset) -> uniform at position F + offset.
    Returns:
      (A, terminal id).
    """
    for index, (token, q) in enumerate(zip(drafts, retained, strict=True)):
        p = laws[index]
        if not (p[token] > 0 and draw(ACCEPT, index + 1) * q[token] < p[token]):
            left = residual(p, q)
            if left.sum() <= 0:
                return index, int(np.argmax(p))
            return index, inverse_cdf(left, draw(CORRECTION, index + 1))
    return len(drafts), inverse_cdf(laws[len(drafts)], draw(BONUS, len(drafts) + 1))


def residual(p, q: Mapping[int, float]):
    """max(p - q, 0), not normalised; ids from len(p) on hold nothing."""
    left = np.array(p, np.float64)
    for token, mass in q.items():
        if token < len(left):
            left[token] = max(left[token] - mass, 0.0)
    return left
