"""Parameters without files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DtypePolicy, RunConfig, qwen35_27b, tiny_target
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


def test_random_float8_parameters_are_finite_and_of_the_dense_ones_size():
    target = tiny_target(moe=True).with_fp8(16, 16)
    models = Models(target, None, cases.tiny_run(0, 1, dtypes=DtypePolicy()))
    drawn = random_params(models, seed=0).target["layers_0"]["moe"]
    values = np.asarray(drawn["gate_up"], np.float32)
    assert np.isfinite(values).all() and drawn["gate_up"].dtype == jnp.float8_e4m3fn
    spread = np.std(values * np.asarray(drawn["gate_up_scale"]).mean())
    assert abs(spread - 64**-0.5) < 0.1 * 64**-0.5


@pytest.mark.slow
def test_the_27b_in_float8_takes_half_of_its_layers():
    models = Models(qwen35_27b().with_fp8(), None, RunConfig(
        draft_tokens=0, batch=1, max_context=128
    ))
    leaves = jax.tree.leaves(abstract_params(models).target)
    sizes = {d: sum(x.size for x in leaves if x.dtype == d) for d in ("float8_e4m3fn", "bfloat16")}
    # Layers of 24.3e9 values; embedding and head of 248320 x 5120 each, a and b of 48 rows each.
    assert sizes["bfloat16"] == 2 * 248320 * 5120 + 48 * 2 * 48 * 5120
    assert 24.2e9 < sizes["float8_e4m3fn"] < 24.4e9
    scales = sum(x.size for x in leaves if x.dtype == "float32" and x.ndim == 2)
    assert scales < sizes["float8_e4m3fn"] / 128**2 + 64 * 10240 * 4


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
