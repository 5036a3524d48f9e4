"""A chunk of many columns attends as the formula says at every edge of tiles, pages and steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.softmax_attention import softmax_attention
from dflash_jax.pallas import softmax_attention_chunk as kernel
from tests.oracles import attention as oracle
from tests.tolerances import BF16_MATMUL, FP32, assert_close, assert_same_bits

PAGE, HEADS, KV_HEADS, DIM, WIDTH = 16, 4, 2, 16, 70
FORMS = pytest.mark.parametrize(
    "form", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
# Query, keys, context values, block values.
DTYPES = {
    "bf16": ("bfloat16",) * 4, "fp16 context": ("bfloat16", "bfloat16", "float16", "bfloat16"),
    "fp32": ("float32",) * 4,
}


def make(dtypes, frontier, live, *, poison=0.0, width=WIDTH, dim=DIM, page=PAGE):
    """Operands of one call, and a gate; free pages, page tails and dead columns hold `poison`."""
    rng = np.random.default_rng(len(frontier))
    batch, live = len(frontier), np.asarray(live, np.int32)
    columns = -(-max(frontier) // page) + 1

    def normal(dtype, *extent):
        return rng.standard_normal(extent).astype(jnp.dtype(dtype))

    query, gate = (normal(dtypes[0], batch, width, HEADS, dim) for _ in range(2))
    block = [normal(dtype, batch, width, KV_HEADS, dim) for dtype in (dtypes[1], dtypes[3])]
    pools = [normal(dtype, KV_HEADS, batch * columns, page, dim) for dtype in dtypes[1:3]]
    table = rng.permutation(batch * columns).reshape(batch, columns).astype(np.int32)
    for b, length in enumerate(frontier):
        for x in (query, gate, *block):
            x[b, live[b] :] = poison
        for pool in pools:
            dead = pool[:, table[b]].reshape(KV_HEADS, -1, dim)
            dead[:, length:] = poison
            pool[:, table[b]] = dead.reshape(KV_HEADS, columns, page, dim)
        table[b, -(-length // page) :] = batch * columns
    operands = (query, *block, *pools, table, np.asarray(frontier, np.int32), live)
    return operands, gate


@functools.cache
def compiled(form, scale):
    return jax.jit(functools.partial(
        softmax_attention, block_mask="causal", scale=scale, implementation=form
    ))


def run(operands, form, gate=None):
    return np.asarray(compiled(form, operands[0].shape[-1] ** -0.5)(*operands, gate=gate))


@FORMS
@pytest.mark.parametrize("dtypes", DTYPES)
def test_a_chunk_matches_the_formula_at_every_edge(dtypes, form):
    """Contexts and live columns one short of a page, a page, one more, and none."""
    frontier, live = (0, PAGE - 1, PAGE, PAGE + 1, 45), (WIDTH, 63, 64, 65, 1)
    operands, _ = make(DTYPES[dtypes], frontier, live)
    expected = oracle.softmax_attention(*operands, block_mask="causal", scale=DIM**-0.5)
    actual = run(operands, form)
    assert actual.dtype == operands[0].dtype
    assert_close(actual, expected, FP32 if dtypes == "fp32" else BF16_MATMUL)


@FORMS
@pytest.mark.parametrize("poison", [np.nan, -np.inf])
def test_dead_bytes_never_leak_and_dead_columns_are_zero(poison, form):
    place = (5, PAGE, 2 * PAGE + 3), (WIDTH, 33, 0)
    clean, _ = make(DTYPES["fp16 context"], *place)
    dirty, gate = make(DTYPES["fp16 context"], *place, poison=poison)
    actual = run(dirty, form)
    assert_same_bits(actual, run(clean, form))
    opened = run(dirty, form, gate)
    for b, live in enumerate(place[1]):
        for out in (actual, opened):
            assert not np.any(out[b, live:].astype(np.float32))
            assert live == 0 or np.abs(out[b, :live].astype(np.float32)).min() > 0
        wide = actual[b, :live].astype(np.float64) / (1 + np.exp(-gate[b, :live].astype(float)))
        assert_close(opened[b, :live], wide, BF16_MATMUL)


@FORMS
def test_programs_of_several_tiles_and_steps_agree_with_the_formula(form):
    """Tiles of 32 columns, steps of 16 keys inside pages of 64: some see all, some a part."""
    operands, _ = make(DTYPES["fp32"], (0, 100, 64), (WIDTH, 64, 20), page=64)
    tiles = kernel.Tiles(rows=32, keys=16, num_warps=4)
    actual = kernel.attend(
        *operands, scale=DIM**-0.5, interpret=form == "interpret", tiles=tiles
    )
    expected = oracle.softmax_attention(*operands, block_mask="causal", scale=DIM**-0.5)
    assert_close(actual, expected, FP32)


@pytest.mark.gpu
def test_official_heads_match_the_formula_on_sampled_columns():
    """Heads of 256, 1024 columns after 700 of context."""
    width, frontier, dim = 1024, 700, 256
    operands, _ = make(DTYPES["bf16"], (frontier,), (1000,), width=width, dim=dim, page=64)
    actual = run(operands, "pallas")
    query, block_key, block_value, key_pages, value_pages, table, *_ = operands
    for column in (0, 63, 64, 127, 128, 500, 999):
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            seen = [
                np.concatenate([
                    pool[kv, table[0, : -(-frontier // 64)]].reshape(-1, dim)[:frontier],
                    own[0, : column + 1, kv],
                ])
                for pool, own in ((key_pages, block_key), (value_pages, block_value))
            ]
            expected = oracle.attend(query[0, column, head], *map(list, seen), dim**-0.5)
            assert_close(actual[0, column, head], expected, BF16_MATMUL)


def test_what_the_kernel_lacks_is_refused():
    operands, _ = make(DTYPES["fp32"], (3,), (WIDTH,))
    options = dict(scale=1.0, implementation="interpret")
    with pytest.raises(NotImplementedError, match="at most 32 columns or causal"):
        softmax_attention(*operands, block_mask="full", **options)
    narrow, _ = make(DTYPES["fp32"], (3,), (WIDTH,), page=8)
    with pytest.raises(NotImplementedError, match="page 8"):
        softmax_attention(*narrow, block_mask="causal", **options)
