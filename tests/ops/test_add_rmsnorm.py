"""A branch joins the residual and the sum is normed, in one kernel or as XLA composes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.norm import add_branch, add_rmsnorm, offset_rmsnorm, plain_rmsnorm
from dflash_jax.pallas import norm as kernel
from tests.oracles import norm as oracle
from tests.tolerances import BF16_ROUND, FP32, as_float64, assert_close, assert_same_bits

EPS = 1e-6
FORMS = pytest.mark.parametrize(
    "form", ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
OFFSET = pytest.mark.parametrize("offset", [False, True], ids=["plain", "offset"])


def arrays(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x, branch = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    return x, branch, jnp.asarray(rng.normal(size=shape[-1]), jnp.float32)


@functools.cache
def compiled(form, offset):
    return jax.jit(functools.partial(add_rmsnorm, eps=EPS, offset=offset, implementation=form))


def exact(total, weight, offset):
    rule = oracle.offset_rmsnorm if offset else oracle.plain_rmsnorm
    return rule(as_float64(total), as_float64(weight), EPS)


@FORMS
@OFFSET
@pytest.mark.parametrize("width", [1, 31, 32, 33, 224, 1025])
def test_sum_and_norm_at_the_edges_of_a_tile(width, offset, form):
    x, branch, weight = arrays((3, 2, width), "float32")
    total, normed = compiled(form, offset)(x, branch, weight)
    assert_same_bits(total, np.asarray(x) + np.asarray(branch))
    assert_close(normed, exact(total, weight, offset), FP32)


@FORMS
@OFFSET
@pytest.mark.parametrize("shape", [(1, 224), (8, 2048), (3, 5120)])
def test_the_norm_reads_the_sum_after_its_rounding(shape, offset, form):
    """Normed from the unrounded sum, a quarter of the entries would round to a neighbour."""
    x, branch, weight = arrays(shape, "bfloat16")
    total, normed = compiled(form, offset)(x, branch, weight)
    assert_same_bits(total, (np.asarray(x, np.float32) + np.asarray(branch, np.float32)).astype(
        jnp.bfloat16))
    expected = exact(total, weight, offset)
    assert_close(normed, expected, BF16_ROUND)
    assert np.mean(np.asarray(normed) == expected.astype(jnp.bfloat16)) > 0.99


@FORMS
def test_a_branch_of_fp32_sums_is_rounded_before_it_is_added(form):
    """The branch lies just above half a step of 1, and on it when rounded: a tie goes to 1."""
    x = jnp.full((1, 64), 1.0, jnp.bfloat16)
    branch = jnp.full((1, 64), 2.0**-8 * (1 + 2.0**-10), jnp.float32)
    total, _ = compiled(form, False)(x, branch, jnp.ones(64, jnp.float32))
    assert_same_bits(total, x)


@FORMS
@OFFSET
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_of_a_branch_are_added_first_and_rounded_once(parts, offset, form):
    x, _, weight = arrays((3, 2, 96), "bfloat16")
    branch = np.random.default_rng(1).normal(size=(parts, 3, 2, 96)).astype(np.float32)
    whole = functools.reduce(np.add, branch)
    found, wanted = (compiled(form, offset)(x, jnp.asarray(b), weight) for b in (branch, whole))
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)
    assert_same_bits(add_branch(x, jnp.asarray(branch)), found[0])


@FORMS
def test_parts_of_a_branch_are_added_in_order_before_it_is_rounded(form):
    """In another order the large ones swallow the 1; each rounded alone, small ones vanish."""
    small = 0.75 * 2.0**-8
    x = jnp.asarray([[[1.0] * 48, [0.0] * 48]], jnp.bfloat16)
    branch = [[[[part] * 48, [large] * 48]] for part, large in zip(
        (small, small, 0.0), (2.0**30, -(2.0**30), 1.0), strict=True
    )]
    total, normed = compiled(form, False)(
        x, jnp.asarray(branch, jnp.float32), jnp.ones(48, jnp.float32)
    )
    assert np.asarray(total, np.float32)[0, :, 0].tolist() == [1.0 + 2.0**-7, 1.0]
    assert_close(normed, np.ones((1, 2, 48)), BF16_ROUND)


@OFFSET
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_xla_form_is_the_sum_and_its_norm_to_the_bit(dtype, offset):
    x, branch, weight = arrays((2, 3, 40), dtype)
    rule = jax.jit(offset_rmsnorm if offset else plain_rmsnorm, static_argnums=2)
    total, normed = compiled("xla", offset)(x, branch, weight)
    assert_same_bits(total, x + branch)
    assert_same_bits(normed, rule(x + branch, weight, EPS).astype(dtype))


@FORMS
def test_a_dead_row_does_not_reach_others(form):
    """The entries of the next row stand where the padding of a row reads."""
    x, branch, weight = arrays((4, 40), "float32")
    clean = compiled(form, True)(x, branch, weight)
    dirty = compiled(form, True)(x.at[1].set(jnp.nan), branch.at[3].set(jnp.inf), weight)
    for found, wanted in zip(dirty, clean, strict=True):
        assert_same_bits(np.asarray(found)[::2], np.asarray(wanted)[::2])


def test_programs_write_apart(monkeypatch):
    """Interpret mode runs programs in order, so a row too long would be mended by the next."""
    operands = arrays((5, 40), "float32")
    call = functools.partial(kernel.add_rmsnorm, eps=EPS, offset=False, interpret=True)
    forwards, program_id = call(*operands), kernel.pl.program_id
    monkeypatch.setattr(kernel.pl, "program_id", lambda axis: 4 - program_id(axis))
    kernel.add_rmsnorm.clear_cache()
    for found, wanted in zip(call(*operands), forwards, strict=True):
        assert_same_bits(found, wanted)


def test_what_does_not_fit_is_an_error():
    x, branch, weight = arrays((2, 8), "float32")
    call = functools.partial(add_rmsnorm, eps=EPS, offset=False)
    with pytest.raises(ValueError, match="branch: expected"):
        call(x, branch[:1], weight)
    with pytest.raises(ValueError, match="branch: expected .* parts of it, got bfloat16"):
        call(x, branch[None].astype(jnp.bfloat16), weight)
    with pytest.raises(ValueError, match="weight: expected"):
        call(x, branch, weight[:1])
    wide = jnp.zeros((1, kernel.MAX_WIDTH + 1))
    for rows, got in ((wide, "1, 16385"), (wide[:0, :16], "0, 16")):
        with pytest.raises(NotImplementedError, match=rf"entries, got \({got}\)"):
            call(rows, rows, rows.sum(0), implementation="interpret")
