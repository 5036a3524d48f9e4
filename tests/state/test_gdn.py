"""GDN images and the fold: strict no-op at 0, columns along a path, slots apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import GdnConfig
from dflash_jax.state.decode import Rows
from dflash_jax.state.gdn import GdnRecords, GdnState, fold
from tests.tolerances import FP32_CHAIN, assert_close

GDN = GdnConfig(key_heads=2, value_heads=4, key_dim=3, value_dim=5, conv_kernel=4)
SLOTS, COLUMNS = 4, 6


def draw(seed, *shape):
    return jnp.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def state():
    zeros = GdnState.zeros(SLOTS, GDN, jnp.float32)
    return GdnState(
        recurrent=draw(0, *zeros.recurrent.shape), conv=draw(1, *zeros.conv.shape)
    )


def records():
    decay = draw(4, 2, COLUMNS, 4, 2)
    return GdnRecords(
        key=draw(2, 2, COLUMNS, 2, 3), delta=draw(3, 2, COLUMNS, 4, 5),
        decay=jnp.stack([-jnp.abs(decay[..., 0]), jax.nn.sigmoid(decay[..., 1])], axis=-1),
        conv_input=draw(5, 2, COLUMNS, GDN.channels),
    )


def folded(counts, path=None, rows=(2, 0)):
    path = np.tile(np.arange(COLUMNS), (2, 1)) if path is None else np.array(path)
    return fold(
        (state(),), (records(),), Rows.of(rows), jnp.array(path.astype(np.int32)),
        jnp.array(np.array(counts, np.int32)), implementation="auto",
    )[0]


def test_no_columns_leave_every_byte():
    after = folded([0, 0])
    np.testing.assert_array_equal(after.recurrent, state().recurrent)
    np.testing.assert_array_equal(after.conv, state().conv)


def test_other_slots_keep_every_byte():
    after = folded([3, 0])
    others = jnp.array([0, 1, 3])
    np.testing.assert_array_equal(after.recurrent[others], state().recurrent[others])
    np.testing.assert_array_equal(after.conv[others], state().conv[others])
    assert (np.asarray(after.recurrent[2]) != np.asarray(state().recurrent[2])).any()


def test_an_idle_row_drops():
    after = folded([3, 3], rows=(2, SLOTS))
    np.testing.assert_array_equal(after.recurrent[:2], state().recurrent[:2])
    np.testing.assert_array_equal(after.recurrent[3], state().recurrent[3])


@pytest.mark.parametrize("count", [1, 2, 3, COLUMNS])
def test_d7_history_and_state_follow_the_path(count):
    path = [[0, 2, 4, 5, 1, 3], [0, 1, 3, 5, 2, 4]]
    after, before, kept = folded([count, count], path), state(), records()
    for row, slot in enumerate((2, 0)):
        columns = path[row][:count]
        history = np.concatenate([before.conv[slot], kept.conv_input[row, columns]])
        np.testing.assert_array_equal(after.conv[slot], history[-3:])
        expected = np.asarray(before.recurrent[slot], np.float64)
        for column in columns:
            key = np.repeat(np.asarray(kept.key[row, column]), 2, axis=0)  # two heads each
            expected *= np.exp(kept.decay[row, column, :, 0], dtype=np.float64)[:, None, None]
            expected += np.asarray(kept.delta[row, column])[:, :, None] * key[:, None, :]
        assert_close(after.recurrent[slot], expected, FP32_CHAIN)
