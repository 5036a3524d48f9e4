"""Fused heads choose exactly what XLA's product and selection choose, at the edges of tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import vocab
from tests.oracles import vocab as oracle
from tests.tolerances import FP32, as_float64, assert_close

ON_GPU = [pytest.param(form, marks=pytest.mark.gpu) for form in ("pallas", "mosaic")]
FORMS = pytest.mark.parametrize("form", ["interpret", *ON_GPU])
# Called eagerly, each operation in them would be a program of its own to compile.
linear_topk = jax.jit(
    vocab.linear_topk, static_argnames=("k", "public_rows", "ids_sorted", "implementation")
)
linear_argmax = jax.jit(
    vocab.linear_argmax, static_argnames=("public_rows", "logits_dtype", "implementation")
)


def whole_numbers(tokens, rows, width, public, dtype, seed=0):
    """Operands whose scores every order of sums gives exactly, with many ties; poisoned rows."""
    rng = np.random.default_rng(seed)
    hidden = rng.integers(-2, 3, (tokens, width)).astype(np.float32)
    head = rng.integers(-1, 2, (rows, width)).astype(np.float32)
    head[public:] = np.nan
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype)


def chosen(form, hidden, head, k, public):
    out = linear_topk(hidden, head, k=k, public_rows=public, implementation=form)
    return np.asarray(out.scores), np.asarray(out.ids)


@FORMS
@pytest.mark.parametrize(
    "dtype, tokens, rows, public, width, k",
    [("float32", 1, 127, 127, 64, 16), ("bfloat16", 3, 128, 126, 63, 16),
     ("float32", 15, 129, 129, 65, 1), ("bfloat16", 16, 256, 255, 128, 16),
     ("bfloat16", 17, 264, 257, 192, 1), ("float32", 33, 300, 257, 32, 16),
     ("bfloat16", 2, 40, 20, 1, 16), ("bfloat16", 9, 136, 129, 64, 16)],
)
def test_topk_is_bit_equal_to_xla_at_the_edges_of_tiles(
    form, dtype, tokens, rows, public, width, k
):
    if form == "mosaic" and (rows % 8 or width % 64 or dtype == "float32"):
        pytest.skip("mosaic takes 16-bit heads whose rows divide by 8 and widths by 64")
    hidden, head = whole_numbers(tokens, rows, width, public, dtype)
    actual, expected = (chosen(f, hidden, head, k, public) for f in (form, "xla"))
    assert np.array_equal(actual[1], expected[1])
    assert np.array_equal(actual[0], expected[0])
    assert actual[1].max() < public


@FORMS
def test_topk_scores_are_those_of_the_oracle(form):
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(2, 3, 192)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(264, 192)), jnp.bfloat16)
    out = linear_topk(hidden, head, k=5, public_rows=263, implementation=form)
    scores = oracle.scores(as_float64(hidden).reshape(6, 192), as_float64(head))
    best = [oracle.topk(row, 5, [*range(263), None]) for row in scores]
    assert np.array_equal(out.ids.reshape(6, 5), [b[1] for b in best])
    assert_close(out.scores.reshape(6, 5), np.array([b[0] for b in best]), FP32)


@FORMS
def test_an_indexed_head_names_its_tokens_in_either_order_of_rows(form):
    hidden, head = whole_numbers(4, 200, 64, 200, "bfloat16")
    ids = np.random.default_rng(1).permutation(500)[:200].astype(np.int32)
    for order, is_sorted in ((np.argsort(ids), True), (np.arange(200), False)):
        options = dict(k=9, public_rows=1, token_ids=jnp.asarray(ids[order]), ids_sorted=is_sorted)
        actual, expected = (
            linear_topk(hidden, head[order], **options, implementation=f)
            for f in (form, "xla")
        )
        assert np.array_equal(actual.ids, expected.ids)
        scores = oracle.scores(as_float64(hidden), as_float64(head))
        best = [oracle.topk(row, 9, ids.tolist())[1] for row in scores]
        assert np.array_equal(actual.ids, best)


@FORMS
@pytest.mark.parametrize(
    "logits_dtype, tokens, rows, public, width",
    [("bfloat16", 1, 128, 127, 64), ("float16", 7, 264, 257, 128), ("bfloat16", 17, 136, 128, 192),
     ("float32", 3, 256, 129, 64)],
)
def test_argmax_is_that_of_rounded_logits(form, logits_dtype, tokens, rows, public, width):
    rng = np.random.default_rng(rows)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)
    # Neighbouring rows differ in the last bits only: what rounds alike is a tie.
    head = np.repeat(rng.normal(size=(rows // 3 + 1, width)), 3, axis=0)[:rows].astype(np.float32)
    head[public:] = np.nan
    head = jnp.asarray(head, jnp.bfloat16)
    options = dict(public_rows=public, logits_dtype=logits_dtype)
    actual, expected = (
        linear_argmax(hidden, head, **options, implementation=f) for f in (form, "xla")
    )
    assert actual.dtype == jnp.int32 and np.array_equal(actual, expected)


@FORMS
def test_argmax_ties_go_to_the_lowest_row_across_blocks_and_roundings(form):
    """Row 200 is the largest in fp32, row 130 equals it in bf16, row 5 is -0 where all are 0."""
    hidden = jnp.zeros((2, 64), jnp.bfloat16).at[0, :2].set(1.0).at[1, 2].set(1.0)
    head = np.zeros((304, 64), np.float32)
    head[130, 0], head[200, 0], head[200, 1] = 3.0, 3.0, 2.0**-12
    head[:, 2] = -1.0
    head[5:, 2] = 0.0
    head = jnp.asarray(head, jnp.bfloat16)
    for dtype, best in (("bfloat16", 130), ("float32", 200)):
        out = linear_argmax(
            hidden, head, public_rows=304, logits_dtype=dtype, implementation=form
        )
        assert out.tolist() == [best, 5]


@FORMS
@pytest.mark.parametrize("public", [1, 127, 128, 129])
def test_rows_without_a_choice_still_name_a_public_row(form, public):
    head = jnp.full((264, 64), jnp.nan, jnp.bfloat16)
    hidden = jnp.ones((3, 64), jnp.bfloat16)
    out = linear_argmax(
        hidden, head, public_rows=public, logits_dtype="bfloat16", implementation=form
    )
    assert np.array_equal(out, [0, 0, 0])


def test_what_the_fused_kernels_lack_is_refused():
    hidden, head = whole_numbers(129, 200, 64, 200, "bfloat16")
    with pytest.raises(NotImplementedError, match="linear_topk: .* 1..128 tokens, got 129"):
        linear_topk(hidden, head, k=1, public_rows=200, implementation="interpret")
    with pytest.raises(NotImplementedError, match="linear_argmax: .* 1..128 tokens, got 129"):
        linear_argmax(hidden, head, public_rows=200, logits_dtype="bfloat16",
                            implementation="pallas")
    with pytest.raises(NotImplementedError, match="linear_argmax: .* 8 and 64, got .200, 60"):
        linear_argmax(hidden[:9, :60], head[:, :60], public_rows=200,
                            logits_dtype="bfloat16", implementation="mosaic")
    with pytest.raises(ValueError, match="head: expected"):
        linear_argmax(hidden, head[:, 1:], public_rows=200, logits_dtype="bfloat16")
