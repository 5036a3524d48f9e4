import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import vocab
from dflash_jax.pallas import vocab as kernel
from tests.oracles import vocab as oracle
from tests.tolerances import FP32, as_float64, assert_close

# One hidden number: a row's score is its only weight.
ONE = jnp.ones((1,), jnp.float32)


@functools.cache
def program(blocks, **options):
    """A selection under jit; the lengths of blocks are read when it is traced."""
    return jax.jit(functools.partial(vocab.linear_topk, **options))


def linear_topk(hidden, head, token_ids=None, **options):
    # Called eagerly, each operation in it would be a program of its own to compile.
    call = program((vocab._BLOCK, kernel.BLOCK), **options)
    return call(hidden, head, token_ids=token_ids)


def head_of(scores, dtype="float32"):
    return jnp.asarray(scores, dtype)[:, None]


def topk_of(scores, k, **kwargs):
    kwargs.setdefault("public_rows", len(scores))
    out = linear_topk(ONE, head_of(scores), k=k, **kwargs)
    return out.scores.tolist(), out.ids.tolist()


@pytest.fixture(params=["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)])
def short_blocks(request, monkeypatch):
    """Cuts rows into short blocks so that a handful takes both levels; names the implementation."""
    monkeypatch.setattr(vocab, "_BLOCK", 8)
    monkeypatch.setattr(kernel, "BLOCK", 16)
    return request.param


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows, public, k", [(37, 30, 4), (37, 37, 1), (5, 4, 4), (40, 40, 16)])
def test_topk_equals_a_sort_of_fp32_scores(short_blocks, dtype, rows, public, k):
    rng = np.random.default_rng(rows)
    hidden = jnp.asarray(rng.normal(size=(2, 3, 12)), dtype)
    head = jnp.asarray(rng.normal(size=(rows, 12)), dtype)
    out = linear_topk(hidden, head, k=k, public_rows=public, implementation=short_blocks)
    assert out.scores.dtype == jnp.float32 and out.ids.dtype == jnp.int32
    scores = oracle.scores(as_float64(hidden).reshape(6, 12), as_float64(head))
    ids = [i if i < public else None for i in range(rows)]
    best = [oracle.topk(row, k, ids) for row in scores]
    assert np.array_equal(out.ids.reshape(6, k), [b[1] for b in best])
    assert_close(out.scores.reshape(6, k), np.array([b[0] for b in best]), FP32)


@pytest.mark.parametrize("rows", [8, 9, 16, 17, 40])
def test_b6_equal_scores_rank_by_lower_id_across_blocks(short_blocks, rows):
    assert topk_of([2.5] * rows, 6, implementation=short_blocks)[1] == [0, 1, 2, 3, 4, 5]
    rising = list(range(rows - 3)) + [1e3] * 3
    best = [rows - 3, rows - 2, rows - 1, rows - 4]
    assert topk_of(rising, 4, implementation=short_blocks)[1] == best


def test_b6_equal_scores_rank_by_lower_id_in_one_block():
    assert topk_of([1.0, 7.0, 7.0, 1.0, 7.0], 4) == ([7.0, 7.0, 7.0, 1.0], [1, 2, 4, 0])


@pytest.mark.parametrize("block", [4, 64])
def test_j5_zero_has_one_value(monkeypatch, block):
    monkeypatch.setattr(vocab, "_BLOCK", block)
    scores = [-1.0, -0.0, 0.0, -0.0, 1e-30, -1e-30, 0.0, -2.0, 0.0]
    assert topk_of(scores, 6)[1] == [4, 1, 2, 3, 6, 8]


def test_b1_order_is_monotone_over_special_values(short_blocks):
    scores = [-np.inf, -1.0, 0.0, 1e-30, 1.0, np.inf, -np.inf, -3.0, -2.0]
    assert topk_of(scores, 9, implementation=short_blocks)[1] == [5, 4, 3, 2, 1, 8, 7, 0, 6]


def test_b5_reserved_rows_are_never_candidates(short_blocks):
    scores = [-5.0] * 20 + [9.0] * 4
    best = ([-5.0] * 3, [0, 1, 2])
    assert topk_of(scores, 3, public_rows=20, implementation=short_blocks) == best
    poisoned = [-5.0] * 20 + [np.nan, np.inf, 9.0, 9.0]
    assert topk_of(poisoned, 3, public_rows=20, implementation=short_blocks)[1] == [0, 1, 2]
    row = vocab.linear_argmax(ONE, head_of(poisoned), public_rows=20, logits_dtype="bfloat16")
    assert row.item() == 0


@pytest.mark.parametrize("block", [4, 64])
def test_a_shortlist_ranks_by_global_id_in_any_row_order(monkeypatch, block):
    monkeypatch.setattr(vocab, "_BLOCK", block)
    ids = jnp.asarray([90, 7, 50, 3, 8, 60, 2, 1, 99], jnp.int32)
    scores = [1.0, 4.0, 4.0, 1.0, 4.0, 1.0, 1.0, 0.0, 4.0]
    expected = oracle.topk(scores, 6, ids.tolist())
    assert topk_of(scores, 6, token_ids=ids, public_rows=2) == tuple(expected)
    assert expected[1] == [7, 8, 50, 99, 2, 3]


def test_a_sorted_shortlist_needs_no_sort(short_blocks):
    ids = jnp.asarray(np.arange(20) * 3, jnp.int32)
    scores = np.random.default_rng(0).integers(0, 4, 20).astype(float)
    expected = tuple(oracle.topk(scores, 9, ids.tolist()))
    options = {"token_ids": ids, "implementation": short_blocks}
    assert topk_of(scores, 9, ids_sorted=True, **options) == expected
    assert topk_of(scores, 9, **options) == expected


@pytest.mark.parametrize("form", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [127, 128, 129, 2047, 2049, 5000])
def test_the_kernel_keeps_what_a_sort_keeps_at_the_edges_of_its_blocks(rows, form):
    """Few distinct scores: ties run across blocks."""
    scores = np.random.default_rng(rows).integers(-3, 3, (3, rows)).astype(np.float32)
    hidden = np.eye(3, dtype=np.float32)
    out = linear_topk(hidden, jnp.asarray(scores.T), k=16, public_rows=rows - 5,
                            implementation=form)
    ids = [i if i < rows - 5 else None for i in range(rows)]
    best = [oracle.topk(row.astype(np.float64), 16, ids) for row in scores]
    assert np.array_equal(out.ids, [b[1] for b in best])
    assert np.array_equal(out.scores, [b[0] for b in best])


def test_selections_the_kernel_lacks_are_refused():
    with pytest.raises(NotImplementedError, match="linear_topk: .* at most 128"):
        topk_of([1.0] * 200, 129, implementation="interpret")
    with pytest.raises(ValueError, match="implementation: expected"):
        topk_of([1.0] * 3, 1, implementation="sort")


def test_topk_scores_are_not_rounded_to_bf16():
    assert topk_of([1.0, 1.0 + 2.0**-12, 1.0 + 2.0**-13], 3)[1] == [1, 2, 0]


@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_argmax_ties_are_those_of_rounded_logits(compile_):
    head = head_of([1.0, 3.0, 3.0 + 2.0**-12, 2.0])

    def row(dtype):
        find = lambda hidden, head: vocab.linear_argmax(  # noqa: E731
            hidden, head, public_rows=4, logits_dtype=dtype
        )
        return compile_(find)(ONE, head).item()

    assert row("bfloat16") == 1 and row("float32") == 2


def test_argmax_equals_the_oracle_on_bf16_heads():
    rng = np.random.default_rng(2)
    hidden = jnp.asarray(rng.integers(-2, 3, (50, 4)), jnp.bfloat16)
    head = jnp.asarray(rng.integers(-2, 3, (33, 4)), jnp.bfloat16)
    scores = oracle.scores(as_float64(hidden), as_float64(head))
    expected = [oracle.lowest_maximum(row, 29) for row in scores]
    out = vocab.linear_argmax(hidden, head, public_rows=29, logits_dtype="bfloat16")
    assert out.dtype == jnp.int32 and out.tolist() == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "logits, index, finite",
    [
        ([1.0, 5.0, 5.0, 9.0], 1, True),
        ([-0.0, 0.0, -1.0, 9.0], 0, True),
        ([-np.inf, -3.0, -np.inf, np.nan], 1, True),
        ([-np.inf, -np.inf, -np.inf, 9.0], None, False),
        ([1.0, np.nan, 2.0, 9.0], None, False),
        ([1.0, np.inf, 2.0, 9.0], None, False),
    ],
)
def test_j19_public_argmax_reports_rows_without_a_choice(dtype, logits, index, finite):
    both = jnp.asarray([logits, [0.0, 1.0, 0.0, 0.0]], dtype)
    out = vocab.public_argmax(both, 3)
    assert out.finite.tolist() == [finite, True] and out.index[1] == 1
    assert out.index.dtype == jnp.int32
    assert index is None or out.index[0] == index


@pytest.mark.parametrize("form", ["xla", "interpret"])
def test_float16_logits_below_its_normal_range_are_told_apart(form):
    hidden = jnp.full((1, 1), 2.0**-9, jnp.float16)
    head = jnp.array([[2.0**-9], [2.0**-8], [-1.0]], jnp.float16)
    out = vocab.linear_argmax(
        hidden, head, public_rows=3, logits_dtype="float16", implementation=form
    )
    assert out.tolist() == [1]


def test_impossible_sizes_are_errors():
    with pytest.raises(ValueError, match="k: expected 1..2"):
        topk_of([1.0, 2.0, 3.0], 3, public_rows=2)
    with pytest.raises(ValueError, match="token_ids"):
        topk_of([1.0, 2.0, 3.0], 1, token_ids=jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="public_rows"):
        vocab.linear_argmax(ONE, head_of([1.0]), public_rows=2, logits_dtype="bfloat16")
    with pytest.raises(ValueError, match="public_rows"):
        vocab.public_argmax(jnp.zeros((1, 4)), 5)
    with pytest.raises(ValueError, match="head: expected at least one column"):
        vocab.linear_argmax(
            jnp.zeros((1, 0)), jnp.zeros((3, 0)), public_rows=2, logits_dtype="bfloat16"
        )
