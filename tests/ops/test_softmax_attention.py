"""Attention over paged context and block columns sees exactly the visible keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import softmax_attention as module
from dflash_jax.ops.softmax_attention import ancestor_mask, softmax_attention
from tests.oracles import attention as oracle
from tests.tolerances import BF16_MATMUL, FP32, assert_close, assert_same_bits

PAGE, MAX_PAGES = 16, 4
FRONTIERS = (0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE)
WIDTH, QUERY_HEADS, KV_HEADS, DIM = 5, 6, 2, 16
SCALE = DIM**-0.5
FORMS = pytest.mark.parametrize(
    "form", ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
# Live columns of each row where a test needs most of them.
LIVE = (5, 4, 3, 5, 4, 5)
# Query, keys, context values, block values.
TARGET, DRAFT, EXACT = (
    ("bfloat16",) * 4,
    ("bfloat16", "bfloat16", "float16", "bfloat16"),
    ("float32",) * 4,
)
# Column 0 is the root; column 4 hangs on column 1, and so on.
TREES = np.array(
    [[0, 0, 1, 2, 1], [0, 0, 0, 0, 0], [0, 0, 1, 2, 3], [0, 0, 1, 0, 3], [0, 0, 0, 2, 2], [0] * 5],
    np.int32,
)


@dataclasses.dataclass
class Case:
    """Operands of one call; dead places hold what `poison` put there."""

    query: np.ndarray
    block_key: np.ndarray
    block_value: np.ndarray
    key_pages: np.ndarray
    value_pages: np.ndarray
    table: np.ndarray
    frontier: np.ndarray
    live: np.ndarray

    def operands(self):
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def make_case(dtypes, *, frontier=FRONTIERS, live=None, poison="zero", seed=0, spread=1.0):
    """Random operands; `poison` fills free pages, page tails and dead columns."""
    rng = np.random.default_rng(seed)
    batch = len(frontier)
    live = np.resize([WIDTH, 3, 1, 0, 4], batch) if live is None else np.asarray(live)

    def normal(shape, dtype):
        return (spread * rng.standard_normal(shape)).astype(jnp.dtype(dtype))

    def dead(dtype):
        largest = float(jnp.finfo(dtype).max)
        return {"zero": 0.0, "nan": np.nan, "largest": largest, "inf": -np.inf}[poison]

    query = normal((batch, WIDTH, QUERY_HEADS, DIM), dtypes[0])
    block_key = normal((batch, WIDTH, KV_HEADS, DIM), dtypes[1])
    block_value = normal((batch, WIDTH, KV_HEADS, DIM), dtypes[3])
    num_pages = batch * MAX_PAGES
    key_pages = np.full((KV_HEADS, num_pages, PAGE, DIM), dead(dtypes[1]), jnp.dtype(dtypes[1]))
    value_pages = np.full((KV_HEADS, num_pages, PAGE, DIM), dead(dtypes[2]), jnp.dtype(dtypes[2]))
    table = np.full((batch, MAX_PAGES), num_pages, np.int32)
    free = list(rng.permutation(num_pages))
    for b, length in enumerate(frontier):
        query[b, live[b] :] = dead(dtypes[0])
        block_key[b, live[b] :] = dead(dtypes[1])
        block_value[b, live[b] :] = dead(dtypes[3])
        for column in range(-(-length // PAGE)):
            table[b, column] = free.pop()
            rows = min(PAGE, length - column * PAGE)
            shape = (KV_HEADS, rows, DIM)
            key_pages[:, table[b, column], :rows] = normal(shape, dtypes[1])
            value_pages[:, table[b, column], :rows] = normal(shape, dtypes[2])
    return Case(
        query=query,
        block_key=block_key,
        block_value=block_value,
        key_pages=key_pages,
        value_pages=value_pages,
        table=table,
        frontier=np.asarray(frontier, np.int32),
        live=live.astype(np.int32),
    )


@functools.cache
def compiled(block_mask, scale, form):
    attend = functools.partial(softmax_attention, scale=scale, implementation=form)
    if block_mask is None:
        return jax.jit(lambda *x: attend(*x[:-1], block_mask=x[-1]))
    return jax.jit(lambda *x: attend(*x, block_mask=block_mask))


def run(case, block_mask, form="xla", scale=SCALE):
    if isinstance(block_mask, str):
        return np.asarray(compiled(block_mask, scale, form)(*case.operands()))
    return np.asarray(compiled(None, scale, form)(*case.operands(), block_mask))


MASKS = {"causal": "causal", "full": "full", "tree": oracle.ancestor_mask(TREES)}


@FORMS
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "dtypes, tolerance",
    [(EXACT, FP32), (TARGET, BF16_MATMUL), (DRAFT, BF16_MATMUL)],
    ids=["exact", "target", "draft"],
)
def test_matches_the_formula(mask, dtypes, tolerance, form):
    case = make_case(dtypes)
    actual = run(case, MASKS[mask], form)
    assert actual.dtype == case.query.dtype
    expected = oracle.softmax_attention(*case.operands(), block_mask=MASKS[mask], scale=SCALE)
    assert_close(actual, expected, tolerance)


@FORMS
@pytest.mark.parametrize("key", [100.0, -100.0])
def test_large_equal_scores_give_the_mean_value(key, form):
    case = make_case(EXACT)
    case.query[:] = 100.0
    case.block_key[:] = case.key_pages[:] = key
    zero = dataclasses.replace(case, query=np.zeros_like(case.query))
    expected = oracle.softmax_attention(*zero.operands(), block_mask="causal", scale=SCALE)
    assert_close(run(case, "causal", form), expected, FP32)


@FORMS
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtypes", [EXACT, TARGET, DRAFT], ids=["exact", "target", "draft"])
@pytest.mark.parametrize("poison", ["nan", "largest", "inf"])
def test_dead_bytes_never_leak(mask, dtypes, poison, form):
    clean = run(make_case(dtypes), MASKS[mask], form)
    assert_same_bits(run(make_case(dtypes, poison=poison), MASKS[mask], form), clean)


@FORMS
@pytest.mark.parametrize("mask", MASKS)
def test_columns_from_live_on_are_exactly_zero(mask, form):
    case = make_case(TARGET, poison="nan")
    actual = run(case, MASKS[mask], form)
    for b, live in enumerate(case.live):
        assert_same_bits(actual[b, live:], np.zeros_like(actual[b, live:]))
        assert live == 0 or np.abs(actual[b, :live].astype(np.float32)).min() > 0


@FORMS
@pytest.mark.parametrize("mask", MASKS)
def test_no_live_column_gives_all_zero(mask, form):
    case = make_case(DRAFT, live=[0] * len(FRONTIERS), poison="nan")
    actual = run(case, MASKS[mask], form)
    assert_same_bits(actual, np.zeros_like(actual))


@FORMS
def test_frontier_zero_sees_the_block_alone(form):
    case = make_case(EXACT, frontier=(0, 0), live=[WIDTH, 2], poison="nan")
    actual = run(case, "causal", form)
    # Column 0 sees nothing but itself: the output is its own value.
    heads = np.arange(QUERY_HEADS) // (QUERY_HEADS // KV_HEADS)
    assert_close(actual[:, 0], case.block_value[:, 0][:, heads], FP32)
    assert (case.table == case.key_pages.shape[1]).all()


@FORMS
def test_page_ids_may_be_permuted(form):
    case = make_case(TARGET)
    num_pages = case.key_pages.shape[1]
    order = np.random.default_rng(1).permutation(num_pages)
    moved = dataclasses.replace(
        case,
        key_pages=case.key_pages[:, order],
        value_pages=case.value_pages[:, order],
        table=np.append(np.argsort(order), num_pages)[case.table].astype(np.int32),
    )
    assert not np.array_equal(moved.table, case.table)
    assert_same_bits(run(moved, "causal", form), run(case, "causal", form))


@FORMS
@pytest.mark.parametrize("dead", ["last", "other"])
def test_a_page_past_the_frontier_is_not_read(dead, form):
    """A mapped page that is reserved but empty, or that another row owns, has no effect."""
    case = make_case(TARGET, poison="nan")
    table = case.table.copy()
    unmapped = table == case.key_pages.shape[1]
    table[unmapped] = case.table[0, 0] if dead == "other" else case.key_pages.shape[1] - 1
    actual = run(dataclasses.replace(case, table=table), "full", form)
    assert_same_bits(actual, run(case, "full", form))


@FORMS
def test_query_head_reads_its_group_of_kv_heads(form):
    case = make_case(EXACT)
    for b, length in enumerate(case.frontier):
        for p in range(length):
            place = case.table[b, p // PAGE], p % PAGE
            for head in range(KV_HEADS):
                case.value_pages[head, *place] = head + 1
    for head in range(KV_HEADS):
        case.block_value[:, :, head] = head + 1
    actual = run(case, "full", form)
    for b, h in np.ndindex(len(FRONTIERS), QUERY_HEADS):
        assert_close(
            actual[b, : case.live[b], h],
            np.full((case.live[b], DIM), 1.0 + h // (QUERY_HEADS // KV_HEADS)),
            FP32,
        )


@FORMS
def test_block_mask_names_exactly_the_visible_columns(form):
    """Equal scores and one-hot values turn the output into the set of keys that was seen."""
    seen = run_one_hot(block_mask=oracle.ancestor_mask(TREES), form=form)
    for b, (frontier, live) in enumerate(zip(FRONTIERS, LIVE, strict=True)):
        for i in range(live):
            node, path = i, {i}
            while node:
                node = TREES[b, node]
                path.add(int(node))
            assert seen[b][i] == set(range(frontier)) | {frontier + j for j in path}, (b, i)


@FORMS
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_named_block_masks(mask, form):
    seen = run_one_hot(block_mask=mask, form=form)
    for b, (frontier, live) in enumerate(zip(FRONTIERS, LIVE, strict=True)):
        for i in range(live):
            last = frontier + i if mask == "causal" else frontier + live - 1
            assert seen[b][i] == set(range(last + 1)), (b, i)


def run_one_hot(block_mask, form):
    """For every row and live column, the set of positions that have weight."""
    dim = 64
    batch = len(FRONTIERS)
    num_pages = batch * MAX_PAGES
    eye = np.eye(dim, dtype=np.float32)
    table = np.random.default_rng(2).permutation(num_pages).reshape(batch, MAX_PAGES)
    value_pages = np.zeros((1, num_pages, PAGE, dim), np.float32)
    block_value = np.zeros((batch, WIDTH, 1, dim), np.float32)
    for b, frontier in enumerate(FRONTIERS):
        for p in range(MAX_PAGES * PAGE):
            value_pages[0, table[b, p // PAGE], p % PAGE] = eye[p if p < frontier else dim - 1]
        for j in range(WIDTH):
            block_value[b, j, 0] = eye[frontier + j]
    case = Case(
        query=np.ones((batch, WIDTH, 1, dim), np.float32),
        block_key=np.zeros((batch, WIDTH, 1, dim), np.float32),
        block_value=block_value,
        key_pages=np.zeros_like(value_pages),
        value_pages=value_pages,
        table=table.astype(np.int32),
        frontier=np.asarray(FRONTIERS, np.int32),
        live=np.asarray(LIVE, np.int32),
    )
    actual = run(case, block_mask, form)[:, :, 0]
    return [[set(np.flatnonzero(column)) for column in row] for row in actual]


@FORMS
@pytest.mark.parametrize("tail", [0, 1, 3])
def test_a_live_column_does_not_depend_on_the_tail(tail, form):
    case = make_case(TARGET, live=[WIDTH] * len(FRONTIERS))
    whole = run(case, "causal", form)
    live = np.full(len(FRONTIERS), WIDTH - tail, np.int32)
    short = run(dataclasses.replace(case, live=live), "causal", form)
    assert_same_bits(short[:, : WIDTH - tail], whole[:, : WIDTH - tail])


@FORMS
def test_a_chain_shaped_tree_is_causal(form):
    chain = np.tile(np.maximum(np.arange(WIDTH) - 1, 0), (len(FRONTIERS), 1)).astype(np.int32)
    mask = np.asarray(ancestor_mask(chain))
    np.testing.assert_array_equal(mask, np.broadcast_to(np.tri(WIDTH, dtype=bool), mask.shape))
    case = make_case(TARGET)
    assert_same_bits(run(case, mask, form), run(case, "causal", form))


def test_ancestor_mask_names_self_and_ancestors():
    np.testing.assert_array_equal(np.asarray(ancestor_mask(TREES)), oracle.ancestor_mask(TREES))
    rng = np.random.default_rng(3)
    parent = np.stack([[rng.integers(0, max(c, 1)) for c in range(12)] for _ in range(20)])
    parent = parent.astype(np.int32)
    np.testing.assert_array_equal(np.asarray(ancestor_mask(parent)), oracle.ancestor_mask(parent))


def test_context_values_keep_fp16_and_block_values_keep_bf16():
    """1 + 2^-10 has no bf16 form and 70144 no fp16 form: neither may pass through the other."""
    context, block = 1.0 + 2.0**-10, 70144.0
    case = Case(
        query=np.full((1, 1, 1, 2), 1.0, np.float32),
        block_key=np.full((1, 1, 1, 2), -200.0, jnp.bfloat16),
        block_value=np.full((1, 1, 1, 2), block, jnp.bfloat16),
        key_pages=np.zeros((1, 1, 1, 2), jnp.bfloat16),
        value_pages=np.full((1, 1, 1, 2), context, np.float16),
        table=np.zeros((1, 1), np.int32),
        frontier=np.ones(1, np.int32),
        live=np.ones(1, np.int32),
    )
    np.testing.assert_array_equal(run(case, "causal", scale=1.0), np.float32(context))
    np.testing.assert_array_equal(run(case, "causal", scale=-1.0), np.float32(block))


@pytest.mark.parametrize("pages_at_once", [1, 2, 3])
def test_long_contexts_are_read_in_several_stretches(monkeypatch, pages_at_once):
    monkeypatch.setattr(module, "CONTEXT_BLOCK", pages_at_once * PAGE)
    case = make_case(EXACT, poison="nan")
    expected = oracle.softmax_attention(*case.operands(), block_mask="full", scale=SCALE)
    # Past the cache: an earlier program was traced with the real constant.
    actual = compiled.__wrapped__("full", SCALE, "xla")(*case.operands())
    assert_close(actual, expected, FP32)


# Batch, width, query and KV heads, head_dim, page, frontiers.
GEOMETRIES = {
    "several_tiles_of_rows": (2, 32, 8, 2, 32, 32, (70, 3)),
    "steps_inside_a_page": (1, 3, 2, 1, 256, 64, (161,)),
    "one_column_and_a_wide_group": (3, 1, 24, 2, 16, 16, (0, 31, 33)),
    "fewer_keys_than_parts": (1, 7, 1, 1, 64, 16, (5,)),
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("form", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)])
def test_the_kernel_splits_rows_keys_and_pages_as_the_formula(name, form):
    batch, width, heads, kv_heads, dim, page, frontier = GEOMETRIES[name]
    rng = np.random.default_rng(7)
    columns = -(-max(frontier) // page) + 1

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    pools = [normal(kv_heads, batch * columns, page, dim) for _ in range(2)]
    case = Case(
        normal(batch, width, heads, dim), normal(batch, width, kv_heads, dim),
        normal(batch, width, kv_heads, dim), *pools,
        rng.permutation(batch * columns).reshape(batch, columns).astype(np.int32),
        np.array(frontier, np.int32), np.full(batch, width, np.int32),
    )
    parent = np.array([[rng.integers(0, max(c, 1)) for c in range(width)]] * batch, np.int32)
    mask = oracle.ancestor_mask(parent)
    expected = oracle.softmax_attention(*case.operands(), block_mask=mask, scale=dim**-0.5)
    assert_close(run(case, mask, form, dim**-0.5), expected, FP32)


def test_the_kernel_refuses_what_it_does_not_take():
    narrow = make_case(EXACT)
    narrow = dataclasses.replace(
        narrow, key_pages=narrow.key_pages[:, :, :8], value_pages=narrow.value_pages[:, :, :8]
    )
    with pytest.raises(NotImplementedError, match="softmax_attention: .* page 8"):
        run(narrow, "causal", "interpret")
    with pytest.raises(ValueError, match="implementation: expected"):
        run(make_case(EXACT), "causal", "triton")


def test_wrong_calls_are_refused():
    case = make_case(EXACT)
    with pytest.raises(ValueError, match="block_mask: expected"):
        run(case, "tree")
    with pytest.raises(ValueError, match="block_key: expected"):
        run(dataclasses.replace(case, query=case.query[:, :, :5]), "full")
    with pytest.raises(ValueError, match="block_key: expected"):
        run(dataclasses.replace(case, block_key=case.block_key[:, :3]), "full")


@FORMS
@pytest.mark.parametrize("dtypes", [TARGET, EXACT])
def test_the_gate_opens_the_rounded_output_and_dead_columns_stay_zero(form, dtypes):
    case = make_case(dtypes, poison="nan")
    rng = np.random.default_rng(9)
    gate = rng.standard_normal(case.query.shape).astype(jnp.dtype(dtypes[0]))
    dead = np.arange(WIDTH)[None, :] >= case.live[:, None]
    gate[dead] = np.nan
    options = dict(block_mask="causal", scale=SCALE, implementation=form)
    closed = np.asarray(softmax_attention(*case.operands(), **options), np.float64)
    opened = softmax_attention(*case.operands(), gate=gate, **options)
    expected = np.where(
        dead[..., None, None], 0.0, closed / (1.0 + np.exp(-gate.astype(np.float64)))
    )
    assert opened.dtype == jnp.dtype(dtypes[0])
    assert not np.any(np.asarray(opened, np.float64)[dead])
    assert_close(opened, expected, FP32 if dtypes is EXACT else BF16_MATMUL)
