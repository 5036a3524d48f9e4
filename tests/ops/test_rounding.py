"""Roundings give what a cast gives, also where the result is subnormal or not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.rounding import round_to, rounded

EDGES = [0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 3e38, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_are_those_of_a_cast(dtype):
    rng = np.random.default_rng(0)
    # From 2^-30 to 2^18, and halves between neighbours of float16's subnormals.
    wide = rng.normal(size=20000) * 2.0 ** rng.integers(-30, 19, 20000)
    ties = (np.arange(-2200, 2200) + 0.5) * 2.0**-24
    x = np.concatenate([wide, ties, EDGES]).astype(np.float32)
    expected = jnp.asarray(x).astype(dtype)  # a call of its own: nothing widens it inside
    both = jax.jit(lambda x: (rounded(x, jnp.dtype(dtype)), round_to(x, jnp.dtype(dtype))))(x)
    assert both[0].dtype == jnp.float32 and both[1].dtype == expected.dtype
    for made in both:
        np.testing.assert_array_equal(made.astype(jnp.float32), expected.astype(jnp.float32))


def test_signs_of_zeros_stay():
    x = jnp.array([-0.0, -(2.0**-26), 2.0**-26], jnp.float32)
    assert jnp.signbit(rounded(x, jnp.dtype("float16"))).tolist() == [True, True, False]
