"""Rings: position p at index p mod S, the live interval, and writes that drop."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.state.ring import KVRing, live_interval

S = 5


def filled(lengths):
    """A ring of one head, D = 1, whose key at every write is the position; several writes."""
    ring = KVRing.zeros(3, 1, S, 1, jnp.float32, jnp.float16)
    ring = ring.replace(key=ring.key - 1.0)
    start = 0
    for length in lengths:
        position = np.arange(start, start + length, dtype=np.float32).reshape(1, length, 1, 1)
        ring = ring.write(
            jnp.array(position), jnp.array(position.astype(np.float16)),
            jnp.array([1]), jnp.array([start]), jnp.array([length]),
        )
        start += length
    return ring, start


@pytest.mark.parametrize("lengths", [[1], [5], [3, 4], [4, 1, 1], [12], [2, 11], [5, 5, 5]])
def test_the_live_interval_holds_its_positions(lengths):
    ring, frontier = filled(lengths)
    first, end = (int(x) for x in live_interval(jnp.array(frontier), S))
    assert (first, end) == (max(0, frontier - S), frontier)
    for position in range(first, end):
        assert ring.key[1, 0, position % S, 0] == position
        assert ring.value[1, 0, position % S, 0] == position
    assert (np.asarray(ring.key[jnp.array([0, 2])]) == -1.0).all()


def test_rows_out_of_range_and_of_no_columns_write_nothing():
    ring, _ = filled([3])
    rows = jnp.full((2, 2, 1, 1), 9.0)
    after = ring.write(
        rows, rows.astype(jnp.float16), jnp.array([3, 1]), jnp.array([0, 0]), jnp.array([2, 0])
    )
    np.testing.assert_array_equal(after.key, ring.key)
    np.testing.assert_array_equal(after.value, ring.value)
