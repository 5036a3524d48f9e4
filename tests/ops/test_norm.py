import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import norm
from tests.oracles import norm as oracle
from tests.tolerances import FP32, as_float64, assert_close

EPS = 1e-6


def arrays(dtype, shape=(2, 3, 21)):
    rng = np.random.default_rng(0)
    x, gate = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    return x, gate, jnp.asarray(rng.normal(size=shape[-1]), jnp.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_norms_match_their_formulas_and_are_not_rounded(dtype):
    x, gate, weight = arrays(dtype)
    wide = [as_float64(a) for a in (x, gate, weight)]
    cases = [
        (norm.plain_rmsnorm(x, weight, EPS), oracle.plain_rmsnorm(wide[0], wide[2], EPS)),
        (norm.offset_rmsnorm(x, weight, EPS), oracle.offset_rmsnorm(wide[0], wide[2], EPS)),
        (norm.gated_rmsnorm(x, gate, weight, EPS), oracle.gated_rmsnorm(*wide, EPS)),
        (norm.l2norm(x), oracle.l2norm(wide[0])),
    ]
    for actual, expected in cases:
        assert actual.dtype == jnp.float32
        assert_close(actual, expected, FP32)


def test_epsilon_decides_small_rows():
    x = jnp.full((1, 4), 1e-3, jnp.float32)
    one = jnp.ones(4, jnp.float32)
    assert_close(norm.plain_rmsnorm(x, one, 1e-6), np.full((1, 4), 1e-3 / np.sqrt(2e-6)), FP32)
    assert_close(norm.l2norm(x), np.full((1, 4), 1e-3 / np.sqrt(5e-6)), FP32)


@pytest.mark.parametrize("rule", [norm.plain_rmsnorm, norm.offset_rmsnorm])
def test_a_zero_row_stays_zero(rule):
    zero = jnp.zeros((2, 4), jnp.bfloat16)
    assert not np.asarray(rule(zero, jnp.ones(4, jnp.float32), EPS)).any()
    assert not np.asarray(norm.l2norm(zero)).any()


def test_a_dead_row_does_not_reach_others():
    x, _, weight = arrays("float32")
    poisoned = norm.plain_rmsnorm(x.at[0, 1].set(jnp.nan), weight, EPS)
    clean = np.delete(np.asarray(norm.plain_rmsnorm(x, weight, EPS)).reshape(6, -1), 1, axis=0)
    assert np.array_equal(np.delete(np.asarray(poisoned).reshape(6, -1), 1, axis=0), clean)


def test_wrong_shapes_are_errors():
    x, gate, weight = arrays("float32")
    with pytest.raises(ValueError, match="weight"):
        norm.plain_rmsnorm(x, weight[:1], EPS)
    with pytest.raises(ValueError, match="gate"):
        norm.gated_rmsnorm(x, gate[:1], weight, EPS)
    assert jax.eval_shape(norm.l2norm, x).shape == x.shape
