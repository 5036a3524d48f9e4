import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import causal_conv1d as conv
from tests.oracles import causal_conv1d as oracle
from tests.tolerances import FP32, as_float64, assert_close

# Called eagerly, each operation in them would be a program of its own to compile.
causal_conv1d_silu = jax.jit(conv.causal_conv1d_silu, static_argnames="chain")
shift_history = jax.jit(conv.shift_history)

TREES = np.array([[0, 0, 1, 0, 2, 3, 4], [0, 0, 0, 0, 1, 4, 5]], np.int32)
CHAIN = np.array([[0, 0, 1, 2, 3, 4, 5]] * 2, np.int32)


def arrays(kernel, dtype="bfloat16", width=7, channels=5):
    rng = np.random.default_rng(kernel)
    u = jnp.asarray(rng.normal(size=(2, width, channels)), dtype)
    history = jnp.asarray(rng.normal(size=(2, kernel - 1, channels)), dtype)
    return u, history, jnp.asarray(rng.normal(size=(channels, kernel)), jnp.float32)


@pytest.mark.parametrize("kernel", [1, 2, 4, 9])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_columns_convolve_their_ancestors_then_the_history(kernel, dtype):
    u, history, taps = arrays(kernel, dtype)
    wide = [as_float64(a) for a in (u, history, taps)]
    for parent in (TREES, CHAIN):
        actual = causal_conv1d_silu(u, history, taps, jnp.asarray(parent))
        assert actual.dtype == jnp.float32
        assert_close(actual, oracle.causal_conv1d_silu(*wide, parent), FP32)
    chain = causal_conv1d_silu(u, history, taps, None, chain=True)
    assert_close(chain, oracle.causal_conv1d_silu(*wide, CHAIN), FP32)


def test_the_last_tap_multiplies_the_current_column():
    u, history, _ = arrays(4, "float32")
    current = jnp.zeros((5, 4), jnp.float32).at[:, 3].set(1.0)
    out = causal_conv1d_silu(u, history, current, jnp.asarray(TREES))
    assert_close(out, as_float64(jax.nn.silu(u)), FP32)


def test_a_chain_in_two_pieces_equals_one():
    """Bit for bit without jit; in one program, XLA computes a sigmoid by the place of its value."""
    causal_conv1d_silu = conv.causal_conv1d_silu
    u, history, taps = arrays(4)
    whole = causal_conv1d_silu(u, history, taps, None, chain=True)
    first = causal_conv1d_silu(u[:, :2], history, taps, None, chain=True)
    between = shift_history(history, u[:, :2], None, jnp.array([2, 2], jnp.int32))
    second = causal_conv1d_silu(u[:, 2:], between, taps, None, chain=True)
    assert np.array_equal(whole, jnp.concatenate([first, second], axis=1))


@pytest.mark.parametrize("chain", [False, True])
def test_dead_columns_and_rows_reach_nothing_live(chain):
    u, history, taps = arrays(4)
    parent = jnp.asarray(CHAIN)
    clean = causal_conv1d_silu(u, history, taps, parent, chain=chain)
    dead = u.at[0, 5:].set(jnp.nan).at[1].set(jnp.nan)
    wild = parent.at[0, 5:].set(-1).at[1].set(99)
    poisoned = causal_conv1d_silu(dead, history.at[1].set(jnp.nan), taps, wild, chain=chain)
    assert np.array_equal(poisoned[0, :5], clean[0, :5])


@pytest.mark.parametrize("kernel", [1, 2, 4, 9])
def test_d7_history_keeps_the_last_inputs_of_history_and_path(kernel):
    u, history, _ = arrays(kernel)
    path = np.array([[0, 1, 2, 4, 6, 5, 3], [0, 1, 4, 5, 6, 2, 3]], np.int32)
    for count in ([0, 7], [1, 2], [3, 4], [7, 0]):
        kept = shift_history(history, u, jnp.asarray(path), jnp.asarray(count, jnp.int32))
        expected = oracle.shift_history(np.asarray(history), np.asarray(u), path, count)
        assert np.asarray(kept).tobytes() == expected.tobytes()
        in_order = np.tile(np.arange(7, dtype=np.int32), (2, 1))
        plain = shift_history(history, u, None, jnp.asarray(count, jnp.int32))
        expected = oracle.shift_history(np.asarray(history), np.asarray(u), in_order, count)
        assert np.asarray(plain).tobytes() == expected.tobytes()


def test_d7_a_count_of_zero_returns_the_history_bit_for_bit():
    u, history, _ = arrays(4)
    odd = history.at[0, 0, 0].set(jnp.nan).at[0, 1, 1].set(-0.0)
    wild = jnp.full((2, 7), -1, jnp.int32)
    kept = shift_history(odd, jnp.full_like(u, jnp.nan), wild, jnp.zeros(2, jnp.int32))
    assert np.asarray(kept).tobytes() == np.asarray(odd).tobytes()


def test_entries_of_the_path_behind_the_count_are_not_read():
    u, history, _ = arrays(4)
    count = jnp.asarray([2, 1], jnp.int32)
    path = jnp.asarray([[0, 3, -1, 99, -7, 5, 3], [0, -1, 99, 1, 1, 1, 1]], jnp.int32)
    clean = shift_history(history, u, jnp.clip(path, 0, 6), count)
    assert np.array_equal(as_float64(shift_history(history, u, path, count)), as_float64(clean))


def test_wrong_shapes_and_dtypes_are_errors():
    u, history, taps = arrays(4)
    parent = jnp.asarray(CHAIN)
    with pytest.raises(ValueError, match="history: expected"):
        causal_conv1d_silu(u, history[:, 1:], taps, parent)
    with pytest.raises(ValueError, match="history: expected bfloat16"):
        causal_conv1d_silu(u, history.astype(jnp.float32), taps, parent)
    with pytest.raises(ValueError, match="taps"):
        causal_conv1d_silu(u, history, taps[1:], parent)
    with pytest.raises(ValueError, match="parent"):
        causal_conv1d_silu(u, history, taps, parent[:, 1:])
    with pytest.raises(ValueError, match="history"):
        shift_history(history[:1], u, parent, jnp.zeros(2, jnp.int32))
