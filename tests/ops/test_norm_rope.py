"""Heads from a fused projection, in one kernel or as XLA composes them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.norm_rope import norm_rope
from dflash_jax.pallas import norm_rope as kernel
from tests.oracles import norm as norm_oracle
from tests.oracles import rope as rope_oracle
from tests.tolerances import BF16_ROUND, FP32, as_float64, assert_close, assert_same_bits

EPS, THETA, HEADS = 1e-6, 1e4, (4, 2)
FORMS = pytest.mark.parametrize(
    "form", ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
FAR = [0, 255, 65536, 262143]


def operands(dim, *, gated, mrope, dtype="float32", seed=0):
    """projected [2, 2, N], both norm weights, and positions up to the end of a long context."""
    rng = np.random.default_rng(seed)
    rows = ((2 if gated else 1) * HEADS[0] + 2 * HEADS[1]) * dim
    positions = np.asarray(FAR, np.int32).reshape(2, 2)
    if mrope is not None:
        positions = np.stack([positions, positions // 3, positions + 7], axis=-1)
    return (
        jnp.asarray(3.0 * rng.normal(size=(2, 2, rows)), dtype),
        *(jnp.asarray(rng.normal(size=dim), jnp.float32) for _ in range(2)),
        jnp.asarray(positions),
    )


@functools.cache
def compiled(form, **options):
    return jax.jit(functools.partial(
        norm_rope, heads=HEADS, eps=EPS, theta=THETA, implementation=form, **options
    ))


def exact(projected, query_norm, key_norm, positions, *, gated, offset, mrope, rounded, dtypes):
    """Query, key, value and gate in float64, with the named roundings before the last."""
    dim = len(query_norm)
    wide = as_float64(jnp.asarray(projected).astype(dtypes[0])).reshape(2, 2, -1, dim)
    counts = [HEADS[0], HEADS[0] if gated else 0, HEADS[1], HEADS[1]]
    query, gate, key, value = np.split(wide, np.cumsum(counts)[:-1], axis=2)
    rule = norm_oracle.offset_rmsnorm if offset else norm_oracle.plain_rmsnorm

    def turned(x, weight):
        x = rule(x, as_float64(weight), EPS)
        x = as_float64(x.astype(dtypes[0])) if rounded else x
        if mrope is None:
            return rope_oracle.rope_1d(x, np.asarray(positions), THETA)
        return rope_oracle.mrope_partial(x, np.asarray(positions), THETA, *mrope)

    return turned(query, query_norm), turned(key, key_norm), value, gate if gated else None


def check(form, dim, tolerance, *, dtype="float32", **options):
    arguments = operands(dim, gated=options["gated"], mrope=options["mrope"], dtype=dtype)
    out = compiled(form, **options)(*arguments)
    query, key, value, gate = exact(*arguments, **options)
    first, second, third = (jnp.dtype(name) for name in options["dtypes"])
    assert (out.query.dtype, out.key.dtype) == (first, second)
    assert_close(out.query, query, tolerance)
    assert_close(out.key, key, tolerance)
    assert_same_bits(out.value, value.astype(first).astype(third))
    if gate is None:
        assert out.gate is None
    else:
        assert_same_bits(out.gate, gate.astype(first))


@FORMS
@pytest.mark.parametrize(
    "dim, mrope",
    [(8, (8, (2, 1, 1))), (9, (8, (2, 1, 1))), (44, (8, (2, 1, 1))), (256, (64, (11, 11, 10))),
     (5, (4, (2, 0, 0)))],
)
def test_target_heads_turn_their_first_dims_by_three_axes(dim, mrope, form):
    check(form, dim, FP32, gated=True, offset=True, mrope=mrope, rounded=False,
          dtypes=("float32",) * 3)


@FORMS
@pytest.mark.parametrize("dim", [2, 4, 128])
def test_draft_heads_turn_whole(dim, form):
    check(form, dim, FP32, gated=False, offset=False, mrope=None, rounded=False,
          dtypes=("float32",) * 3)


@FORMS
@pytest.mark.parametrize("rounded", [True, False], ids=["dflash", "dflash2"])
def test_a_draft_rounds_its_projection_and_dflash_its_normed_heads(rounded, form):
    check(form, 32, BF16_ROUND, gated=False, offset=False, mrope=None, rounded=rounded,
          dtypes=("bfloat16",) * 3)


@FORMS
def test_every_part_has_its_own_dtype(form):
    check(form, 32, BF16_ROUND, dtype="bfloat16", gated=True, offset=True, mrope=(8, (2, 1, 1)),
          rounded=False, dtypes=("bfloat16", "float16", "float16"))


@FORMS
def test_a_head_reads_nothing_of_its_neighbours(form):
    """Heads of 44: behind the 36 dims that do not turn, padding reads the head that follows."""
    dim, options = 44, dict(gated=True, offset=True, mrope=(8, (2, 1, 1)), dtypes=("float32",) * 3)
    projected, *rest = operands(dim, gated=True, mrope=options["mrope"])
    call = compiled(form, **options)
    clean = call(projected, *rest)
    heads = projected.reshape(2, 2, -1, dim)
    dirty = call(heads.at[:, :, 1::2].set(jnp.nan).reshape(projected.shape), *rest)
    for found, wanted in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        assert_same_bits(np.asarray(found)[:, :, ::2], np.asarray(wanted)[:, :, ::2])
        assert np.isnan(np.asarray(found)[:, :, 1::2]).all()


def test_programs_write_apart(monkeypatch):
    """Interpret mode runs programs in order, so a head too long would be mended by the next."""
    arguments = operands(44, gated=True, mrope=(8, (2, 1, 1)))
    call = functools.partial(
        norm_rope, heads=HEADS, gated=True, eps=EPS, offset=True, theta=THETA,
        mrope=(8, (2, 1, 1)), dtypes=("float32",) * 3, implementation="interpret",
    )
    forwards, program_id, last = call(*arguments), kernel.pl.program_id, (3, 11)
    monkeypatch.setattr(kernel.pl, "program_id", lambda axis: last[axis] - program_id(axis))
    kernel.norm_rope.clear_cache()
    for found, wanted in zip(
        jax.tree.leaves(call(*arguments)), jax.tree.leaves(forwards), strict=True
    ):
        assert_same_bits(found, wanted)


@FORMS
def test_parts_of_a_projection_are_added_before_it_is_rounded(form):
    """In bf16 each part alone would lose what they have in common."""
    options = dict(
        gated=True, offset=True, mrope=(16, (3, 3, 2)), rounded=False, dtypes=("bfloat16",) * 3
    )
    projected, *others = operands(32, gated=True, mrope=options["mrope"])
    parts = jnp.stack([projected + 100.0, jnp.full_like(projected, -100.0)])
    run = compiled(form, **options)
    found, wanted = run(parts, *others), run(parts[0] + parts[1], *others)
    for name in ("query", "key", "value", "gate"):
        assert_same_bits(getattr(found, name), getattr(wanted, name))



def test_what_does_not_fit_is_an_error():
    arguments = operands(12, gated=True, mrope=(8, (2, 1, 1)))
    projected, query_norm, key_norm, positions = arguments
    call = functools.partial(
        norm_rope, heads=HEADS, gated=True, eps=EPS, offset=True, theta=THETA,
        mrope=(8, (2, 1, 1)), dtypes=("float32",) * 3,
    )
    with pytest.raises(ValueError, match="projected: expected"):
        call(projected[..., 1:], query_norm, key_norm, positions)
    with pytest.raises(ValueError, match="projected: expected parts in float32, got bfloat16"):
        call(jnp.stack([projected] * 2).astype(jnp.bfloat16), query_norm, key_norm, positions)
    with pytest.raises(ValueError, match="key_norm: expected"):
        call(projected, query_norm, key_norm[1:], positions)
    with pytest.raises(ValueError, match="positions: expected"):
        call(projected, query_norm, key_norm, positions[..., 0])
    with pytest.raises(ValueError, match="mrope_section"):
        call(*arguments, mrope=(8, (1, 2, 1)))
    with pytest.raises(ValueError, match="rotary_dim in 2..12, got 14"):
        call(*arguments, mrope=(14, (3, 2, 2)))
    with pytest.raises(NotImplementedError, match="power of two of rotated pairs, got 6"):
        call(*arguments, mrope=(12, (2, 2, 2)), implementation="interpret")
