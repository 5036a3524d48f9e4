"""Whole rounds with every kernel, in interpret mode: the same text as plain decoding in XLA."""

import dataclasses

import numpy as np
import pytest

from dflash_jax.steps import Models
from tests import cases
from tests.steps.harness import Session
from tests.steps.poison import poison_with
from tests.steps.scenes import HUGE, plain_text

TOKENS = 12


@pytest.mark.parametrize(
    "target, draft, tree_nodes",
    [("dense", "dflash2", 0), pytest.param("moe", "dflash", 0, marks=pytest.mark.slow),
     ("moe", "dflash2", 9)],
)
def test_kernels_give_plain_text_with_poison_in_every_dead_byte(target, draft, tree_nodes):
    models = cases.tiny_models(
        target, draft, 3, 2, implementation="interpret", tree_nodes=tree_nodes
    )
    # Rings come in multiples of 16 there.
    models = Models(models.target, dataclasses.replace(models.draft, window=16), models.run)
    session = Session(models, cases.leaning_params(models), poison_with(np.nan, HUGE))
    prompts = cases.prompts(models)
    for lanes in ((0, 1), (2, 3)):
        session.admit({lane: prompts[lane] for lane in lanes}, TOKENS)
    text = session.run(seed=3)
    assert text == {lane: plain_text(target)[lane][:TOKENS] for lane in range(4)}
    assert max(session.licensed) > 1, "no proposal was ever accepted"
