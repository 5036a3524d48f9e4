import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import rope
from tests.oracles import rope as oracle
from tests.tolerances import FP32, as_float64, assert_close

# Called eagerly, each operation in them would be a program of its own to compile.
rope_1d = jax.jit(rope.rope_1d, static_argnums=2)
mrope_partial = jax.jit(
    rope.mrope_partial, static_argnames=("theta", "rotary_dim", "mrope_section")
)

PLACES = [0, 1, 255, 256, 65535, 65536, 131071, 262142, 262143]


def heads(dtype, head_dim=8, tokens=4, batch=2):
    rng = np.random.default_rng(head_dim)
    return jnp.asarray(rng.normal(size=(batch, tokens, 3, head_dim)), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [2, 6, 32])
def test_rope_1d_turns_pairs_by_position_times_frequency(dtype, head_dim):
    x = heads(dtype, head_dim)
    positions = np.array([[0, 1, 7, 4095], [12, 13, 100000, 262143]], np.int32)
    actual = rope_1d(x, jnp.asarray(positions), 1e4)
    assert actual.dtype == jnp.float32
    assert_close(actual, oracle.rope_1d(as_float64(x), positions, 1e4), FP32)


@pytest.mark.parametrize("theta", [1e4, 1e7])
def test_angles_stay_exact_at_the_last_position_of_the_context(theta):
    """fp32 positions times fp32 frequencies are off by 8e-3 rad at 262143."""
    head_dim = 64
    x = np.zeros((1, len(PLACES), 1, head_dim), np.float32)
    x[..., : head_dim // 2] = 1.0
    positions = jnp.asarray([PLACES], jnp.int32)
    turned = as_float64(rope_1d(x, positions, theta))[0, :, 0]
    actual = turned[:, : head_dim // 2] + 1j * turned[:, head_dim // 2 :]
    for place, row in zip(PLACES, actual, strict=True):
        for pair, value in enumerate(row):
            expected = oracle.angle(place, pair, head_dim, theta)
            assert abs(np.angle(value * np.exp(-1j * expected))) < 2e-6


def test_negative_positions_turn_backwards():
    x = heads("float32")
    positions = np.array([[-1, -255, -256, -70000]] * 2, np.int32)
    actual = rope_1d(x, jnp.asarray(positions), 1e4)
    assert_close(actual, oracle.rope_1d(as_float64(x), positions, 1e4), FP32)


def test_a9_half_split_is_ours_and_interleaved_differs():
    """Golden head: position 1, theta 1e4, D = 4, so the frequencies are 1 and 0.01."""
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    actual = np.asarray(rope_1d(x, jnp.ones((1, 1), jnp.int32), 1e4)).reshape(4)
    np.testing.assert_allclose(actual, [-1.984111, 1.959901, 2.462378, 4.019800], atol=2e-6)
    interleaved = [-1.142640, 1.922076, 2.959851, 4.029799]
    assert np.abs(actual - interleaved).max() > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "rotary_dim, section", [(8, (2, 1, 1)), (64, (11, 11, 10)), (10, (3, 1, 1)), (4, (2, 0, 0))]
)
def test_mrope_interleaves_three_axes_and_passes_the_rest(dtype, rotary_dim, section):
    x = heads(dtype, head_dim=rotary_dim + 5, tokens=2)
    positions = np.array([[[0, 3, 9], [50, 2, 1000]], [[7, 7, 7], [262143, 1, 0]]], np.int32)
    actual = mrope_partial(
        x, jnp.asarray(positions), theta=1e4, rotary_dim=rotary_dim, mrope_section=section
    )
    expected = oracle.mrope_partial(as_float64(x), positions, 1e4, rotary_dim, section)
    assert_close(actual, expected, FP32)
    assert np.array_equal(as_float64(actual)[..., rotary_dim:], as_float64(x)[..., rotary_dim:])


def test_mrope_of_text_is_scalar_rope_of_the_first_dims():
    x = heads("float32", head_dim=32)
    positions = jnp.arange(8, dtype=jnp.int32).reshape(2, 4) * 1000
    partial = mrope_partial(
        x, jnp.stack([positions] * 3, -1), theta=1e7, rotary_dim=8, mrope_section=(2, 1, 1)
    )
    assert np.array_equal(partial[..., :8], rope_1d(x[..., :8], positions, 1e7))


def test_wrong_positions_and_sections_are_errors():
    x = heads("float32")
    positions = jnp.zeros((2, 4), jnp.int32)
    three = jnp.zeros((2, 4, 3), jnp.int32)
    with pytest.raises(ValueError, match="positions: expected int32"):
        rope_1d(x, positions.astype(jnp.float32), 1e4)
    with pytest.raises(ValueError, match="positions"):
        rope_1d(x, three, 1e4)
    with pytest.raises(ValueError, match="rotary_dim"):
        rope_1d(x[..., :5], positions, 1e4)
    with pytest.raises(ValueError, match="rotary_dim"):
        mrope_partial(x, three, theta=1e4, rotary_dim=10, mrope_section=(3, 1, 1))
    with pytest.raises(ValueError, match="mrope_section"):
        mrope_partial(x, three, theta=1e4, rotary_dim=8, mrope_section=(1, 1, 2))
