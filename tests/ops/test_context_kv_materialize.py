"""Context keys and values carry the roundings of their draft kind and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.context_kv_materialize import context_kv_materialize
from tests.oracles import context_kv_materialize as oracle
from tests.tolerances import BF16_ROUND, FP32, assert_close

LAYERS, KV_HEADS, DIM, BATCH, LENGTH = 3, 2, 16, 2, 5
EPS, THETA = 1e-6, 1e4
KINDS = pytest.mark.parametrize("rounded", [True, False], ids=["dflash", "dflash2"])
# Rows whose position counts up, and rows far out.
POSITIONS = np.array([[0, 1, 2, 3, 4], [63, 64, 4095, 200_000, 262_143]], np.int32)


def make_inputs(seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    width = LAYERS * 2 * KV_HEADS * DIM
    projected = (spread * rng.standard_normal((BATCH, LENGTH, width))).astype(np.float32)
    key_norm = (1.0 + 0.3 * rng.standard_normal((LAYERS, DIM))).astype(np.float32)
    return projected, key_norm


@functools.cache
def compiled(rounded, key_dtype, value_dtype):
    return jax.jit(
        lambda *x: context_kv_materialize(
            *x,
            kv_heads=KV_HEADS,
            eps=EPS,
            theta=THETA,
            rounded=rounded,
            key_dtype=jnp.dtype(key_dtype),
            value_dtype=jnp.dtype(value_dtype),
        )
    )


def run(projected, key_norm, positions=POSITIONS, *, rounded, dtypes=("bfloat16", "float16")):
    """(keys, values), both [layers, B, T, Hkv, D]."""
    keys, values = zip(*compiled(rounded, *dtypes)(projected, key_norm, positions), strict=True)
    assert {x.dtype for x in keys} == {jnp.dtype(dtypes[0])}
    assert {x.dtype for x in values} == {jnp.dtype(dtypes[1])}
    return np.stack(keys), np.stack(values)


def formula(projected, key_norm, positions=POSITIONS, **options):
    return oracle.context_key_value(
        projected, key_norm, positions, kv_heads=KV_HEADS, eps=EPS, theta=THETA, **options
    )


@KINDS
@pytest.mark.parametrize("seed", range(4))
def test_keys_carry_the_roundings_of_the_draft_kind(rounded, seed):
    """The bound is one rounding: two more, or two fewer, exceed it (next test)."""
    inputs = make_inputs(seed)
    keys, _ = run(*inputs, rounded=rounded)
    assert_close(keys, formula(*inputs, rounded=rounded)[0], BF16_ROUND)


@KINDS
@pytest.mark.parametrize("seed", range(4))
def test_keys_of_the_other_kind_are_outside_the_bound(rounded, seed):
    inputs = make_inputs(seed)
    keys, _ = run(*inputs, rounded=rounded)
    with pytest.raises(AssertionError, match="relative L2 error"):
        assert_close(keys, formula(*inputs, rounded=not rounded)[0], BF16_ROUND)


@KINDS
def test_values_are_fp16_of_bf16_exactly(rounded):
    for spread in (1e-6, 1e-3, 1.0, 3e4):
        inputs = make_inputs(spread=spread)
        _, values = run(*inputs, rounded=rounded)
        np.testing.assert_array_equal(
            values.astype(np.float64), formula(*inputs, rounded=rounded)[1]
        )


def test_large_values_overflow_to_infinity_instead_of_saturating():
    projected, key_norm = make_inputs()
    values_of = projected.reshape(BATCH, LENGTH, LAYERS, 2, KV_HEADS, DIM)[:, :, :, 1]
    values_of[0, 0, 0, 0, :4] = [65504.0, 65519.0, 70000.0, -70000.0]
    _, values = run(projected, key_norm, rounded=False)
    # bf16 comes first: 65504 and 65519 are already 65536 when fp16 sees them.
    assert values[0, 0, 0, 0, :4].tolist() == [np.inf, np.inf, np.inf, -np.inf]


@KINDS
def test_exact_policy_rounds_nothing_to_sixteen_bits(rounded):
    inputs = make_inputs()
    keys, values = run(*inputs, rounded=rounded, dtypes=("float32", "float32"))
    expected, _ = formula(*inputs, rounded=rounded, key_dtype="float32", value_dtype="float32")
    assert_close(keys, expected, FP32)
    rows = inputs[0].reshape(BATCH, LENGTH, LAYERS, 2, KV_HEADS, DIM)[:, :, :, 1]
    np.testing.assert_array_equal(values, np.moveaxis(rows, 2, 0))


def test_rows_are_layers_then_key_value_then_heads():
    """A one in projected column c reaches layer, kind, head and dim of c, and nothing else."""
    shape = (LAYERS, 2, KV_HEADS, DIM)
    width = int(np.prod(shape))
    projected = np.zeros((1, width, width), np.float32)
    projected[0, np.arange(width), np.arange(width)] = 1.0
    key_norm = (1.0 + np.arange(LAYERS, dtype=np.float32))[:, None] * np.ones((1, DIM), np.float32)
    keys, values = run(projected, key_norm, np.zeros((1, width), np.int32), rounded=False)
    for column in range(width):
        layer, kind, head, dim = np.unravel_index(column, shape)
        expected = np.zeros((LAYERS, KV_HEADS, DIM))
        expected[layer, head, dim] = 1.0
        stored, other = (values, keys) if kind else (keys, values)
        assert not other[:, 0, column].any()
        if not kind:
            # A one-hot head has rms 1/sqrt(D): the norm makes it (layer + 1) * sqrt(D).
            expected *= (layer + 1) * np.sqrt(DIM)
        np.testing.assert_allclose(stored[:, 0, column].astype(np.float64), expected, rtol=1e-4)


def test_keys_depend_on_position_and_values_do_not():
    projected, key_norm = make_inputs()
    projected[:, 1:] = projected[:, :1]
    keys, values = run(projected, key_norm, rounded=False)
    assert (values == values[:, :, :1]).all()
    for b, t in np.ndindex(BATCH, LENGTH):
        if t:
            assert (keys[:, b, t] != keys[:, b, 0]).any()
    # Rotation by position 0 is the identity: what is left is the norm.
    head = projected[0, 0, :DIM].astype(np.float64)
    normed = oracle.head_rmsnorm(head, key_norm[0].astype(np.float64), EPS)
    assert_close(keys[0, 0, 0, 0], normed, BF16_ROUND)


def test_projected_width_must_fit():
    projected, key_norm = make_inputs()
    with pytest.raises(ValueError, match="projected: expected"):
        run(projected[..., :-1], key_norm, rounded=False)
