"""Accepted share and sum of min(p, q) on the shipped pair, and the figures of its card."""

import dataclasses
import json
import re

import pytest

from dflash_jax.assets import tiny_pair_path
from dflash_jax.config import DtypePolicy
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Params
from dflash_jax.training import agreement
from dflash_jax.training.agreement import measure_agreement
from dflash_jax.training.card import CARD, model_card
from dflash_jax.training.figures import PROMPTS, measured_models, read_prompts
from dflash_jax.training.validate import measure_acceptance
from dflash_jax.weights import load_draft, load_target

SAMPLED = SamplingParams(temperature=1.0)
COUNT, ROUNDS = 16, 8


@pytest.fixture(scope="module")
def pair():
    """Models, parameters and held-out prompts; the context holds every round."""
    policy = DtypePolicy()
    target, target_params = load_target(tiny_pair_path("target"), policy)
    draft, draft_params = load_draft(tiny_pair_path("dflash2"), target, policy)
    prompts = read_prompts(tiny_pair_path(PROMPTS))[:COUNT]
    models = measured_models(target, draft, COUNT, len(prompts[0]), 1 + ROUNDS * 8, policy)
    return models, Params(target=target_params, draft=draft_params), prompts


def test_the_accepted_share_agrees_with_p_and_q_on_the_shipped_pair(pair, monkeypatch):
    found = measure_agreement(*pair, ROUNDS, sampling=SAMPLED)
    assert found.judged > 200
    assert found.holds, found
    assert found.excess.high - found.excess.low < 0.15
    assert found.accepted.value == pytest.approx(found.expected.value + found.excess.value)

    def halved(*args, **options):
        return 0.5 * chances(*args, **options)

    chances = agreement.expected_acceptance
    monkeypatch.setattr(agreement, "expected_acceptance", halved)
    agreement._observe.clear_cache()
    assert not measure_agreement(*pair, ROUNDS, sampling=SAMPLED).holds
    agreement._observe.clear_cache()


@pytest.mark.slow
def test_sampling_controls_reach_every_prompt_with_a_seed_of_its_own(pair):
    models, params, prompts = pair
    twins = [prompts[0]] * COUNT
    found, outputs = measure_acceptance(models, params, twins, 12, sampling=SAMPLED)
    assert len({item.tokens for item in outputs}) > COUNT // 2
    assert found.new_tokens == 12
    _, again = measure_acceptance(
        models, params, twins[:2], 12, sampling=dataclasses.replace(SAMPLED, seed=1)
    )
    assert [item.tokens for item in again] == [item.tokens for item in outputs[1:3]]


def test_wrong_inputs_are_refused_by_name(pair, tmp_path):
    models, params, prompts = pair
    for wrong, options, message in (
        (prompts, {"sampling": SamplingParams()}, "temperature: expected more than 0"),
        (prompts[1:], {"sampling": SAMPLED}, "prompts: expected 16 of one length, got 15"),
        ([prompts[0][1:], *prompts[1:]], {"sampling": SAMPLED}, r"one length, got 16 of \[63, 64"),
    ):
        with pytest.raises(ValueError, match=message):
            measure_agreement(models, params, wrong, ROUNDS, **options)
    with pytest.raises(ValueError, match="max_context: expected at least 137 for 9 rounds"):
        measure_agreement(models, params, prompts, ROUNDS + 1, sampling=SAMPLED)
    for text in ("{", "[]", "[1]", "[[1], [true]]", "[[]]"):
        (tmp_path / PROMPTS).write_text(text, "utf-8")
        with pytest.raises(ValueError, match=f"{PROMPTS}: expected"):
            read_prompts(tmp_path / PROMPTS)


def test_the_shipped_card_is_that_of_the_shipped_report():
    report = json.loads(tiny_pair_path("report.json").read_text("utf-8"))
    card = tiny_pair_path(CARD).read_text("utf-8")
    assert card == model_card(report)
    assert not re.search(r"(?<!\w)/\w+/", card), "a path of one machine"
    for name, floor in (("dflash", 2.8), ("dflash2", 3.2)):
        assert report[name]["acceptance"]["tokens_per_round"]["low"] > floor
        excess = report[name]["agreement"]["excess"]
        assert excess["low"] <= 0.0 <= excess["high"]


def test_the_shipped_pair_stays_within_16_mebibytes():
    files = [file for file in tiny_pair_path("").rglob("*") if "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files if file.is_file()) <= 16 << 20
