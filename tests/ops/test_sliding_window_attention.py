"""Attention over a ring and block columns: the window edge, dead bytes, heads and dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.sliding_window_attention import ring_positions, sliding_window_attention
from tests.oracles import attention as oracle
from tests.tolerances import BF16_MATMUL, FP32, assert_close, assert_same_bits

QUERY_HEADS, KV_HEADS, DIM = 6, 2, 16
SCALE = DIM**-0.5
# Query, keys, context values, block values.
DRAFT, EXACT = ("bfloat16", "bfloat16", "float16", "bfloat16"), ("float32",) * 4
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["symmetric", "causal"])


@dataclasses.dataclass
class Case:
    """Operands of one call."""

    query: np.ndarray
    block_key: np.ndarray
    block_value: np.ndarray
    ring_key: np.ndarray
    ring_value: np.ndarray
    slot: np.ndarray
    frontier: np.ndarray
    live: np.ndarray

    def operands(self):
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def frontiers(window):
    return sorted({0, 1, max(window - 1, 0), window, window + 1, 3 * window})


def make_case(dtypes, *, window, width, poison="zero", live=None, seed=0):
    """One row per frontier; `poison` fills dead ring indices, unused rings and dead columns."""
    rng = np.random.default_rng(seed)
    frontier = frontiers(window)
    batch = len(frontier)
    live = np.resize([width, max(width - 1, 0), 1, 0], batch) if live is None else np.asarray(live)

    def normal(shape, dtype):
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    def dead(dtype):
        largest = float(jnp.finfo(dtype).max)
        return {"zero": 0.0, "nan": np.nan, "largest": largest, "inf": -np.inf}[poison]

    query = normal((batch, width, QUERY_HEADS, DIM), dtypes[0])
    block_key = normal((batch, width, KV_HEADS, DIM), dtypes[1])
    block_value = normal((batch, width, KV_HEADS, DIM), dtypes[3])
    slots = batch + 2
    slot = rng.permutation(slots)[:batch].astype(np.int32)
    ring_key = np.full((slots, KV_HEADS, window, DIM), dead(dtypes[1]), jnp.dtype(dtypes[1]))
    ring_value = np.full((slots, KV_HEADS, window, DIM), dead(dtypes[2]), jnp.dtype(dtypes[2]))
    for b in range(batch):
        query[b, live[b] :] = dead(dtypes[0])
        block_key[b, live[b] :] = dead(dtypes[1])
        block_value[b, live[b] :] = dead(dtypes[3])
        for p in range(max(0, frontier[b] - window), frontier[b]):
            ring_key[slot[b], :, p % window] = normal((KV_HEADS, DIM), dtypes[1])
            ring_value[slot[b], :, p % window] = normal((KV_HEADS, DIM), dtypes[2])
    return Case(
        query=query,
        block_key=block_key,
        block_value=block_value,
        ring_key=ring_key,
        ring_value=ring_value,
        slot=slot,
        frontier=np.asarray(frontier, np.int32),
        live=live.astype(np.int32),
    )


@functools.cache
def compiled(window, causal, scale, form="xla"):
    options = dict(window=window, causal=causal, scale=scale, implementation=form)
    return jax.jit(functools.partial(sliding_window_attention, **options))


def run(case, *, window, causal, scale=SCALE, form="xla"):
    return np.asarray(compiled(window, causal, scale, form)(*case.operands()))


def seen_positions(*, window, capacity, frontier, width, live, causal):
    """For every row and column, the set of positions that have weight.

    Equal scores and one-hot values make the output the uniform law over what was seen. Block
    column j has its own entry, so that it is not confused with the ring index that it will reach.
    """
    batch = len(frontier)
    dim = max(frontier) + width
    eye = np.eye(dim, dtype=np.float32)
    ring_value = np.full((batch, 1, capacity, dim), np.nan, np.float32)
    block_value = np.full((batch, width, 1, dim), np.nan, np.float32)
    for b in range(batch):
        for p in range(max(0, frontier[b] - capacity), frontier[b]):
            ring_value[b, 0, p % capacity] = eye[p]
        for j in range(live[b]):
            block_value[b, j, 0] = eye[frontier[b] + j]
    case = Case(
        query=np.ones((batch, width, 1, dim), np.float32),
        block_key=np.zeros((batch, width, 1, dim), np.float32),
        block_value=block_value,
        ring_key=np.zeros_like(ring_value),
        ring_value=ring_value,
        slot=np.arange(batch, dtype=np.int32),
        frontier=np.asarray(frontier, np.int32),
        live=np.asarray(live, np.int32),
    )
    actual = run(case, window=window, causal=causal)[:, :, 0]
    for column in actual.reshape(-1, dim):
        weights = column[column > 0]
        np.testing.assert_allclose(weights, np.full(weights.shape, 1 / max(weights.size, 1)), 1e-6)
    return [[set(np.flatnonzero(column).tolist()) for column in row] for row in actual]


@CAUSAL
@pytest.mark.parametrize("window", [1, 2, 5, 8])
@pytest.mark.parametrize("width", [1, 2, 8, 16])
def test_a3_window_edge(window, width, causal):
    """Allowed exactly where |p_k - p_q| < S, and p_k <= p_q when causal."""
    cases = [(f, n) for f in frontiers(window) for n in sorted({width, width // 2, 1, 0})]
    frontier, live = zip(*cases, strict=True)
    seen = seen_positions(
        window=window, capacity=window, frontier=frontier, width=width, live=live, causal=causal
    )
    for b, (first, count) in enumerate(cases):
        for i in range(width):
            query = first + i
            allowed = {
                p
                for p in range(first + count)
                if i < count and abs(p - query) < window and (p <= query or not causal)
            }
            assert seen[b][i] == allowed, (first, count, i)


def test_distance_equal_to_window_is_hidden():
    symmetric, causal = (
        seen_positions(
            window=5, capacity=5, frontier=(7,), width=7, live=(7,), causal=flag
        )[0]
        for flag in (False, True)
    )
    # Context 2..6 lies in the ring, block columns are 7..13.
    assert symmetric == [
        {3, 4, 5, 6, 7, 8, 9, 10, 11},
        {4, 5, 6, 7, 8, 9, 10, 11, 12},
        {5, 6, 7, 8, 9, 10, 11, 12, 13},
        {6, 7, 8, 9, 10, 11, 12, 13},
        {7, 8, 9, 10, 11, 12, 13},
        {8, 9, 10, 11, 12, 13},
        {9, 10, 11, 12, 13},
    ]
    assert causal == [
        {3, 4, 5, 6, 7},
        {4, 5, 6, 7, 8},
        {5, 6, 7, 8, 9},
        {6, 7, 8, 9, 10},
        {7, 8, 9, 10, 11},
        {8, 9, 10, 11, 12},
        {9, 10, 11, 12, 13},
    ]


@CAUSAL
@pytest.mark.parametrize("window, width", [(8, 4), (8, 8), (5, 2)])
def test_column_sees_min_of_frontier_and_window_left_of_it(window, width, causal):
    frontier = frontiers(window)
    seen = seen_positions(
        window=window,
        capacity=window,
        frontier=frontier,
        width=width,
        live=[width] * len(frontier),
        causal=causal,
    )
    for first, row in zip(frontier, seen, strict=True):
        for i, column in enumerate(row):
            assert sum(p < first for p in column) == min(first, window - 1 - i)
            assert sum(p >= first for p in column) == (i + 1 if causal else width)


@CAUSAL
@pytest.mark.parametrize("capacity", [6, 7, 11])
def test_a_ring_may_hold_more_than_the_window(capacity, causal):
    frontier = (0, 1, 4, 5, 6, 7, 19)
    seen = seen_positions(
        window=5,
        capacity=capacity,
        frontier=frontier,
        width=3,
        live=[3] * len(frontier),
        causal=causal,
    )
    for first, row in zip(frontier, seen, strict=True):
        for i, column in enumerate(row):
            expected = oracle.window_positions(
                first, 3, i, window=5, causal=causal, capacity=capacity
            )
            assert column == expected
            assert expected >= {p for p in range(first) if first + i - p < 5}


def test_ring_positions_name_the_last_position_of_every_index():
    for capacity in (1, 2, 5, 8):
        for frontier in range(3 * capacity + 2):
            actual = np.asarray(ring_positions(np.asarray([frontier], np.int32), capacity))[0]
            for index, position in enumerate(actual):
                held = [p for p in range(frontier) if p % capacity == index]
                assert position == held[-1] if held else position < 0, (capacity, frontier, index)


@CAUSAL
@pytest.mark.parametrize("window, width", [(8, 5), (5, 8), (1, 3), (16, 1)])
@pytest.mark.parametrize(
    "dtypes, tolerance", [(EXACT, FP32), (DRAFT, BF16_MATMUL)], ids=["exact", "draft"]
)
def test_matches_the_formula(window, width, causal, dtypes, tolerance):
    case = make_case(dtypes, window=window, width=width)
    actual = run(case, window=window, causal=causal)
    assert actual.dtype == case.query.dtype
    expected = oracle.sliding_window_attention(
        *case.operands(), window=window, causal=causal, scale=SCALE
    )
    assert_close(actual, expected, tolerance)


@CAUSAL
@pytest.mark.parametrize("dtypes", [EXACT, DRAFT], ids=["exact", "draft"])
@pytest.mark.parametrize("poison", ["nan", "largest", "inf"])
def test_dead_bytes_never_leak(causal, dtypes, poison):
    clean, dirty = (
        run(make_case(dtypes, window=8, width=5, poison=name), window=8, causal=causal)
        for name in ("zero", poison)
    )
    assert_same_bits(dirty, clean)


@CAUSAL
def test_ring_rows_that_no_column_reaches_never_leak(causal):
    """Position F - S is in the ring but at distance S of column 0: live bytes, seen by nobody."""
    case = make_case(DRAFT, window=8, width=5)
    clean = run(case, window=8, causal=causal)
    for b, first in enumerate(case.frontier):
        if first >= 8:
            case.ring_key[case.slot[b], :, first % 8] = np.nan
            case.ring_value[case.slot[b], :, first % 8] = np.nan
    assert_same_bits(run(case, window=8, causal=causal), clean)


@CAUSAL
def test_columns_from_live_on_are_exactly_zero(causal):
    case = make_case(DRAFT, window=8, width=5, poison="nan")
    actual = run(case, window=8, causal=causal)
    for b, live in enumerate(case.live):
        assert_same_bits(actual[b, live:], np.zeros_like(actual[b, live:]))
        assert live == 0 or np.abs(actual[b, :live].astype(np.float32)).min() > 0


@CAUSAL
def test_no_live_column_gives_all_zero(causal):
    case = make_case(DRAFT, window=8, width=5, poison="nan", live=[0] * len(frontiers(8)))
    actual = run(case, window=8, causal=causal)
    assert_same_bits(actual, np.zeros_like(actual))


@pytest.mark.parametrize("idle", [8, 9, 2**31 - 1, -1, -8, -(2**31)])
def test_j16_an_idle_row_with_a_slot_out_of_range_gives_zero(idle):
    case = make_case(DRAFT, window=8, width=5, poison="nan")
    others = run(case, window=8, causal=False)
    slot, live = case.slot.copy(), case.live.copy()
    slot[1], live[1] = idle, 0
    actual = run(dataclasses.replace(case, slot=slot, live=live), window=8, causal=False)
    assert_same_bits(actual[1], np.zeros_like(actual[1]))
    assert_same_bits(np.delete(actual, 1, axis=0), np.delete(others, 1, axis=0))


def test_rings_may_lie_in_any_slot():
    case = make_case(DRAFT, window=8, width=5)
    order = np.random.default_rng(1).permutation(len(case.ring_key))
    moved = dataclasses.replace(
        case,
        ring_key=case.ring_key[order],
        ring_value=case.ring_value[order],
        slot=np.argsort(order)[case.slot].astype(np.int32),
    )
    assert not np.array_equal(moved.slot, case.slot)
    assert_same_bits(
        run(moved, window=8, causal=False), run(case, window=8, causal=False)
    )


def test_query_head_reads_its_group_of_kv_heads():
    case = make_case(EXACT, window=8, width=5)
    for head in range(KV_HEADS):
        case.ring_value[:, head] = head + 1
        case.block_value[:, :, head] = head + 1
    actual = run(case, window=8, causal=False)
    for b, h in np.ndindex(len(case.live), QUERY_HEADS):
        assert_close(
            actual[b, : case.live[b], h],
            np.full((case.live[b], DIM), 1.0 + h // (QUERY_HEADS // KV_HEADS)),
            FP32,
        )


def test_a_live_column_of_a_causal_layer_does_not_depend_on_the_tail():
    case = make_case(DRAFT, window=8, width=5, live=[5] * len(frontiers(8)))
    whole = run(case, window=8, causal=True)
    short = dataclasses.replace(case, live=np.full_like(case.live, 3))
    assert_same_bits(run(short, window=8, causal=True)[:, :3], whole[:, :3])


KERNEL = pytest.mark.parametrize(
    "form", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)


@KERNEL
@CAUSAL
@pytest.mark.parametrize("window, width", [(16, 5), (32, 1), (48, 17), (128, 32)])
@pytest.mark.parametrize(
    "dtypes, tolerance", [(EXACT, FP32), (DRAFT, BF16_MATMUL)], ids=["exact", "draft"]
)
def test_the_kernel_matches_the_formula(window, width, causal, dtypes, tolerance, form):
    """At every edge of the ring, and with NaN in every dead byte."""
    case = make_case(dtypes, window=window, width=width, poison="nan")
    actual = run(case, window=window, causal=causal, form=form)
    assert actual.dtype == case.query.dtype
    expected = oracle.sliding_window_attention(
        *case.operands(), window=window, causal=causal, scale=SCALE
    )
    assert_close(actual, expected, tolerance)
    for b, live in enumerate(case.live):
        assert_same_bits(actual[b, live:], np.zeros_like(actual[b, live:]))


@KERNEL
@CAUSAL
@pytest.mark.parametrize("poison", ["nan", "largest", "inf"])
def test_dead_bytes_never_leak_in_the_kernel(causal, poison, form):
    clean, dirty = (
        make_case(DRAFT, window=16, width=5, poison=name) for name in ("zero", poison)
    )
    for b, first in enumerate(dirty.frontier):
        if first >= 16:  # in the ring, but out of every column's window
            dirty.ring_key[dirty.slot[b], :, first % 16] = np.nan
            dirty.ring_value[dirty.slot[b], :, first % 16] = np.nan
    dirty.slot[1], dirty.live[1], clean.live[1] = 2**31 - 1, 0, 0
    clean, dirty = (run(x, window=16, causal=causal, form=form) for x in (clean, dirty))
    assert_same_bits(dirty, clean)


@KERNEL
@pytest.mark.parametrize("window", [5, 16, 17])
def test_the_kernel_serves_rings_longer_than_the_window(window, form):
    case = make_case(EXACT, window=32, width=3)
    actual = run(case, window=window, causal=False, form=form)
    expected = oracle.sliding_window_attention(
        *case.operands(), window=window, causal=False, scale=SCALE
    )
    assert_close(actual, expected, FP32)


def test_what_the_kernel_lacks_is_refused():
    case = make_case(EXACT, window=8, width=3)
    with pytest.raises(NotImplementedError, match="sliding_window_attention: .* ring 8"):
        run(case, window=8, causal=True, form="interpret")
    with pytest.raises(ValueError, match="implementation: expected"):
        run(case, window=8, causal=True, form="cudnn")


def test_context_values_keep_fp16_and_block_values_keep_bf16():
    """1 + 2^-10 has no bf16 form and 70144 no fp16 form: neither may pass through the other."""
    context, block = 1.0 + 2.0**-10, 70144.0
    case = Case(
        query=np.full((1, 1, 1, 2), 1.0, np.float32),
        block_key=np.full((1, 1, 1, 2), -200.0, jnp.bfloat16),
        block_value=np.full((1, 1, 1, 2), block, jnp.bfloat16),
        ring_key=np.zeros((1, 1, 4, 2), jnp.bfloat16),
        ring_value=np.full((1, 1, 4, 2), context, np.float16),
        slot=np.zeros(1, np.int32),
        frontier=np.ones(1, np.int32),
        live=np.ones(1, np.int32),
    )
    toward_context = run(case, window=4, causal=False, scale=1.0)
    np.testing.assert_array_equal(toward_context, np.float32(context))
    toward_block = run(case, window=4, causal=False, scale=-1.0)
    np.testing.assert_array_equal(toward_block, np.float32(block))


def test_wrong_calls_are_refused():
    case = make_case(EXACT, window=8, width=5)
    for wrong in (
        dataclasses.replace(case, query=case.query[:, :, :5]),
        dataclasses.replace(case, block_key=case.block_key[:, :3]),
    ):
        with pytest.raises(ValueError, match="block_key: expected"):
            run(wrong, window=8, causal=False)
