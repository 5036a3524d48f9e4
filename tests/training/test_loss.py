"""Losses: weights, the selector's conditional walk, and gradients that reach every parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.candidate_selector import edge_scores
from dflash_jax.training.loss import (
    draft_loss,
    next_token_loss,
    position_weights,
    public_scores,
    walk_scores,
)
from dflash_jax.training.parameters import draft_params, masters, start_draft, target_params
from dflash_jax.training.stages import TargetObjective
from dflash_jax.weights import names
from tests.training import scenes


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_a_gradient_reaches_every_parameter_of_a_draft(name):
    master = scenes.shaken_draft(name)
    data = scenes.data(name, scenes.tokens())
    grads = jax.jit(jax.grad(scenes.objective(name, batch=2), has_aux=True))(
        master, data, jax.random.key(0)
    )[0]
    _all_reached(grads)


def test_a_gradient_reaches_every_parameter_of_a_target():
    objective = TargetObjective(config=scenes.TARGET, dtypes=scenes.DTYPES, batch=2, length=40)
    master = masters(names.target_plan(scenes.TARGET)[0], scenes.target())
    stream = jnp.asarray(scenes.tokens().ravel())
    grads = jax.jit(jax.grad(objective, has_aux=True))(master, stream, jax.random.key(0))[0]
    _all_reached(grads)


def test_a_fresh_dflash2_draft_is_a_dflash_layer_stack():
    """Its convolutions start as the identity: base tap 0 is 1, all else 0, no increments."""
    params = draft_params(scenes.DRAFTS["dflash2"], start_draft(scenes.DRAFTS["dflash2"], 0),
                          scenes.EXACT)
    for conv in (params["layers_0"]["attention_conv"], params["layers_1"]["mlp_conv"]):
        np.testing.assert_array_equal(conv["base"][:, 0], 1.0)
        np.testing.assert_array_equal(conv["base"][:, 1:], 0.0)
        np.testing.assert_array_equal(conv["projection"]["kernel"], 0.0)


def test_the_walk_scores_of_training_are_the_row_of_the_lattice_the_walk_reads():
    config = scenes.DRAFTS["dflash2"]
    params = draft_params(config, scenes.shaken_draft("dflash2"), scenes.EXACT)
    rng = np.random.default_rng(2)
    hidden = jnp.asarray(rng.standard_normal((1, 3, config.hidden)), jnp.float32)
    logits = jnp.asarray(rng.standard_normal((1, 3, config.vocab_rows)), jnp.float32)
    scores = public_scores(logits, scenes.TARGET.public_vocab)
    anchor = jnp.array([11], jnp.int32)
    first = walk_scores(config, params, hidden[:, :1], scores[:, :1], anchor[:, None])
    # Behind the candidate of rank 2 of position 0, position 1 reads row 2 of the lattice.
    before = first[0][:, :, 2]
    second = walk_scores(config, params, hidden[:, 1:2], scores[:, 1:2], before)
    unary, ids = jax.lax.top_k(scores, config.selector.num_candidates)
    selector = params["selector"]
    query = hidden @ selector["projection"]["kernel"].T
    edges = edge_scores(
        unary, ids, anchor, query, selector["predecessor"], selector["successor"]
    )
    np.testing.assert_array_equal(second[0][:, 0], ids[:, 1])
    np.testing.assert_allclose(first[1][:, 0], edges[:, 0, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second[1][:, 0], edges[:, 1, 2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_masks_beyond_the_proposals_of_a_block_count_nowhere(name):
    config = scenes.DRAFTS[name]
    params = draft_params(config, scenes.shaken_draft(name), scenes.EXACT)
    rng = np.random.default_rng(4)
    hidden = jnp.asarray(rng.standard_normal((1, 2, 3, config.hidden)), jnp.float32)
    head = scenes.target()["embedding"]
    labels = jnp.asarray(rng.integers(0, 200, (1, 2, 3)), jnp.int32)
    anchor = jnp.array([[3, 4]], jnp.int32)

    def loss(hidden, labels):
        return draft_loss(
            config, params, head, hidden, anchor, labels, jnp.array([[1, 3]], jnp.int32),
            public_vocab=scenes.TARGET.public_vocab, gamma=4.0, selector_weight=1.0,
        )

    expected = loss(hidden, labels)
    other = loss(hidden.at[0, 0, 1:].set(7.0), labels.at[0, 0, 1:].set(9))
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)
    gradient = jax.grad(lambda x: loss(x, labels).total)(hidden)
    assert not np.any(gradient[0, 0, 1:]) and np.all(np.any(gradient[0, 1], axis=-1))


def test_the_weight_of_mask_i_is_exp_minus_i_over_gamma():
    expected = [1.0, np.exp(-0.25), np.exp(-0.5), np.exp(-0.75)]
    np.testing.assert_allclose(position_weights(4, 4.0), expected, rtol=1e-6)


def test_reserved_rows_are_no_choice_in_training():
    logits = jnp.zeros((1, 3, 8)).at[..., 6:].set(100.0)
    found = next_token_loss(logits, jnp.array([[0, 1, 2]], jnp.int32), 6)
    np.testing.assert_allclose(found, np.log(6.0), rtol=1e-6)


def test_context_copies_repeat_the_layers_key_and_value_rows():
    config = scenes.DRAFTS["dflash"]
    params = draft_params(config, scenes.shaken_draft("dflash"), scenes.EXACT)
    rows = config.query_heads * config.head_dim
    for layer, kernel in enumerate(
        jnp.split(params["context"]["key_value"]["kernel"], config.draft_layers)
    ):
        attention = params[f"layers_{layer}"]["attention"]
        np.testing.assert_array_equal(kernel, attention["qkv"]["kernel"][rows:])
        np.testing.assert_array_equal(
            params["context"]["key_norm"][layer], attention["key_norm"]["weight"]
        )


def test_matrices_are_rounded_and_vectors_are_not():
    params = target_params(
        scenes.TARGET, masters(names.target_plan(scenes.TARGET)[0], scenes.target()),
        scenes.training_dtypes("bfloat16"),
    )
    assert params["embedding"].dtype == jnp.bfloat16
    assert params["final_norm"]["weight"].dtype == jnp.float32
    assert params["layers_0"]["delta_net"]["conv"].dtype == jnp.float32


def _all_reached(grads):
    def reached(path, leaf):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), name
        assert np.abs(leaf).max() > 0, name

    jax.tree_util.tree_map_with_path(reached, grads)
