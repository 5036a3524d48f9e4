"""Writes reach exactly the addressed rows of pages and rings, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from dflash_jax.ops.kv_write import write_layers, write_pages, write_ring
from tests.oracles import kv_write as oracle
from tests.tolerances import assert_same_bits

DTYPES = ("bfloat16", "float16", "float32")
HEADS, DIM = 2, 4

jit_pages, jit_ring = jax.jit(write_pages), jax.jit(write_ring)


def distinct(shape, dtype="float32", *, offset=0):
    """A different value in every place, as far as the dtype can tell them apart."""
    values = (np.arange(np.prod(shape)) + offset) % 30011
    return values.reshape(shape).astype(jnp.dtype(dtype))


def ints(*values):
    return np.asarray(values, np.int32)


# --- pages -------------------------------------------------------------------------------------

PAGE, NUM_PAGES = 4, 9
# Permuted pages; 9 is unmapped. Pages 0 and 8 belong to nobody.
TABLE = np.array([[5, 2, 7, 9], [1, 6, 3, 9], [4, 9, 9, 9]], np.int32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_page_rows_reach_their_positions(dtype):
    pages = distinct((HEADS, NUM_PAGES, PAGE, DIM), dtype)
    rows = -distinct((3, 6, HEADS, DIM), dtype, offset=1)
    for start, count in [
        ((0, 0, 0), (6, 5, 4)),
        ((3, 4, 0), (2, 1, 3)),
        ((5, 6, 3), (6, 6, 1)),
        ((11, 7, 0), (1, 5, 0)),
    ]:
        actual = jit_pages(pages, rows, TABLE, ints(*start), ints(*count))
        assert_same_bits(actual, oracle.write_pages(pages, rows, TABLE, start, count))


def test_pages_with_count_zero_are_bit_identical():
    pages = distinct((HEADS, NUM_PAGES, PAGE, DIM), "bfloat16")
    rows = np.full((3, 6, HEADS, DIM), np.nan, pages.dtype)
    assert_same_bits(jit_pages(pages, rows, TABLE, ints(0, 5, 12), ints(0, 0, 0)), pages)


def test_page_rows_past_the_count_may_hold_anything():
    pages = distinct((HEADS, NUM_PAGES, PAGE, DIM), "float16")
    rows = -distinct((3, 6, HEADS, DIM), "float16", offset=1)
    count, start = (2, 0, 3), (3, 1, 0)
    poisoned = rows.copy()
    for b, live in enumerate(count):
        poisoned[b, live:] = np.nan
    actual = jit_pages(pages, poisoned, TABLE, ints(*start), ints(*count))
    assert_same_bits(actual, oracle.write_pages(pages, rows, TABLE, start, count))


def test_e9_sentinel_pages_stay_untouched():
    pages = distinct((HEADS, NUM_PAGES, PAGE, DIM), "float32")
    rows = np.full((3, 6, HEADS, DIM), -1.0, np.float32)
    # Row 0 and 2 run into unmapped entries, row 1 rejects its last four columns.
    actual = np.asarray(jit_pages(pages, rows, TABLE, ints(10, 9, 2), ints(6, 2, 6)))
    for page_id in (0, 8):
        assert_same_bits(actual[:, page_id], pages[:, page_id])
    assert (actual[:, 7, 2:] == -1.0).all() and (actual[:, 3, 1:3] == -1.0).all()
    assert (actual[:, 4, 2:] == -1.0).all()
    assert (actual == -1.0).sum() == (2 + 2 + 2) * HEADS * DIM


def test_e8_page_positions_past_the_table_are_dropped():
    table = np.array([[1, 0], [2, 3]], np.int32)
    pages = distinct((HEADS, 4, PAGE, DIM), "float32")
    rows = -distinct((2, 6, HEADS, DIM), "float32", offset=1)
    start, count = (6, 8), (6, 6)
    actual = np.asarray(jit_pages(pages, rows, table, ints(*start), ints(*count)))
    expected = pages.copy()
    for h in range(HEADS):
        expected[h, 0, 2:4] = rows[0, :2, h]
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("unmapped", [NUM_PAGES, 2**31 - 1, -1, -NUM_PAGES, -(2**31)])
def test_an_idle_row_writes_no_page(unmapped):
    pages = distinct((HEADS, NUM_PAGES, PAGE, DIM), "bfloat16")
    rows = np.full((3, 6, HEADS, DIM), -1.0, pages.dtype)
    table = np.full((3, 4), unmapped, np.int32)
    assert_same_bits(jit_pages(pages, rows, table, ints(0, 4, 15), ints(6, 6, 6)), pages)


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 6])
def test_page_writes_do_not_depend_on_how_rows_are_split(cut):
    pages = distinct((HEADS, NUM_PAGES, PAGE, DIM), "float32")
    rows = -distinct((3, 6, HEADS, DIM), "float32", offset=1)
    start = ints(1, 2, 3)
    once = jit_pages(pages, rows, TABLE, start, ints(6, 6, 1))
    first = jit_pages(pages, rows, TABLE, start, ints(cut, cut, 1))
    rest = np.roll(rows, -cut, axis=1)
    twice = jit_pages(first, rest, TABLE, start + cut, ints(6 - cut, 6 - cut, 0))
    assert_same_bits(twice, once)


# --- all layers along a path ---------------------------------------------------------------------

FORMS = pytest.mark.parametrize(
    "form", ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)


@FORMS
@pytest.mark.parametrize("start, count", [
    ((0, 0, 0), (4, 3, 2)), ((3, 4, 0), (2, 1, 0)), ((5, 6, 3), (4, 4, 1)), ((11, 7, 9), (1, 4, 2)),
])
def test_columns_of_a_path_reach_their_positions_in_every_layer(form, start, count):
    """Nothing else changes; columns off the path, and places past the count, may be anything."""
    layers, paths = 3, np.array([[0, 2, 3, 5], [0, 1, 4, 5], [0, 3, 5, 1]], np.int32)
    pools = tuple(
        tuple(distinct((HEADS, NUM_PAGES, PAGE, DIM), dtype, offset=50 * layer + side)
              for side, dtype in enumerate(("bfloat16", "float16")))
        for layer in range(layers)
    )
    rows = tuple(
        tuple(-distinct((3, 6, HEADS, DIM), pool.dtype, offset=7 * layer + side + 1)
              for side, pool in enumerate(pair))
        for layer, pair in enumerate(pools)
    )
    along = jax.tree.map(
        lambda x: np.take_along_axis(x, paths[:, :, None, None], axis=1), rows
    )
    expected = jax.tree.map(
        lambda pool, row: oracle.write_pages(pool, row, TABLE, start, count), pools, along
    )
    path = paths.copy()
    for b, kept in enumerate(count):
        path[b, kept:] = (10**6, -3, 77, -(10**6))[: 4 - kept]
        for leaf in jax.tree.leaves(rows):
            leaf[b, np.setdiff1d(np.arange(6), paths[b, :kept])] = np.nan
    actual = jax.jit(lambda *args: write_layers(*args, implementation=form))(
        pools, rows, path, TABLE, ints(*start), ints(*count)
    )
    for own, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same_bits(own, other)


def test_layers_of_several_shapes_are_refused():
    one, other = (distinct((HEADS, n, PAGE, DIM)) for n in (NUM_PAGES, 3))
    rows = distinct((3, 6, HEADS, DIM))
    with pytest.raises(ValueError, match="pools: expected one shape"):
        write_layers(
            ((one, one), (other, other)), ((rows, rows),) * 2, ints([0]), TABLE, ints(0), ints(0)
        )


# --- rings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("length", [1, 3, 8, 17])
def test_ring_rows_reach_position_mod_capacity(capacity, length):
    cases = [
        (start, count)
        for start in sorted({0, 1, capacity - 1, capacity, capacity + 1, 3 * capacity})
        for count in sorted({0, 1, length // 2, length - 1, length})
    ]
    start, count = (ints(*x) for x in zip(*cases, strict=True))
    # A slot that nobody writes lies at both ends.
    slot = 1 + np.random.default_rng(0).permutation(len(cases)).astype(np.int32)
    ring = distinct((len(cases) + 2, HEADS, capacity, DIM), "float32")
    rows = -distinct((len(cases), length, HEADS, DIM), "float32", offset=1)
    actual = jit_ring(ring, rows, slot, start, count)
    assert_same_bits(actual, oracle.write_ring(ring, rows, slot, start, count))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ring_rows_are_copied_bit_for_bit(dtype):
    ring = distinct((3, HEADS, 4, DIM), dtype)
    rows = -distinct((2, 6, HEADS, DIM), dtype, offset=1)
    slot, start, count = ints(2, 0), ints(5, 3), ints(6, 2)
    actual = jit_ring(ring, rows, slot, start, count)
    assert_same_bits(actual, oracle.write_ring(ring, rows, slot, start, count))


@pytest.mark.parametrize("count", [5, 6, 9, 11, 16])
def test_more_rows_than_capacity_leave_only_the_last(count):
    capacity, start = 5, 13
    ring = np.full((1, 1, capacity, 1), -1.0, np.float32)
    positions = start + np.arange(16, dtype=np.float32)
    rows = positions[None, :, None, None]
    actual = np.asarray(jit_ring(ring, rows, ints(0), ints(start), ints(count)))[0, 0, :, 0]
    end = start + count
    assert sorted(actual) == list(range(end - capacity, end))
    assert all(position % capacity == index for index, position in enumerate(actual))


@pytest.mark.parametrize("count", [0, 1, 4, 5, 11])
def test_a_ring_scatter_names_no_index_twice(count):
    """A scatter may run in any order, so this is checked on the indices that it is given."""
    capacity = 4
    ring = jnp.zeros((2, 1, capacity, 1))
    args = (ring, jnp.ones((1, 11, 1, 1)), ints(1), ints(6), ints(count))
    traced = jax.make_jaxpr(write_ring)(*args)
    (scatter,) = (eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scatter")
    cut = traced.replace(jaxpr=traced.jaxpr.replace(outvars=[scatter.invars[1]]))
    (indices,) = jaxpr_as_fun(cut)(*args)
    slots, index = np.asarray(indices).reshape(-1, 2).T
    live = index[(slots == 1) & (index < capacity)]
    assert sorted(live) == sorted((6 + j) % capacity for j in range(max(0, count - 4), count))


def test_rings_with_count_zero_are_bit_identical():
    ring = distinct((3, HEADS, 4, DIM), "bfloat16")
    for length in (3, 9):
        rows = np.full((3, length, HEADS, DIM), np.nan, ring.dtype)
        actual = jit_ring(ring, rows, ints(2, 0, 1), ints(0, 4, 7), ints(0, 0, 0))
        assert_same_bits(actual, ring)


def test_ring_rows_past_the_count_may_hold_anything():
    ring = distinct((3, HEADS, 4, DIM), "bfloat16")
    for length in (3, 9):
        rows = -distinct((2, length, HEADS, DIM), "bfloat16", offset=1)
        slot, start, count = ints(2, 0), ints(3, 6), ints(2, length - 1)
        poisoned = rows.copy()
        poisoned[0, 2:] = poisoned[1, length - 1 :] = np.nan
        actual = jit_ring(ring, poisoned, slot, start, count)
        assert_same_bits(actual, oracle.write_ring(ring, rows, slot, start, count))


@pytest.mark.parametrize("idle", [3, 4, 1000, 2**31 - 1, -1, -3, -4, -(2**31)])
def test_j16_an_idle_row_writes_no_ring_and_never_wraps_to_the_last(idle):
    ring = distinct((3, HEADS, 4, DIM), "float32")
    for length in (3, 9):
        rows = np.full((2, length, HEADS, DIM), -1.0, np.float32)
        both_idle = jit_ring(ring, rows, ints(idle, idle), ints(0, 5), ints(length, length))
        assert_same_bits(both_idle, ring)
        actual = jit_ring(ring, rows, ints(idle, 1), ints(0, 0), ints(length, 1))
        assert_same_bits(
            actual, oracle.write_ring(ring, rows, ints(idle, 1), ints(0, 0), ints(length, 1))
        )


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 10, 11])
def test_ring_writes_do_not_depend_on_how_rows_are_split(cut):
    ring = distinct((1, HEADS, 5, DIM), "float32")
    rows = -distinct((1, 11, HEADS, DIM), "float32", offset=1)
    once = jit_ring(ring, rows, ints(0), ints(7), ints(11))
    first = jit_ring(ring, rows, ints(0), ints(7), ints(cut))
    rest = np.roll(rows, -cut, axis=1)
    assert_same_bits(jit_ring(first, rest, ints(0), ints(7 + cut), ints(11 - cut)), once)


# --- both --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((1, 2, HEADS + 1, DIM), np.float32),
        np.zeros((1, 2, HEADS, DIM + 1), np.float32),
        np.zeros((1, 2, HEADS, DIM), np.float16),
    ],
    ids=["heads", "dim", "dtype"],
)
def test_rows_that_do_not_fit_the_storage_are_refused(rows):
    with pytest.raises(ValueError, match="rows: expected"):
        write_pages(np.zeros((HEADS, 2, 4, DIM), np.float32), rows, TABLE[:1], ints(0), ints(1))
    with pytest.raises(ValueError, match="rows: expected"):
        write_ring(np.zeros((2, HEADS, 4, DIM), np.float32), rows, ints(0), ints(0), ints(1))
