"""Paged K/V: positions through a table, and pages that must not be touched."""

import jax.numpy as jnp
import numpy as np

from dflash_jax.state.pages import KVPages, PageTable


def ints(*values):
    return jnp.array(np.array(values, np.int32))


def test_rows_land_at_their_positions_and_nowhere_else():
    pool = KVPages.zeros(1, 4, 3, 1, jnp.float32, jnp.float32)
    table = jnp.array(np.array([[2, 0, 4, 4]], np.int32))
    rows = jnp.arange(10.0, 14.0).reshape(1, 4, 1, 1)
    after = pool.write(rows, -rows, table, ints(1), ints(3))
    expected = np.zeros((4, 3))
    expected[2, 1], expected[2, 2], expected[0, 0] = 10.0, 11.0, 12.0
    np.testing.assert_array_equal(after.key[0, :, :, 0], expected)
    np.testing.assert_array_equal(after.value[0, :, :, 0], -expected)


def test_e9_unmapped_and_overlong_positions_drop():
    """Neither page 0 nor the last page receives a row whose entry is the page count."""
    pool = KVPages.zeros(1, 4, 3, 1, jnp.float32, jnp.float32)
    rows = jnp.ones((1, 9, 1, 1))
    table = jnp.array(np.array([[4, 4]], np.int32))
    after = pool.write(rows, rows, table, ints(0), ints(9))
    assert not np.asarray(after.key).any()


def test_idle_rows_read_a_table_that_exists():
    table = PageTable.unmapped(2, 3, 7)
    assert table.ids.tolist() == [[7, 7, 7]] * 2
    assert table.rows(ints(0, 2, 2**30)).shape == (3, 3)
