"""Context rows reach their rings and pages, in either form, and nothing else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.context_kv_materialize import store_context
from dflash_jax.pallas import context_kv_materialize as kernel
from tests.oracles import context_kv_materialize as formula
from tests.oracles import kv_write
from tests.tolerances import BF16_ROUND, FP32, as_float64, assert_close

HEADS, PAGE, NUM_PAGES, SLOTS = 2, 4, 9, 4
EPS, THETA, FAR = 1e-6, 1e4, 2**31 - 1
FORMS = pytest.mark.parametrize(
    "form", ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
# Permuted pages; FAR and 9 are unmapped. Pages 0 and 8 belong to nobody, ring 1 neither.
TABLE = np.array([[5, 2, 7, NUM_PAGES], [1, 6, 3, FAR], [4, FAR, FAR, FAR]], np.int32)
SLOT = np.array([2, 0, 3], np.int32)


def inputs(tokens, paged, *, dim=8, window=6, dtypes=("bfloat16", "float16"), seed=0):
    rng = np.random.default_rng(seed)
    layers = len(paged)
    projected = rng.normal(size=(len(SLOT), tokens, layers * 2 * HEADS * dim)).astype(np.float32)
    key_norm = (1.0 + 0.3 * rng.normal(size=(layers, dim))).astype(np.float32)
    shapes = {True: (HEADS, NUM_PAGES, PAGE, dim), False: (SLOTS, HEADS, window, dim)}
    stores = tuple(
        tuple(rng.normal(size=shapes[kind]).astype(jnp.dtype(dtype)) for dtype in dtypes)
        for kind in paged
    )
    return projected, key_norm, stores


@functools.cache
def compiled(paged, rounded, form):
    return jax.jit(
        functools.partial(
            store_context, paged=paged, eps=EPS, theta=THETA, rounded=rounded, implementation=form
        )
    )


def expected(projected, key_norm, stores, slot, start, count, paged, rounded, dtypes):
    """The stores in float64: the oracle's rows, copied by the oracle of writes."""
    positions = start[:, None] + np.arange(projected.shape[1], dtype=np.int64)
    live = np.arange(projected.shape[1]) < count[:, None]
    rows = formula.context_key_value(
        np.where(live[:, :, None], projected, 0.0), key_norm, positions, kv_heads=HEADS, eps=EPS,
        theta=THETA, rounded=rounded, key_dtype=dtypes[0], value_dtype=dtypes[1],
    )
    found = []
    for layer, kind in enumerate(paged):
        for store, new in zip(stores[layer], (rows[0][layer], rows[1][layer]), strict=True):
            wide = as_float64(store)
            found.append(
                kv_write.write_pages(wide, new, TABLE, start, count) if kind
                else kv_write.write_ring(wide, new, slot, start, count)
            )
    return found


def check(projected, key_norm, stores, start, count, paged, rounded, form, slot=SLOT,
          dtypes=("bfloat16", "float16"), tolerance=BF16_ROUND):
    start, count = (np.asarray(x, np.int32) for x in (start, count))
    wanted = expected(projected, key_norm, stores, slot, start, count, paged, rounded, dtypes)
    poisoned = projected.copy()
    for row, live in enumerate(count):
        poisoned[row, live:] = np.nan
    out = compiled(paged, rounded, form)(poisoned, key_norm, stores, slot, TABLE, start, count)
    before = [array for pair in stores for array in pair]
    for index, (new, old, exact) in enumerate(
        zip([array for pair in out for array in pair], before, wanted, strict=True)
    ):
        new, untouched = np.asarray(new), exact == as_float64(old)
        assert new.dtype == old.dtype
        assert np.array_equal(new[untouched], old[untouched]), "a byte outside the rows changed"
        if index % 2:
            assert np.array_equal(as_float64(new), exact), "a value is not its two roundings"
        else:
            assert_close(new, exact, tolerance)


@FORMS
@pytest.mark.parametrize("rounded", [True, False], ids=["dflash", "dflash2"])
@pytest.mark.parametrize("paged", [(False, False), (False, True, False), (True,)])
def test_rows_reach_their_places_with_the_roundings_of_the_kind(paged, rounded, form):
    for seed, (start, count) in enumerate([
        ((0, 0, 0), (5, 5, 3)), ((3, 4, 0), (2, 0, 4)), ((11, 7, 2), (5, 5, 5)),
        ((1000, 262_140, 9), (1, 4, 5)),
    ]):
        check(*inputs(5, paged, seed=seed), start, count, paged, rounded, form)


@FORMS
@pytest.mark.parametrize("tokens", [1, 5, 6, 7, 13])
def test_the_last_columns_win_at_the_edges_of_a_ring(tokens, form):
    """Windows of 6: one column less, as many, one more, and more than twice as many."""
    paged = (False, True)
    for start in ((0, 5, 6), (7, 11, 3)):
        check(*inputs(tokens, paged), start, (tokens, max(tokens - 1, 0), tokens // 2), paged,
              False, form)


@pytest.mark.parametrize("start", [0, 4, 6, 17])
@pytest.mark.parametrize("live", [1, 5, 6, 7, 20])
def test_no_two_programs_write_one_place_of_a_ring(live, start):
    """Interpret mode runs programs in order, so only their places can tell."""
    ring = np.zeros((SLOTS, HEADS, 6, 4))
    places = [
        kernel._ring_place(ring, 2, start + column, 0, live - column) for column in range(live)
    ]
    stored = [place for place, kept in places if kept]
    assert len(set(stored)) == len(stored) == min(live, 6)


@FORMS
@pytest.mark.parametrize("dim", [2, 4, 32])
def test_heads_of_any_power_of_two(dim, form):
    check(*inputs(3, (False, True), dim=dim), (9, 2, 1), (3, 1, 2), (False, True), False, form)


@FORMS
def test_the_exact_policy_rounds_nothing_to_sixteen_bits(form):
    dtypes, paged = ("float32", "float32"), (False, True)
    check(*inputs(4, paged, dtypes=dtypes), (6, 1, 0), (4, 3, 4), paged, True, form,
          dtypes=dtypes, tolerance=FP32)


@FORMS
@pytest.mark.parametrize("idle", [SLOTS, SLOTS + 7, FAR, -1, -SLOTS])
def test_idle_rows_write_no_ring(idle, form):
    slot = np.array([idle, 1, idle], np.int32)
    check(*inputs(4, (False,)), (0, 3, 9), (4, 2, 4), (False,), False, form, slot=slot)


@FORMS
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_of_the_projection_are_added_first(parts, form):
    """Stored bits are those of the sum, first to last; NaN in dead columns of a part stays out."""
    paged, count = (False, True), np.array([4, 2, 0], np.int32)
    projected, *rest = inputs(4, paged)
    spread = np.random.default_rng(7).normal(size=(parts, *projected.shape)).astype(np.float32)
    for row, live in enumerate(count):
        spread[-1, row, live:] = np.nan
    whole = functools.reduce(np.add, spread)
    call, where = compiled(paged, True, form), (SLOT, TABLE, np.zeros(3, np.int32), count)
    got, wanted = (jax.tree.leaves(call(x, *rest, *where)) for x in (spread, whole))
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def test_donated_stores_are_updated_in_place():
    """Interpret mode copies; the kernel itself is judged where it is compiled."""
    projected, key_norm, stores = inputs(2, (False, True), window=4096)
    call = jax.jit(
        functools.partial(store_context, paged=(False, True), eps=EPS, theta=THETA, rounded=False,
                          implementation="xla"), donate_argnums=2,
    )
    start = np.zeros(3, np.int32)
    memory = call.lower(projected, key_norm, stores, SLOT, TABLE, start, start).compile()
    memory = memory.memory_analysis()
    held = sum(array.nbytes for pair in stores for array in pair)
    assert memory.alias_size_in_bytes == held


def test_what_does_not_fit_is_an_error():
    projected, key_norm, stores = inputs(2, (False,))
    start = np.zeros(3, np.int32)
    rest = (SLOT, TABLE, start, start)
    options = dict(paged=(False,), eps=EPS, theta=THETA, rounded=False)
    for wrong in (
        projected[..., 1:], projected[:2], projected[None, :2], projected[0], projected[None, None],
    ):
        for form in ("xla", "interpret"):
            with pytest.raises(ValueError, match=r"projected: expected \[\.\.\., 3, T, 32\]"):
                store_context(wrong, key_norm, stores, *rest, **options, implementation=form)
    for place in range(1, 4):
        short = [array[:2] if index == place else array for index, array in enumerate(rest)]
        with pytest.raises(ValueError, match="start, count, table: expected 3 rows"):
            store_context(projected, key_norm, stores, *short, **options)
    with pytest.raises(ValueError, match="stores, paged: expected 1, got 2, 1"):
        store_context(projected, key_norm, stores * 2, *rest, **options)
    odd = inputs(2, (False,), dim=6)
    with pytest.raises(NotImplementedError, match="power of two, got 6"):
        store_context(*odd, *rest, **options, implementation="interpret")
