"""Our target against transformers' Qwen3.5, dense and MoE, loaded from its own files."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DtypePolicy
from dflash_jax.steps import Params
from dflash_jax.target import Target
from dflash_jax.weights import load_target
from scripts.oracle.lane import columns_at, models_for, prefilled
from scripts.oracle.rounds import generated
from tests.parity.geometries import TARGET_GEOMETRIES
from tests.tolerances import FP32_CHAIN, assert_close

pytestmark = pytest.mark.parity

TOKENS, FIRST, BUDGET = 23, 9, 12


@pytest.fixture(
    scope="module",
    params=[(name, moe) for moe in (False, True) for name in TARGET_GEOMETRIES],
    ids=lambda case: f"{case[0]}-{'moe' if case[1] else 'dense'}",
)
def case(request, published, tmp_path_factory):
    """A published model and ours, loaded from what it saved, with one prompt."""
    geometry, moe = request.param
    folder = tmp_path_factory.mktemp("target")
    model = published.writers.write_target(folder, geometry, moe=moe)
    config, weights = load_target(folder, DtypePolicy.exact())
    ids = np.random.default_rng(3).integers(0, config.vocab_rows, TOKENS)
    return model, config, Params(target=weights, draft={}), ids.tolist()


@functools.partial(jax.jit, static_argnums=0)
def run(module, weights, state, tokens):
    """Captured features and logits of tokens [1, T] from position 0, in one program."""
    embedded = module.apply(weights, tokens, method="embed")
    columns = columns_at(state, 0, tokens.shape[1])
    output = module.apply(weights, embedded, columns, state.target, method="prefill")
    return output.features[0], module.apply(weights, output.hidden, method="logits")[0]


def test_residuals_and_logits(case, published):
    model, config, params, ids = case
    expected = published.reference.run_target(model, ids)
    models = models_for(config, None, draft_tokens=0, positions=TOKENS)
    module = Target(config, DtypePolicy.exact(), tuple(range(config.num_layers)))
    tokens = jnp.array([ids], jnp.int32)
    features, logits = run(module, {"params": params.target}, models.zeros(), tokens)
    blocks = np.asarray(features).reshape(TOKENS, config.num_layers, -1)
    for layer in range(config.num_layers):
        assert_close(blocks[:, layer], expected.blocks[layer], FP32_CHAIN)
    assert_close(logits, expected.logits, FP32_CHAIN)


@pytest.mark.parametrize("chunk", [5, 32])
def test_chunked_prefill_leaves_the_same_states(case, published, chunk):
    model, config, params, ids = case
    expected = published.reference.run_target(model, ids, parts=[FIRST, TOKENS - FIRST])
    models = models_for(config, None, draft_tokens=0, positions=TOKENS)
    state = prefilled(models, params, np.array(ids), chunk=chunk)
    assert_states(state, expected, TOKENS)


def test_decoding_chooses_the_same_tokens_and_leaves_the_same_states(case, published):
    model, config, params, ids = case
    output, expected = published.reference.greedy(model, ids, BUDGET)
    models = models_for(config, None, draft_tokens=0, positions=TOKENS + BUDGET)
    ours = generated(models, params, np.array(ids), BUDGET)
    assert ours.output == output
    assert_states(ours.state, expected, TOKENS + BUDGET - 1)


def assert_states(state, expected, count):
    """All states of lane 0 after `count` tokens, in the published layouts."""
    for layer, recurrent, conv in zip(
        state.target.gdn, expected.recurrent, expected.conv, strict=True
    ):
        assert_close(np.moveaxis(np.asarray(layer.recurrent[0]), 1, 2), recurrent, FP32_CHAIN)
        kept = layer.conv.shape[1]
        assert kept == conv.shape[1] - 1
        assert_close(layer.conv[0].T, conv[:, 1:], FP32_CHAIN)
    for pages, key, value in zip(state.target.kv, expected.keys, expected.values, strict=True):
        for stored, rows in ((pages.key, key), (pages.value, value)):
            held = np.asarray(stored).reshape(stored.shape[0], -1, stored.shape[-1])
            assert_close(held[:, :count], rows, FP32_CHAIN)
