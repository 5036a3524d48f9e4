"""Greedy generation against the published loop, on drafts that are right some of the time.

The published loop is driven by a target that recomputes everything, because transformers' hybrid
cache does not roll its recurrent state back. Near the end of the budget the loops choose other
block widths, so rounds are compared only while a whole block is wanted.
"""

import time

import numpy as np
import pytest

from dflash_jax.config import DtypePolicy
from dflash_jax.engine.generate import generate
from dflash_jax.steps import Params
from dflash_jax.weights import load_draft, load_target
from scripts.oracle.lane import models_for
from scripts.oracle.rounds import generated
from tests.parity.geometries import DRAFT_GEOMETRIES, TARGET_GEOMETRIES

pytestmark = pytest.mark.parity

PROMPT, BUDGET, FIT_STEPS = 19, 32, 60


@pytest.mark.parametrize("dflash2", [False, True], ids=["dflash", "dflash2"])
@pytest.mark.parametrize("geometry", DRAFT_GEOMETRIES)
def test_generation_equals_the_published_loop(published, tmp_path, monkeypatch, geometry, dflash2):
    writers, reference = published.writers, published.reference
    place = list(DRAFT_GEOMETRIES).index(geometry)
    target = writers.write_target(
        tmp_path / "target", TARGET_GEOMETRIES[place], moe=place == 1, seed=7
    )
    text = target.config.get_text_config()
    prompt = np.random.default_rng(13).integers(0, text.vocab_size, PROMPT).tolist()
    plain, _ = reference.greedy(target, prompt, BUDGET)

    draft = writers.make_draft(geometry, text, dflash2=dflash2)
    reference.fit_draft(draft, target, prompt, plain, steps=FIT_STEPS)
    writers.save_draft(tmp_path / "draft", draft)
    # The published statistics read a GPU clock.
    monkeypatch.setattr(published.dflash, "_cuda_time", time.perf_counter)
    theirs = published.dflash.dflash_generate(
        draft,
        reference.RecomputingTarget(target),
        published.torch.tensor([prompt]),
        BUDGET,
        None,
        return_stats=True,
    )
    assert theirs.output_ids[0, PROMPT:].tolist() == plain

    policy = DtypePolicy.exact()
    target_config, target_params = load_target(tmp_path / "target", policy)
    draft_config, draft_params = load_draft(tmp_path / "draft", target_config, policy)
    width = draft.block_size
    models = models_for(
        target_config, draft_config, draft_tokens=width - 1, positions=PROMPT + BUDGET
    )
    params = Params(target=target_params, draft=draft_params)
    (output,) = generate(models, params, [prompt], max_new_tokens=BUDGET)
    assert list(output.tokens) == plain
    assert 0 < output.statistics.accepted < output.statistics.drafted

    ours = [item.emitted for item in generated(models, params, np.array(prompt), BUDGET).rounds]
    assert whole_rounds(ours, width) == whole_rounds(theirs.acceptance_lengths, width)


def whole_rounds(emitted, width):
    """Tokens of each round, in order, as long as more than K = width - 1 are still wanted."""
    taken, left = [], BUDGET - 1
    for count in emitted:
        if left < width:
            break
        taken.append(count)
        left -= count
    return taken
