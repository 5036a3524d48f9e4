"""Products with float8 blocks: the formula in float64, at the edges of blocks and of tiles."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.ops.block_scaled_linear import BlockScale, block_scaled_linear, dequantise
from dflash_jax.pallas import block_scaled_linear as kernel
from tests.oracles import block_scaled_linear as oracle
from tests.tolerances import BF16_MATMUL, FP32, as_float64, assert_close

FORMS = ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]


def matrix(out, inner, rows, columns, seed=0):
    """Float8 values over the whole range and scales that are no powers of two."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(out, inner)) * 10.0 ** rng.uniform(-3, 2, (out, inner))
    values = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    scale = np.exp(rng.normal(size=(out // rows, -(-inner // columns)))) / 64
    return values, scale.astype(np.float32)


def arrays(tokens, out, inner, rows, columns, dtype):
    values, scale = matrix(out, inner, rows, columns)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(tokens, inner)), dtype)
    expected = as_float64(x) @ oracle.dequantise(as_float64(values), scale, rows, columns).T
    return x, jnp.asarray(values), BlockScale(jnp.asarray(scale), columns), expected


EDGES = [(96, 64, 32, 16), (40, 96, 8, 64), (7, 200, 1, 128), (24, 16, 24, 128), (64, 130, 16, 128)]


@pytest.mark.parametrize(("out", "inner", "rows", "columns"), EDGES)
def test_dequantised_values_are_the_rounded_products(out, inner, rows, columns):
    values, scale = matrix(out, inner, rows, columns)
    exact = oracle.dequantise(as_float64(values), scale, rows, columns)
    stored = jnp.asarray(values), BlockScale(jnp.asarray(scale), columns)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        got = np.asarray(jax.jit(dequantise, static_argnums=2)(*stored, dtype))
        # float8 has 4 significant bits and float32 24: the product of both is exact in float64.
        np.testing.assert_array_equal(got, exact.astype(np.float32).astype(dtype))


def test_all_float8_values_survive_with_their_scale():
    """256 bit patterns but the two NaN, under a scale of one: nothing is rounded in any dtype."""
    bits = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    values = bits.view(ml_dtypes.float8_e4m3fn)[None, :]
    scale = BlockScale(jnp.ones((1, 2), jnp.float32), 128)
    for dtype in ("float32", "bfloat16"):
        got = dequantise(jnp.asarray(values), scale, dtype)
        np.testing.assert_array_equal(as_float64(got), as_float64(values))


@pytest.mark.parametrize(("out", "inner", "rows", "columns"), EDGES)
def test_the_product_matches_the_oracle(out, inner, rows, columns):
    x, values, scale, expected = arrays(5, out, inner, rows, columns, "float32")
    assert_close(block_scaled_linear(x, values, scale, jnp.float32), expected, FP32)
    x, values, scale, expected = arrays(5, out, inner, rows, columns, "bfloat16")
    result = block_scaled_linear(x.reshape(1, 5, -1), values, scale, jnp.bfloat16)
    assert result.dtype == jnp.bfloat16 and result.shape == (1, 5, out)
    assert_close(result[0], expected, BF16_MATMUL)


# Rows of x at the edges of the tile of 16, and matrix rows at those of 64 and 128; blocks that are
# wider than a row, that a step fills, and that hold several steps.
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "out", "inner", "rows", "columns"),
    [
        (1, 64, 128, 64, 128), (8, 63, 256, 1, 128), (16, 65, 48, 5, 128), (17, 192, 256, 64, 64),
        (64, 130, 384, 10, 128), (65, 129, 256, 43, 256), (128, 128, 32, 128, 16),
    ],
)  # fmt: skip
def test_the_kernel_matches_the_oracle_in_fp32(tokens, out, inner, rows, columns, form):
    x, values, scale, expected = arrays(tokens, out, inner, rows, columns, "bfloat16")
    result = block_scaled_linear(x, values, scale, jnp.float32, implementation=form)
    assert_close(result, expected, FP32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shares", [1, 2, 4])
def test_shares_of_the_columns_add_up_and_rows_of_x_stay_apart(shares, form):
    x, values, scale, expected = arrays(9, 96, 512, 32, 128, "bfloat16")
    tiles = kernel.Tiles(rows=64, step=64, shares=shares)

    def product(x):
        shares = kernel.parts(
            x, values, scale.values, columns=128, tiles=tiles, interpret=form == "interpret"
        )
        return jnp.sum(shares, axis=0)

    clean = product(x)
    assert_close(clean, expected, FP32)
    dirty = product(x.at[8].set(jnp.nan))
    np.testing.assert_array_equal(np.asarray(dirty)[:8], np.asarray(clean)[:8])


def test_a_step_never_leaves_a_block():
    for inner, columns, step in [
        (5120, 128, 128), (17408, 128, 128), (512, 64, 64), (96, 128, 32), (200, 64, 8),
        (64, 48, 16),
    ]:  # fmt: skip
        assert kernel.Tiles.of(8, 256, inner, columns).step == step
        assert kernel.supports(8, jnp.bfloat16, inner, columns) == (step >= 16)


def test_no_copy_of_the_matrix_in_another_dtype_is_kept_by_the_kernel():
    """What a jitted product holds beside its arguments is less than the matrix."""
    x, values, scale, _ = arrays(8, 1024, 1024, 128, 128, "bfloat16")
    jaxpr = jax.make_jaxpr(
        lambda *a: block_scaled_linear(*a, jnp.float32, implementation="interpret")
    )(x, values, scale)
    outer = [v.aval for eqn in jaxpr.jaxpr.eqns for v in eqn.outvars]
    assert all(v.size < values.size for v in outer)


def test_what_the_kernel_lacks_is_refused_by_name_and_served_by_auto():
    x, values, scale, expected = arrays(3, 16, 40, 8, 16, "bfloat16")
    with pytest.raises(NotImplementedError, match="block_scaled_linear: the kernel takes"):
        block_scaled_linear(x, values, scale, jnp.float32, implementation="interpret")
    wide = arrays(129, 16, 64, 8, 16, "bfloat16")[:3]
    with pytest.raises(NotImplementedError, match="1..128 bfloat16 rows"):
        block_scaled_linear(*wide, jnp.float32, implementation="interpret")
    exact = x.astype(jnp.float32), values, scale
    with pytest.raises(NotImplementedError, match="got float32"):
        block_scaled_linear(*exact, jnp.float32, implementation="interpret")
    assert_close(block_scaled_linear(x, values, scale, jnp.float32), expected, BF16_MATMUL)


def test_wrong_shapes_and_dtypes_are_errors():
    x, values, scale, _ = arrays(3, 16, 64, 8, 32, "bfloat16")
    with pytest.raises(ValueError, match=r"kernel: expected \[out, 63\]"):
        block_scaled_linear(x[:, 1:], values, scale, jnp.float32)
    with pytest.raises(ValueError, match="kernel: expected float8_e4m3fn, got bfloat16"):
        block_scaled_linear(x, values.astype(jnp.bfloat16), scale, jnp.float32)
    for bad in (scale.values[:, :1], scale.values[0], jnp.ones((3, 2)), jnp.ones((0, 2))):
        with pytest.raises(ValueError, match=r"scale: expected \['a divisor of 16', 2\]"):
            block_scaled_linear(x, values, BlockScale(bad.astype(jnp.float32), 32), jnp.float32)
    half = BlockScale(scale.values.astype(jnp.bfloat16), 32)
    with pytest.raises(ValueError, match="scale: expected float32, got bfloat16"):
        block_scaled_linear(x, values, half, jnp.float32)
