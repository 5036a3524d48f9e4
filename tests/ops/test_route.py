"""Which experts a token takes and what they count: of logits, and of a router's product."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import sparse_moe as moe
from dflash_jax.pallas import routing
from tests.oracles import sparse_moe as oracle
from tests.tolerances import FP32, FP32_CHAIN, as_float64, assert_close

ROUTE_FORMS = pytest.mark.parametrize(
    "form", ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)


@ROUTE_FORMS
@pytest.mark.parametrize("k", [1, 3, 9])
def test_routing_is_the_renormalised_softmax_of_the_best(k, form):
    """Of the experts' columns; what stands behind them is never read."""
    logits = jnp.asarray(np.random.default_rng(7).normal(size=(7, 17)), jnp.float32)
    wide = jnp.concatenate([logits, jnp.full((7, 1), jnp.nan)], axis=1)
    routing = moe.route(wide, k, experts=logits.shape[1], implementation=form)
    experts, weights = oracle.route(as_float64(logits), k)
    assert np.array_equal(routing.experts, experts) and routing.experts.dtype == jnp.int32
    assert_close(routing.weights, weights, FP32)


@ROUTE_FORMS
@pytest.mark.parametrize("experts, k, tokens", [(256, 8, 8), (512, 10, 3), (60, 4, 1)])
def test_routing_at_the_sizes_of_large_models(experts, k, tokens, form):
    logits = np.random.default_rng(k).normal(size=(tokens, experts)).astype(np.float32)
    routing = moe.route(jnp.asarray(logits), k, implementation=form)
    ids, weights = oracle.route(logits.astype(np.float64), k)
    assert np.array_equal(routing.experts, ids)
    assert_close(routing.weights, weights, FP32)


@ROUTE_FORMS
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_dead_tokens_logits_name_experts_that_exist_and_change_no_other_token(value, form):
    logits = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    clean = moe.route(jnp.asarray(logits), 4, implementation=form)
    logits[1] = value
    routing = moe.route(jnp.asarray(logits), 4, implementation=form)
    assert np.asarray(routing.experts).min() >= 0 and np.asarray(routing.experts).max() < 16
    assert len(set(routing.experts[1].tolist())) == 4
    for own, other in ((routing.experts, clean.experts), (routing.weights, clean.weights)):
        assert np.array_equal(own[::2], other[::2])


@ROUTE_FORMS
def test_equal_router_logits_choose_the_lower_expert(form):
    logits = jnp.asarray([[1.0, 2.0, 2.0, 2.0], [-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, 5.0, -1.0]])
    routing = moe.route(logits.astype(jnp.float32), 2, implementation=form)
    assert routing.experts.tolist() == [[1, 2], [0, 1], [2, 0]]
    assert routing.weights[:2].tolist() == [[0.5, 0.5]] * 2


@ROUTE_FORMS
def test_far_logits_give_finite_weights(form):
    logits = jnp.asarray([[3e4, -3e4, 3e4 - 1]], jnp.float32)
    routing = moe.route(logits, 3, implementation=form)
    assert_close(routing.weights, [[0.7310585786, 0.2689414214, 0.0]], FP32)


@ROUTE_FORMS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "tokens, experts, hidden",
    [(1, 17, 48), (16, 257, 128), (33, 16, 1024), (129, 33, 256), (7, 19, 41), (2, 5, 7)],
)
def test_experts_are_chosen_by_the_whole_product_of_the_router(
    tokens, experts, hidden, dtype, form
):
    """A kernel cuts it: all parts count, an odd number of rows, and what an odd width leaves."""
    rng = np.random.default_rng(hidden)
    x, router = (
        jnp.asarray(rng.normal(size=shape) / hidden**0.25, dtype)
        for shape in ((tokens, hidden), (experts, hidden))
    )
    routing = moe.choose_experts(
        x, router, 3, experts=experts - 1, shared=True, implementation=form
    )
    scores = as_float64(x) @ as_float64(router).T
    chosen, weights = oracle.route(scores[:, :-1], 3)
    assert np.array_equal(routing.experts, chosen)
    assert_close(routing.weights, weights, FP32_CHAIN)
    assert_close(routing.shared, 1.0 / (1.0 + np.exp(-scores[:, -1])), FP32_CHAIN)


def kernels_of(tokens, width, **options):
    """Names of the kernels that a choice of experts runs."""
    choose = functools.partial(moe.choose_experts, experts_per_token=2, **options)
    program = jax.make_jaxpr(choose)(jnp.zeros((tokens, width)), jnp.zeros((9, width)))
    return re.findall(r"^let (router|route) =", str(program), re.MULTILINE)


@pytest.mark.parametrize("tokens, width", [(1, 48), (128, 41), (129, 48), (1024, 64)])
def test_a_named_form_is_that_of_product_and_choice_at_every_size(tokens, width):
    """Neither falls back; a caller whose product has no kernel says so."""
    assert kernels_of(tokens, width, implementation="interpret") == ["router", "route"]
    assert kernels_of(tokens, width, implementation="xla") == []
    split = {"product": "xla", "implementation": "interpret"}
    assert kernels_of(tokens, width, **split) == ["route"]
    split = {"product": "interpret", "implementation": "xla"}
    assert kernels_of(tokens, width, **split) == ["router"]


def test_auto_takes_the_routers_kernel_for_few_tokens_on_a_gpu(monkeypatch):
    assert kernels_of(128, 48) == []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert kernels_of(128, 48) == ["router", "route"]
    assert kernels_of(129, 48) == ["route"]
    assert kernels_of(0, 48) == []


@pytest.mark.parametrize("width, parts", [(2048, 4), (4096, 4), (256, 2), (48, 1), (65, 1)])
def test_the_routers_product_is_in_the_parts_measured_best(width, parts):
    x, router = jnp.zeros((3, width)), jnp.zeros((17, width))
    made = jax.eval_shape(functools.partial(routing.scores, interpret=True), x, router)
    assert made.shape == (parts, 3, 17)


def test_a_router_that_does_not_fit_is_an_error():
    x = jnp.zeros((4, 48), jnp.bfloat16)
    for router in (jnp.zeros((9, 32), x.dtype), jnp.zeros((9, 48))):
        with pytest.raises(ValueError, match="router: expected bfloat16"):
            moe.choose_experts(x, router, 2)
    with pytest.raises(ValueError, match="experts_per_token: expected 1..9 of 9 columns"):
        moe.choose_experts(x, jnp.zeros((9, 48), x.dtype), 2, shared=True)
    with pytest.raises(NotImplementedError, match="router: .* one token, got none"):
        moe.choose_experts(
            x[:0], jnp.zeros((9, 48), x.dtype), 2, product="interpret", implementation="xla"
        )
    with pytest.raises(NotImplementedError, match="route: .* got 0 tokens"):
        moe.route(jnp.zeros((0, 9)), 2, implementation="interpret")
    with pytest.raises(NotImplementedError, match="route: .* got 4 tokens, 30 and 17"):
        moe.choose_experts(x, jnp.zeros((30, 48), x.dtype), 17, implementation="interpret")
