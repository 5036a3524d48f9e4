import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.linear import linear, linear_split
from tests.tolerances import BF16_ROUND, FP32, SPLIT_BF16, as_float64, assert_close


def arrays(dtype, inner=300):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, 3, inner)), dtype)
    return x, jnp.asarray(rng.normal(size=(7, inner)), dtype)


def product(x, kernel):
    return as_float64(x) @ as_float64(kernel).T


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_products_accumulate_in_fp32(dtype):
    x, kernel = arrays(dtype)
    actual = linear(x, kernel, jnp.float32)
    assert actual.shape == (2, 3, 7) and actual.dtype == jnp.float32
    assert_close(actual, product(x, kernel), FP32)


def test_the_output_is_rounded_once():
    x, kernel = arrays("bfloat16")
    actual = linear(x, kernel, jnp.bfloat16)
    assert actual.dtype == jnp.bfloat16
    assert_close(actual, product(x, kernel), BF16_ROUND)


@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_split_keeps_what_rounding_the_rows_loses(compile_):
    x, kernel = arrays("float32", inner=512)
    kernel = kernel.astype(jnp.bfloat16)
    expected = product(x, kernel)
    assert_close(compile_(linear_split)(x, kernel), expected, SPLIT_BF16)
    with pytest.raises(AssertionError):
        assert_close(linear(x.astype(jnp.bfloat16), kernel, jnp.float32), expected, SPLIT_BF16)


def test_split_of_an_fp32_kernel_is_an_fp32_product():
    x, kernel = arrays("float32")
    assert_close(linear_split(x, kernel), product(x, kernel), FP32)


def test_mixed_dtypes_and_shapes_are_errors():
    x, kernel = arrays("float32")
    with pytest.raises(ValueError, match="x: expected the kernel's dtype"):
        linear(x, kernel.astype(jnp.bfloat16), jnp.float32)
    with pytest.raises(ValueError, match="kernel: expected"):
        linear(x, kernel[:, :-1], jnp.float32)
    with pytest.raises(ValueError, match="x: expected float32"):
        linear_split(x.astype(jnp.bfloat16), kernel)
    with pytest.raises(ValueError, match="kernel: expected bfloat16 or float32"):
        linear_split(x, kernel.astype(jnp.float16))
