"""An indexed head changes proposals only: sampled text keeps the target's law.

The chi-square cases of whole rounds, with half of the head's rows; some minutes:
pytest tests/weights/test_proposal_head_law.py -m slow
"""

import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models
from dflash_jax.weights import indexed_head
from scripts.oracle.loaded import LoadedKit
from tests.sampling.goodness import assert_fits
from tests.sampling.test_whole_rounds import (
    CASES,
    COMPARISONS,
    SETTINGS,
    TOKENS,
    fits,
    pair,
    samples,
)


@pytest.fixture(scope="module")
def kit(repository_root):
    return LoadedKit(repository_root / "tests" / "data" / "kit_tiny")


@pytest.fixture(scope="module")
def golden(repository_root):
    with np.load(repository_root / "tests/data/kit_tiny/golden/dist_tiny.npz") as archive:
        return dict(archive)


@pytest.mark.slow
@pytest.mark.parametrize("draft, draft_tokens, batch, setting", CASES)
def test_sampled_text_with_an_indexed_head_has_the_exact_law(
    kit, golden, draft, draft_tokens, batch, setting
):
    models, params = pair(kit, golden, draft, draft_tokens, batch, setting)
    public = models.target.public_vocab
    ids = np.arange(0, public, 2)
    tree = params.target
    head = np.asarray(tree["embedding" if models.target.tie_embeddings else "head"])
    config, reduced = indexed_head(models.target, models.draft, params.draft, head[ids], ids)
    assert config.head_rows == len(ids) < public
    models = Models(models.target, config, models.run)
    request = SamplingParams(**SETTINGS[setting])
    text = samples(models, params.replace(draft=reduced), golden["prompt"], request, TOKENS)
    assert len(set(text.ravel()) - set(ids)) > 0  # ids that are never proposed are emitted too
    assert_fits(fits(text, golden, setting), COMPARISONS)
