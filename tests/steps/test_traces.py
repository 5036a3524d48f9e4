"""Claim 12: one compile per (W, B, chunk bucket), and nothing but device work inside."""

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.steps import begin, commit, first_token, prefill_chunk, speculate
from tests import cases
from tests.steps.harness import Session, extent_of
from tests.steps.scenes import resumed

STEPS = (begin, prefill_chunk, first_token, speculate, commit)


def traces() -> list[int]:
    return [step._cache_size() for step in STEPS]


@pytest.mark.parametrize("combination", [("dense", "dflash2", 3, 3), ("moe", "dflash", 7, 3)])
def test_one_trace_serves_every_length_extent_budget_and_set_of_rows(combination):
    session = resumed(*combination)
    start = traces()
    session.round([1, 2, 3])
    first = traces()
    assert all(new - old <= 1 for new, old in zip(first, start, strict=True))
    session.round([7])
    session.run(keep=lambda lane, licensed: max(licensed - lane % 2, 0) or licensed)
    assert traces() == first


def test_one_trace_serves_every_prompt_of_a_chunk_bucket():
    models = cases.tiny_models("moe", "dflash", 15, 8)
    session = Session(models, cases.leaning_params(models))
    prompts = cases.prompts(models)
    start = traces()
    session.admit({3: prompts[3]}, 5)
    first = traces()
    assert all(new - old <= 1 for new, old in zip(first, start, strict=True))
    session.admit(dict(enumerate(prompts)), 9, capacity=60)
    session.admit({6: prompts[2][:1]}, 40)
    assert traces() == first


def test_no_host_callback_and_no_loop_over_layers():
    session = resumed("dense", "dflash2", 3, 3)
    rows, greedy = session.rows([0, 1, 2]), SamplingArrays.greedy(3)
    extent = extent_of(session.models, session.state, rows)
    arguments = (session.models, session.params, session.state, rows, greedy, extent)
    scratch = jax.eval_shape(lambda *a: speculate(session.models, *a), *arguments[1:])[1]
    number = jax.ShapeDtypeStruct((3,), jnp.int32)
    for lowered in (
        speculate.lower(*arguments),
        commit.lower(session.models, session.state, rows, scratch, number),
    ):
        assert "callback" not in lowered.as_text()
