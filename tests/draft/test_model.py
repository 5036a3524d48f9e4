"""Both drafts over a small context: masks, conditioning, heads, and the columns that count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DraftKind, LayerKind, tiny_draft, tiny_target
from dflash_jax.draft import DraftColumns
from dflash_jax.steps import Models
from dflash_jax.steps.init import random_params
from tests import cases
from tests.oracles.norm import plain_rmsnorm
from tests.tolerances import FP32, assert_close

K, WIDTH, FRONTIER = 3, 4, 20
KINDS = (DraftKind.DFLASH, DraftKind.DFLASH2)


def numbers(seed, *shape):
    return jnp.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@functools.cache
def pair(kind, **overrides):
    """Models and draft variables."""
    models = Models(tiny_target(), tiny_draft(kind, **overrides), cases.tiny_run(K, 1, lanes=1))
    return models, random_params(models, seed=3).draft


def call(models, variables, method, *args):
    return models.draft_module.apply({"params": variables}, *args, method=method)


@functools.partial(jax.jit, static_argnums=0)
def context_of(models, variables, features):
    """Context of `FRONTIER` positions from features [1, FRONTIER, n_tap * H]."""
    table = jnp.arange(models.run.max_pages, dtype=jnp.int32)[None]
    return call(
        models, variables, "store_context", features, models.zeros().context, jnp.array([0]),
        table, jnp.array([0]), jnp.array([FRONTIER]),
    )


def hidden(kind, features, x, live=WIDTH, **overrides):
    """Final mask hidden [1, K, H] and residuals of a block x [1, W, H]."""
    return block(*pair(kind, **overrides), features, x, jnp.array([live]))


@functools.partial(jax.jit, static_argnums=0)
def block(models, variables, features, x, live):
    columns = DraftColumns(
        positions=FRONTIER + jnp.arange(WIDTH, dtype=jnp.int32)[None],
        frontier=jnp.array([FRONTIER]), live=live, slot=jnp.array([0]),
        table=jnp.arange(models.run.max_pages, dtype=jnp.int32)[None],
    )
    context = context_of(models, variables, features)
    return call(models, variables, "block_hidden", x, columns, context)


FEATURES, BLOCK = numbers(0, 1, FRONTIER, 192), numbers(1, 1, WIDTH, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_a10_features_condition_the_block(kind):
    real = hidden(kind, FEATURES, BLOCK).hidden
    zeroed = hidden(kind, jnp.zeros_like(FEATURES), BLOCK).hidden
    assert float(jnp.abs(real - zeroed).max()) > 1e-2


def test_a1_causal_local_layers_do_not_see_later_columns():
    """One local layer: with the flag, column i ignores column i + 1; without it, it does not."""
    later = BLOCK.at[:, 3].add(1.0)
    for causal in (True, False):
        shape = dict(layer_types=(LayerKind.SLIDING,), causal=(causal,))
        first, second = (hidden(DraftKind.DFLASH, FEATURES, x, **shape) for x in (BLOCK, later))
        same = np.array_equal(first.hidden[:, :2], second.hidden[:, :2])
        assert same == causal


def test_a1_causal_full_layers_do_not_see_later_columns():
    later = BLOCK.at[:, 3].add(1.0)
    for causal in (True, False):
        shape = dict(layer_types=(LayerKind.FULL,), window=None, causal=(causal,))
        first, second = (hidden(DraftKind.DFLASH, FEATURES, x, **shape) for x in (BLOCK, later))
        assert np.array_equal(first.hidden[:, :2], second.hidden[:, :2]) == causal


def test_a6_a12_local_layers_never_look_beyond_the_window():
    """Features of positions <= F - S change no column of a draft with local layers only."""
    older = FEATURES.at[:, : FRONTIER - cases.WINDOW + 1].add(3.0)
    edge = FEATURES.at[:, FRONTIER - cases.WINDOW + 1].add(3.0)
    base = hidden(DraftKind.DFLASH2, FEATURES, BLOCK).residuals[-1]
    np.testing.assert_array_equal(hidden(DraftKind.DFLASH2, older, BLOCK).residuals[-1], base)
    changed = hidden(DraftKind.DFLASH2, edge, BLOCK).residuals[-1]
    assert not np.array_equal(changed[:, 0], base[:, 0])


def test_a6_full_layers_see_all_of_the_context():
    first = FEATURES.at[:, 0].add(3.0)
    base = hidden(DraftKind.DFLASH, FEATURES, BLOCK).hidden
    assert not np.array_equal(hidden(DraftKind.DFLASH, first, BLOCK).hidden, base)


def test_a6_the_head_size_need_not_be_hidden_over_heads():
    models, variables = pair(DraftKind.DFLASH, head_dim=16, query_heads=6, kv_heads=3)
    assert variables["layers_0"]["attention"]["qkv"]["kernel"].shape == (12 * 16, 64)
    out = hidden(DraftKind.DFLASH, FEATURES, BLOCK, head_dim=16, query_heads=6, kv_heads=3)
    assert out.hidden.shape == (1, K, 64)
    assert np.isfinite(out.hidden).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_final_norm_reads_mask_columns_only(kind):
    models, variables = pair(kind)
    out = hidden(kind, FEATURES, BLOCK)
    weight = np.asarray(variables["final_norm"]["weight"])
    expected = plain_rmsnorm(np.asarray(out.residuals[-1][:, 1:]), weight, models.draft.norm_eps)
    assert_close(out.hidden, expected, FP32)


def test_dflash_columns_beyond_the_live_width_may_be_nan():
    spoiled = BLOCK.at[:, 3:].set(jnp.nan)
    first, second = (
        hidden(DraftKind.DFLASH, FEATURES, x, live=3).hidden[:, :2] for x in (BLOCK, spoiled)
    )
    np.testing.assert_array_equal(first, second)


def test_features_are_projected_in_recorded_order():
    """Exchanging two captures changes the context: order is part of the config."""
    models, variables = pair(DraftKind.DFLASH)
    swapped = jnp.concatenate([FEATURES[..., 64:128], FEATURES[..., :64], FEATURES[..., 128:]], -1)
    ours, theirs = (context_of(models, variables, f).rings[0].key for f in (FEATURES, swapped))
    assert not np.array_equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_f1_an_own_head_maps_its_rows_to_token_ids(kind):
    models, variables = pair(kind, head_rows=20)
    ids = np.random.default_rng(4).permutation(250)[:20].astype(np.int32)
    ids = np.sort(ids) if kind == DraftKind.DFLASH2 else ids
    head = {**variables["head"], "token_ids": jnp.array(ids)}
    variables, x = {**variables, "head": head}, numbers(6, 1, K, 64)
    target_head = jnp.full((257, 64), jnp.nan)
    scores = np.asarray(x[0], np.float64) @ np.asarray(head["kernel"], np.float64).T
    if kind == DraftKind.DFLASH:
        found = call(models, variables, "argmax", x, target_head, 250)
        assert found[0].tolist() == ids[scores.argmax(axis=1)].tolist()
        return
    found = call(models, variables, "topk", x, target_head, 250)
    order = np.argsort(-scores, axis=1)[:, :8]
    assert found.ids[0].tolist() == ids[order].tolist()
    assert_close(found.scores[0], np.take_along_axis(scores, order, axis=1), FP32)


def test_f1_an_own_embedding_replaces_the_targets():
    models, variables = pair(DraftKind.DFLASH, own_embedding=True)
    tokens = jnp.array([[3, 256]])
    rows = call(models, variables, "embed", tokens, jnp.full((257, 64), jnp.nan))
    np.testing.assert_array_equal(rows, variables["embedding"][tokens])


def test_a13_draft_inputs_are_unscaled_target_rows():
    models, variables = pair(DraftKind.DFLASH2)
    table = numbers(7, 257, 64)
    tokens = jnp.array([[0, 256, 77]])
    rows = call(models, variables, "embed", tokens, table)
    np.testing.assert_array_equal(rows, table[tokens])
