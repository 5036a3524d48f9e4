"""Is the accepted share what p and q predict? The mean of sum_v min(p, q), on real drafts.

A proposal that is judged passes with probability sum_v min(p(v), q(v)). Both sides are counted over
the same judged proposals, so their difference is noise around zero if, and only if, proposals are
drawn from the q that the test is given and p is the law of the target's output.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.diagnostics import expected_acceptance
from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.sampling.uniform import seed_words
from dflash_jax.state.decode import Rows
from dflash_jax.steps import (
    Models,
    Params,
    begin,
    commit,
    first_token,
    prefill_chunk,
    speculate,
)
from dflash_jax.training.continuations import text_admission, text_chunk
from dflash_jax.training.intervals import Interval, ratio, resamples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Fields:
      judged: proposals whose predecessors were all accepted.
      accepted: share of them that passed.
      expected: mean of their sum_v min(p, q).
      excess: accepted - expected, with an interval of its own: both sides share their prompts.
    """

    judged: int
    accepted: Interval
    expected: Interval
    excess: Interval

    @property
    def holds(self) -> bool:
        """Whether no difference lies within the interval of the difference."""
        return self.excess.low <= 0.0 <= self.excess.high


def measure_agreement(
    models: Models, params: Params, prompts: Sequence[Sequence[int]], rounds: int, *,
    sampling: SamplingParams,
) -> Agreement:
    """Runs a number of rounds behind every prompt and compares.

    Args:
      models: a chain; its batch is the number of prompts and its context holds a prompt and
        1 + rounds * (K + 1) tokens.
      prompts: equally long. Row i is drawn with seed `sampling.seed + i`.
    Raises: ValueError for greedy controls (nothing is drawn), a tree, no draft, or wrong sizes.
    """
    ids = _checked(models, prompts, rounds, sampling)
    controls = [dataclasses.replace(sampling, seed=sampling.seed + row) for row in range(len(ids))]
    arrays = SamplingArrays.of(controls, models.target.public_vocab)
    state, rows = _prefilled(models, params, ids, controls, arrays)
    accepted, expected, judged = np.zeros((3, len(ids)))
    for _ in range(rounds):
        sequence = state.sequence.gather(rows.lane)
        extent = models.extent(sequence)
        state, scratch = speculate(models, params, state, rows, arrays, extent)
        counts = np.asarray(_observe(models, scratch, extent, sequence, arrays), np.float64)
        accepted, expected, judged = accepted + counts[0], expected + counts[1], judged + counts[2]
        state = commit(models, state, rows, scratch, scratch.acceptance.licensed)
    weights = resamples(len(ids), sampling.seed)
    return Agreement(
        judged=int(judged.sum()),
        accepted=ratio(accepted, judged, weights),
        expected=ratio(expected, judged, weights),
        excess=ratio(accepted - expected, judged, weights),
    )


@functools.partial(jax.jit, static_argnums=0)
def _observe(models: Models, scratch, extent, sequence, sampling):
    """[3, B] fp32: accepted, sum of min(p, q) over judged proposals, judged."""
    taken = scratch.acceptance.accepted
    chance = expected_acceptance(
        scratch, sequence, sampling, public_vocab=models.target.public_vocab,
        max_candidates=models.run.max_candidates,
    )
    position = jnp.arange(chance.shape[1])[None, :]
    judged = (position < extent.proposals[:, None]) & (position <= taken[:, None])
    return jnp.stack([
        taken.astype(jnp.float32),
        jnp.sum(jnp.where(judged, chance, 0.0), axis=1),
        jnp.sum(judged, axis=1).astype(jnp.float32),
    ])


def _checked(models: Models, prompts, rounds: int, sampling: SamplingParams) -> np.ndarray:
    """[N, P] int32."""
    run, lengths = models.run, {len(prompt) for prompt in prompts}
    if sampling.temperature == 0:
        raise ValueError("temperature: expected more than 0, as greedy tokens are not drawn")
    if models.draft is None or run.tree_nodes:
        raise ValueError(f"models: expected a draft and a chain, got tree_nodes {run.tree_nodes}, "
                         f"draft {models.draft is not None}")
    if len(lengths) != 1 or len(prompts) != run.batch:
        raise ValueError(f"prompts: expected {run.batch} of one length, got {len(prompts)} of "
                         f"{sorted(lengths)}")
    need = lengths.pop() + 1 + rounds * (run.draft_tokens + 1)
    if run.max_context < need:
        raise ValueError(f"max_context: expected at least {need} for {rounds} rounds, got "
                         f"{run.max_context}")
    return np.array(prompts, np.int32)


def _prefilled(models: Models, params: Params, ids, controls, arrays):
    """State after the prompts and their first tokens, and the rows."""
    row = jnp.arange(len(ids), dtype=jnp.int32)
    rows = Rows(lane=row, read_slot=row, write_slot=row)
    seeds = jnp.array(np.stack([seed_words(one.seed) for one in controls]))
    admission = text_admission(models.run, *ids.shape, seeds)
    state = begin(models, models.zeros(), rows, admission)
    chunk = models.run.chunk
    for start in range(0, ids.shape[1], chunk):
        piece = text_chunk(models, jnp.asarray(ids[:, start : start + chunk]), start)
        state = prefill_chunk(models, params, state, rows, piece)
    state, _ = first_token(models, params, state, rows, arrays)
    return state, rows
