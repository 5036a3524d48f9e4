"""Counters add up, and acceptance is what p and q predict, on the kit's trained tiny pair."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DtypePolicy, RunConfig
from dflash_jax.diagnostics import RoundCounters, expected_acceptance
from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.state.decode import Rows
from dflash_jax.state.scratch import Acceptance, Proposal, RoundExtent, RoundScratch, Verification
from dflash_jax.steps import (
    Admission,
    Models,
    Params,
    PrefillChunk,
    begin,
    commit,
    first_token,
    prefill_chunk,
    speculate,
)
from dflash_jax.weights import load_draft, load_target

KIT = Path(__file__).parents[1] / "data" / "kit_tiny"
BATCH, K, PROMPT, ROUNDS, CAPACITY = 8, 3, 24, 40, 256


def ints(*values):
    return jnp.array(values, jnp.int32)


def test_counters_follow_a_hand_made_round():
    """Row 0 accepts one of two, row 1 all three, row 2 has no proposal, row 3 is idle."""
    logits = np.full((4, 4, 6), -1.0, np.float32)
    likely = [[1, 5, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0], [0, 0, 0, 0]]
    for row, choices in enumerate(likely):
        logits[row, np.arange(4), choices] = 1.0
    tokens = ints([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3])
    candidates = jnp.stack([tokens[:, 1:], jnp.full((4, 3), 5, jnp.int32)], axis=-1)
    scratch = RoundScratch(
        proposal=Proposal(
            tokens=tokens, parent=tokens, depth=tokens, candidates=candidates,
            q=jnp.ones((4, 3, 2), jnp.float32),
        ),
        verification=Verification(
            logits=jnp.array(logits), hidden=tokens, features=tokens, kv_rows=(), gdn_records=()
        ),
        acceptance=Acceptance(
            accepted=ints(1, 3, 0, 0), licensed=ints(2, 4, 1, 0), outputs=tokens, path=tokens,
            fault=jnp.zeros((4,), bool),
        ),
    )
    extent = RoundExtent(
        proposals=ints(2, 3, 0, 0), columns=ints(3, 4, 1, 0), draft_columns=ints(4, 4, 4, 0)
    )
    counters = RoundCounters.zeros(3).add(scratch, extent, public_vocab=6)
    assert int(counters.rounds) == 2
    assert counters.offered.tolist() == [2, 2, 1]
    assert counters.accepted.tolist() == [2, 1, 1]
    assert counters.judged.tolist() == [2, 2, 1]
    assert counters.recall_1.tolist() == [2, 1, 1]
    assert counters.recall_all.tolist() == [2, 2, 1]


@pytest.fixture(
    scope="module", params=[pytest.param("tiny_dflash", marks=pytest.mark.slow), "tiny_dflash2"]
)
def sampled_run(request):
    """Counters, and the judged columns' expected acceptance, of rounds at temperature 1."""
    policy = DtypePolicy.exact()
    target, target_params = load_target(KIT / "targets" / "tiny", policy)
    draft, draft_params = load_draft(KIT / "drafts" / request.param, target, policy, causal=False)
    run = RunConfig(
        draft_tokens=K, batch=BATCH, max_context=CAPACITY, page_size=16, chunk=32, dtypes=policy
    )
    models = Models(target=target, draft=draft, run=run)
    return collect(models, Params(target=target_params, draft=draft_params))


def collect(models, params):
    rows, public = Rows.of(range(BATCH)), models.target.public_vocab
    sampling = SamplingArrays.of([SamplingParams(temperature=1.0)] * BATCH, public)
    prompt = np.random.default_rng(0).integers(0, public, (BATCH, PROMPT))
    pages = jnp.arange(models.run.pages, dtype=jnp.int32).reshape(BATCH, -1)
    admission = Admission(
        remaining=jnp.full((BATCH,), CAPACITY, jnp.int32),
        capacity=jnp.full((BATCH,), CAPACITY, jnp.int32),
        rope_delta=jnp.zeros((BATCH,), jnp.int32),
        seed=jnp.stack([jnp.arange(BATCH), jnp.arange(BATCH)], axis=1).astype(jnp.uint32),
        target_pages=pages,
        draft_pages=pages,
    )
    state = begin(models, models.zeros(), rows, admission)
    chunk = PrefillChunk.text(models, prompt, [PROMPT] * BATCH, [0] * BATCH)
    state, _ = first_token(
        models, params, prefill_chunk(models, params, state, rows, chunk), rows, sampling
    )

    @jax.jit
    def observe(counters, scratch, extent, sequence):
        expected = expected_acceptance(scratch, sequence, sampling, public_vocab=public)
        position = jnp.arange(K)[None, :]
        judged = (position < extent.proposals[:, None]) & (
            position <= scratch.acceptance.accepted[:, None]
        )
        return counters.add(scratch, extent, public_vocab=public), jnp.where(judged, expected, 0.0)

    counters, chances = RoundCounters.zeros(K), []
    for _ in range(ROUNDS):
        sequence = state.sequence.gather(rows.lane)
        extent = models.extent(sequence)
        state, scratch = speculate(models, params, state, rows, sampling, extent)
        counters, expected = observe(counters, scratch, extent, sequence)
        chances.append(np.asarray(expected))
        state = commit(models, state, rows, scratch, scratch.acceptance.licensed)
    return jax.tree.map(np.asarray, counters), np.stack(chances)


def test_acceptance_is_the_sum_of_the_smaller_of_p_and_q(sampled_run):
    counters, chances = sampled_run
    judged = chances[chances > 0.0]
    expected, accepted = judged.sum(), counters.accepted.sum()
    deviation = np.sqrt((judged * (1.0 - np.minimum(judged, 1.0))).sum())
    assert counters.judged.sum() > 200
    assert abs(accepted - expected) < 4.0 * deviation


def test_counts_of_one_run_are_consistent(sampled_run):
    counters, _ = sampled_run
    assert counters.rounds == counters.offered[0]
    assert (counters.accepted <= counters.judged).all()
    assert (counters.judged <= counters.offered).all()
    assert (counters.judged[1:] <= counters.accepted[:-1]).all()
    assert (counters.recall_1 <= counters.recall_all).all()
