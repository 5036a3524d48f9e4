"""Parameters without files."""

import jax
import numpy as np
import pytest

from dflash_jax.config import DtypePolicy, RunConfig
from dflash_jax.steps import Models
from dflash_jax.steps.init import abstract_params, random_params
from tests import cases


@pytest.mark.parametrize("pair", cases.PAIRS)
def test_random_parameters_have_the_abstract_shapes(pair):
    models = cases.tiny_models(*pair, 3, 1, dtypes=DtypePolicy())
    abstract, drawn = abstract_params(models), random_params(models, seed=0)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(
        lambda x: (x.shape, x.dtype), drawn
    )
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(drawn))


def test_a_target_leaf_is_the_same_in_every_pair():
    first, second = (
        random_params(cases.tiny_models("dense", draft, 3, 1), seed=4).target["head"]
        for draft in cases.DRAFTS
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "billions"), [("27b-dflash2", (26.9, 1.977)), ("35b-a3b-dflash", (34.7, 0.411))]
)
def test_published_sizes_cost_nothing(name, billions):
    target, draft = (make() for make in cases.PUBLISHED[name])
    run = RunConfig(draft_tokens=7, batch=1, max_context=128)
    params = abstract_params(Models(target, draft, run))
    for tree, expected in zip((params.target, params.draft), billions, strict=True):
        count = sum(leaf.size for leaf in jax.tree.leaves(tree)) / 1e9
        assert abs(count - expected) < 0.05 * expected
