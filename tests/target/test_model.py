"""The target as a whole: captured residuals, dead columns, tied heads, and MoE rows apart."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import tiny_target
from dflash_jax.steps import Models, Params
from dflash_jax.steps.init import abstract_params, random_params
from dflash_jax.target import Target, TargetColumns
from tests import cases
from tests.oracles import block_scaled_linear as blocks
from tests.oracles.norm import offset_rmsnorm
from tests.tolerances import FP32, FP32_CHAIN, as_float64, assert_close

WIDTH = 6


@functools.cache
def scene(moe):
    """Config, variables, an empty state of one slot, and a random block [1, 6, H]."""
    config = tiny_target(moe=moe)
    models = Models(config, None, cases.tiny_run(0, 1))
    return config, random_params(models, seed=2).target, models.zeros().target, block(config, 0)


def block(config, seed):
    x = np.random.default_rng(seed).standard_normal((1, WIDTH, config.hidden))
    return jnp.array(x.astype(np.float32))


def columns(live=WIDTH):
    position = np.repeat(np.arange(WIDTH, dtype=np.int32)[None, :, None], 3, axis=2)
    return TargetColumns.chained(
        positions=jnp.array(position), frontier=jnp.array([0]), live=jnp.array([live]),
        table=jnp.zeros((1, 8), jnp.int32), slot=jnp.array([0]),
    )


def run(config, variables, state, x, capture, live=WIDTH):
    module = Target(config, cases.tiny_run(0, 1).dtypes, capture)

    @jax.jit
    def apply(variables, x, state, columns):
        return module.apply({"params": variables}, x, columns, state, method="verify")

    return apply(variables, x, state, columns(live))


@pytest.mark.parametrize("moe", [False, True])
def test_a4_the_feature_of_block_l_is_the_residual_after_it(moe):
    """Equal to the residual a model cut after block l ends with; the last block included."""
    config, variables, state, x = scene(moe)
    order = (3, 0, 2, 1)
    features = np.asarray(run(config, variables, state, x, order).features)
    for place, layer in enumerate(order):
        kinds = config.layer_types[: layer + 1]
        cut = tiny_target(
            moe=moe, layer_types=kinds, gdn=config.gdn,
        )
        short = state.replace(
            kv=state.kv[: sum(kind == "full_attention" for kind in kinds)],
            gdn=state.gdn[: sum(kind == "linear_attention" for kind in kinds)],
        )
        kept = {
            name: leaf for name, leaf in variables.items()
            if not name.startswith("layers_") or int(name[7:]) <= layer
        }
        alone = run(cut, kept, short, x, (layer,))
        ours = features[..., place * config.hidden : (place + 1) * config.hidden]
        assert_close(ours, alone.features, FP32)
        weight = np.asarray(variables["final_norm"]["weight"])
        assert_close(
            alone.hidden, offset_rmsnorm(np.asarray(alone.features), weight, config.norm_eps), FP32
        )


@pytest.mark.parametrize("moe", [False, True])
def test_dead_columns_and_dead_state_may_be_nan(moe):
    config, variables, state, x = scene(moe)
    clean = run(config, variables, state, x, (1,), live=4)
    spoiled_state = state.replace(kv=jax.tree.map(lambda p: p * jnp.nan, state.kv))
    spoiled = run(config, variables, spoiled_state, x.at[:, 4:].set(jnp.nan), (1,), live=4)
    for name in ("hidden", "features"):
        ours, plain = (np.asarray(getattr(out, name)[:, :4]) for out in (spoiled, clean))
        np.testing.assert_array_equal(ours, plain)


def test_a_tied_target_has_no_head_and_uses_the_embedding():
    config = tiny_target(tie_embeddings=True)
    models = Models(config, None, cases.tiny_run(0, 1))
    assert "head" not in abstract_params(models).target
    drawn = random_params(models, seed=0)
    module = models.target_module
    matrix = module.apply({"params": drawn.target}, method="head_matrix")
    np.testing.assert_array_equal(matrix, drawn.target["embedding"])


def test_the_head_includes_reserved_rows():
    """Rows >= V_pub are logits like others here; choices exclude them."""
    config, variables, _, x = scene(False)
    models = Models(config, None, cases.tiny_run(0, 1))
    logits = models.target_module.apply({"params": variables}, x, method="logits")
    expected = np.asarray(x, np.float64) @ np.asarray(variables["head"], np.float64).T
    assert_close(logits, expected, FP32)


def dequantised(config, variables):
    """The dense target of the same values, by the formula in float64, and its config."""
    fp8 = config.fp8

    def matrix(values, scale):
        rows = values.shape[-2] // scale.shape[-2]
        flat = zip(np.reshape(values, (-1, *values.shape[-2:])),
                   np.reshape(scale, (-1, *scale.shape[-2:])), strict=True)
        exact = [blocks.dequantise(as_float64(v), s, rows, fp8.block_columns) for v, s in flat]
        return jnp.asarray(np.reshape(exact, values.shape), jnp.float32)

    def walk(tree):
        kept = {}
        for name, leaf in tree.items():
            beside = tree.get("scale" if name == "kernel" else f"{name}_scale")
            if isinstance(leaf, dict):
                kept[name] = walk(leaf)
            elif beside is not None:
                kept[name] = matrix(np.asarray(leaf), np.asarray(beside))
            elif not name.endswith("scale"):
                kept[name] = leaf
        return kept

    dense = walk(variables)
    for layer in config.linear_layers:
        mixer = dense[f"layers_{layer}"]["delta_net"]
        rows = [mixer["in_proj"]["kernel"], mixer.pop("gates")["kernel"]]
        mixer["in_proj"]["kernel"] = jnp.concatenate(rows)
    return dataclasses.replace(config, fp8=None), dense


@pytest.mark.parametrize("moe", [False, True])
def test_a_float8_target_computes_what_its_dequantised_values_do(moe):
    """Blocks of 24 x 40 divide no extent of the tiny target: gcd blocks and cut ones are used."""
    config = tiny_target(moe=moe).with_fp8(24, 40)
    models = Models(config, None, cases.tiny_run(0, 1))
    variables, state = random_params(models, seed=2).target, models.zeros().target
    kernels = [x for x in jax.tree.leaves(variables) if x.dtype == jnp.float8_e4m3fn]
    assert len(kernels) == config.fp8.count == 4 * (6 if moe else 4)
    ours = run(config, variables, state, block(config, 0), (0, 3))
    theirs = run(*dequantised(config, variables), state, block(config, 0), (0, 3))
    for name in ("hidden", "features"):
        assert_close(getattr(ours, name), getattr(theirs, name), FP32_CHAIN)
    # Not by chance: other scales give other values.
    variables["layers_0"]["delta_net"]["output"]["scale"] *= 1.01
    other = run(config, variables, state, block(config, 0), (0, 3))
    with pytest.raises(AssertionError):
        assert_close(other.hidden, theirs.hidden, FP32_CHAIN)


def test_params_is_a_pytree_of_both_halves():
    params = Params(target={"a": jnp.zeros(2)}, draft={})
    assert len(jax.tree.leaves(params)) == 1


@pytest.mark.parametrize(
    "method, kernels",
    [("verify", {"router", "route", "skinny_linear"}), ("prefill", {"route"})],
)
def test_a_chunk_leaves_the_routers_product_to_xla_as_its_other_dense_ones(method, kernels):
    """By name, in whatever form the kernels run; a round's is that form."""
    config, variables, state, x = scene(moe=True)
    module = Target(config, cases.tiny_run(0, 1).dtypes, implementation="interpret")
    program = jax.make_jaxpr(functools.partial(module.apply, method=method))(
        {"params": variables}, x, columns(), state
    )
    found = re.findall(r"^let (\w+) =", str(program), re.MULTILINE)
    assert {"router", "route", "skinny_linear"}.intersection(found) == kernels
