"""How good a draft is: accepted length by the library's own rounds, and recall of its candidates.

Accepted length comes from `engine.generate`, so it is what a user gets. Recall looks at one block
per anchor of the target's own text: is the token at a mask's position the best candidate, or among
the 16 best of the head? (Reported apart: a path can fail although every token was a candidate.)
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dflash_jax.config import DraftConfig, DtypePolicy, TargetConfig
from dflash_jax.engine.generate import generate
from dflash_jax.engine.request import Output
from dflash_jax.ops.linear import linear
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params
from dflash_jax.training.forward import block_labels, draft_forward, target_forward
from dflash_jax.training.intervals import Interval, ratio, resamples
from dflash_jax.training.loss import public_scores

GREEDY = SamplingParams()
RECALL_DEPTH = 16
ANCHOR_STRIDE = 8  # positions between the anchors that recall looks at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Fields:
      prompts, new_tokens: how many, and tokens each.
      rounds: speculative rounds in all.
      tokens_per_round: outputs of an average round.
      conditional: per position, share of rounds that accepted it among those that accepted all
        positions before it.
    """

    prompts: int
    new_tokens: int
    rounds: int
    tokens_per_round: Interval
    conditional: list[Interval]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
    """Per position i = 0..K-1. at_1: the head's best is the token; at_16: one of its 16 best is."""

    at_1: list[float]
    at_16: list[float]


def measure_acceptance(
    models: Models, params: Params, prompts: Sequence[Sequence[int]], new_tokens: int, *,
    sampling: SamplingParams = GREEDY, seed: int = 0,
) -> tuple[Acceptance, list[Output]]:
    """Decodes the prompts, greedily by default, in batches of the run, and counts.

    Args:
      new_tokens: outputs of every prompt; an end of text does not end it.
      sampling: controls of all prompts; prompt i is drawn with seed `sampling.seed + i`.
      seed: of the intervals' resamples.
    Raises: ValueError: the checks of `generate`.
    """
    outputs, batch = [], models.run.batch
    controls = [
        dataclasses.replace(sampling, seed=sampling.seed + index) for index in range(len(prompts))
    ]
    for first in range(0, len(prompts), batch):
        part = slice(first, first + batch)
        outputs += generate(
            models, params, prompts[part], max_new_tokens=new_tokens, sampling=controls[part]
        )
    return summarize(outputs, models.run.draft_tokens, seed=seed), outputs


def summarize(outputs: Sequence[Output], draft_tokens: int, *, seed: int = 0) -> Acceptance:
    """Counters of finished prompts as figures with intervals."""
    rounds = np.array([item.statistics.rounds for item in outputs], np.float64)
    reached = np.zeros((len(outputs), draft_tokens + 1))
    reached[:, 0] = rounds
    for row, item in enumerate(outputs):
        counts = item.statistics.accepted_by_position
        reached[row, 1 : 1 + len(counts)] = counts
    total = 1.0 + reached[:, 1:].sum(axis=1) / np.maximum(rounds, 1.0)
    weights = resamples(len(outputs), seed)
    return Acceptance(
        prompts=len(outputs),
        new_tokens=max((item.statistics.new_tokens for item in outputs), default=0),
        rounds=int(rounds.sum()),
        tokens_per_round=ratio(total * rounds, rounds, weights),
        conditional=[
            ratio(reached[:, i + 1], reached[:, i], weights) for i in range(draft_tokens)
        ],
    )


def measure_recall(
    target: TargetConfig, draft: DraftConfig, dtypes: DtypePolicy, params: Params, tokens, *,
    draft_tokens: int, first: int,
) -> Recall:
    """Recall over anchors first, first + ANCHOR_STRIDE, ... of sequences of the target's own text.

    Args:
      params: of the modules, in the policy's dtypes.
      tokens: [N, T] int32; positions up to `first` are the prompt.
    """
    length = np.asarray(tokens).shape[1]
    anchors = np.arange(first, length - draft_tokens, ANCHOR_STRIDE, dtype=np.int32)
    if not len(anchors):
        raise ValueError(f"first: expected an anchor before {length - draft_tokens}, got {first}")
    found = recall_counts(
        target, draft, dtypes, draft_tokens, params, jnp.asarray(tokens, jnp.int32),
        jnp.asarray(anchors),
    )
    at_1, at_16 = (np.asarray(share).tolist() for share in found)
    return Recall(at_1=at_1, at_16=at_16)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def recall_counts(target, draft, dtypes, draft_tokens: int, params, tokens, anchors):
    """Two [K] fp32 shares for anchors [A] of every sequence: first, and among the 16 best."""
    features = target_forward(
        target, dtypes, params.target, tokens, capture=draft.target_layer_ids
    ).features
    anchors = jnp.broadcast_to(anchors, (tokens.shape[0], anchors.shape[0]))
    embedding = params.target["embedding"]
    hidden = draft_forward(
        draft, dtypes, params.draft, embedding, tokens, features, anchors,
        draft_tokens=draft_tokens,
    )
    head = embedding if target.tie_embeddings else params.target["head"]
    scores = public_scores(linear(hidden, head, jnp.float32), target.public_vocab)
    best = lax.top_k(scores, min(RECALL_DEPTH, target.public_vocab))[1]
    matches = best == block_labels(tokens, anchors, draft_tokens)[..., None]
    return jnp.mean(matches[..., 0], axis=(0, 1)), jnp.mean(matches.any(-1), axis=(0, 1))

