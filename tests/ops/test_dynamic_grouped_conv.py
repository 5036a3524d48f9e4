import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import dynamic_grouped_conv as conv
from tests.oracles import dynamic_grouped_conv as oracle
from tests.tolerances import BF16_ROUND, SPLIT_BF16, as_float64, assert_close

EPS = 1e-6
# hidden, group width, width, taps
GEOMETRIES = [(48, 16, 5, 2), (12, 4, 1, 2), (10, 5, 4, 3), (6, 1, 3, 4), (8, 8, 3, 1)]
# Called eagerly, each operation in them would be a program of its own to compile.
prepare = jax.jit(conv.prepare, static_argnames=("eps", "out_dtype", "implementation"))
finish = jax.jit(conv.finish, static_argnames="implementation")
apply_taps = jax.jit(conv.apply_taps)


def arrays(hidden, group_width, width, taps, batch=2, dtype="bfloat16"):
    rng = np.random.default_rng(hidden)

    def draw(*shape, to="float32", scale=1.0):
        return jnp.asarray(scale * rng.normal(size=shape), to)

    return {
        "x": draw(batch, width, hidden, to=dtype),
        "norm_weight": draw(hidden),
        "base": draw(2, taps, hidden),
        "projection": draw(2 * taps * hidden // group_width, hidden, to=dtype, scale=0.2),
        "z": draw(batch, width, hidden),
    }


def prepared(a, out_dtype=jnp.float32):
    keys = ("x", "norm_weight", "base", "projection")
    return prepare(*(a[key] for key in keys), eps=EPS, out_dtype=out_dtype)


def expected_prepare(a):
    keys = ("x", "norm_weight", "base", "projection")
    return oracle.prepare(*(as_float64(a[key]) for key in keys), EPS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_b1_both_sides_match_the_loop_oracle(geometry, dtype):
    a = arrays(*geometry, dtype=dtype)
    out = prepared(a)
    main, delta = expected_prepare(a)
    assert_close(out.prepared, main, SPLIT_BF16)
    assert_close(out.finish_delta, delta, SPLIT_BF16)
    done = finish(a["x"].astype(jnp.float32), a["z"], a["base"], out.finish_delta)
    wide = [as_float64(v) for v in (a["x"], a["z"], a["base"], out.finish_delta)]
    assert_close(done, oracle.finish(*wide), SPLIT_BF16)


def test_results_are_rounded_once_to_the_named_dtype():
    a = arrays(48, 16, 5, 2)
    out = prepared(a, jnp.bfloat16)
    assert out.prepared.dtype == out.finish_delta.dtype == jnp.bfloat16
    main, delta = expected_prepare(a)
    assert_close(out.prepared, main, BF16_ROUND)
    assert_close(out.finish_delta, delta, BF16_ROUND)
    done = finish(a["x"], a["z"], a["base"], out.finish_delta)
    assert done.dtype == jnp.bfloat16
    wide = [as_float64(v) for v in (a["x"], a["z"], a["base"], out.finish_delta)]
    assert_close(done, oracle.finish(*wide), BF16_ROUND)


def test_increments_come_from_the_unrounded_norm():
    a = arrays(48, 16, 5, 2)
    normed = oracle.normed(as_float64(a["x"]), as_float64(a["norm_weight"]), EPS)
    projection = as_float64(a["projection"])
    rounded = oracle.increments(as_float64(jnp.asarray(normed, jnp.bfloat16)), projection, 2)
    actual = prepared(a).finish_delta
    assert_close(actual, oracle.increments(normed, projection, 2)[:, :, 1], SPLIT_BF16)
    with pytest.raises(AssertionError):
        assert_close(actual, rounded[:, :, 1], SPLIT_BF16)


def test_finish_inside_one_program_sees_the_rounded_increments():
    """XLA may fold a cast to bf16 and back; the boundary must survive jit."""
    a = arrays(48, 16, 5, 2)

    @jax.jit
    def both(a):
        out = prepared(a, jnp.bfloat16)
        return out, conv.apply_taps(a["z"], a["base"][1], out.finish_delta)

    out, taps = both(a)
    wide = [as_float64(v) for v in (a["z"], a["base"][1], out.finish_delta)]
    assert_close(taps, oracle.apply_taps(*wide), SPLIT_BF16)


@pytest.mark.parametrize("draft_tokens", [1, 3, 7])
def test_b2_concatenated_requests_equal_separate_calls(draft_tokens):
    a = arrays(12, 4, draft_tokens + 1, 2, batch=3)
    together = prepared(a)
    finished = finish(a["x"], a["z"], a["base"], together.finish_delta)
    for row in range(3):
        alone = {**a, "x": a["x"][row : row + 1], "z": a["z"][row : row + 1]}
        out = prepared(alone)
        assert_close(out.prepared[0], as_float64(together.prepared[row]), SPLIT_BF16)
        done = finish(alone["x"], alone["z"], a["base"], out.finish_delta)
        assert_close(done[0], as_float64(finished[row]), BF16_ROUND)
        single = {**alone, "x": alone["x"][:, :1]}
        assert_close(prepared(single).prepared[0, 0], as_float64(out.prepared[0, 0]), SPLIT_BF16)


def test_b3_a_nan_row_before_the_block_is_never_read():
    a = arrays(12, 4, 5, 3, batch=3)
    clean = prepared(a)
    dead = prepared({**a, "x": a["x"].at[0].set(jnp.nan).at[2].set(jnp.nan)})
    assert np.array_equal(dead.prepared[1], clean.prepared[1])
    z = a["z"].at[0].set(jnp.nan).at[2].set(jnp.nan)
    done = finish(a["x"], z, a["base"], clean.finish_delta)
    assert np.isfinite(as_float64(done[1])).all()


def test_a_column_reads_itself_and_the_taps_before_it_only():
    a = arrays(10, 5, 6, 3)
    clean = apply_taps(a["z"], a["base"][0], prepared(a).finish_delta)
    poisoned = apply_taps(
        a["z"].at[:, 2].set(jnp.nan), a["base"][0], prepared(a).finish_delta
    )
    seen = np.isnan(np.asarray(poisoned)).any(axis=(0, 2))
    assert seen.tolist() == [False, False, True, True, True, False]
    assert np.array_equal(np.asarray(poisoned)[:, ~seen], np.asarray(clean)[:, ~seen])


def test_the_base_kernel_is_the_whole_coefficient():
    a = arrays(12, 4, 3, 2)
    nothing = jnp.zeros_like(a["base"])
    delta = jnp.zeros((2, 3, 2, 3), jnp.float32)
    assert np.array_equal(finish(a["x"], a["z"], nothing, delta), a["x"])


def test_wrong_shapes_are_errors():
    a = arrays(12, 4, 3, 2)
    delta = prepared(a).finish_delta
    with pytest.raises(ValueError, match="projection"):
        prepared({**a, "projection": a["projection"][:-1]})
    with pytest.raises(ValueError, match="base"):
        apply_taps(a["z"], a["base"][0, :, :-1], delta)
    with pytest.raises(ValueError, match="delta"):
        apply_taps(a["z"], a["base"][0], delta[:, :-1])
    with pytest.raises(ValueError, match="z: expected"):
        finish(a["x"], a["z"][None][:0], a["base"], delta)


# batch, width, hidden, group width, taps: at the edges of a tile of 16 columns, of a step of 128
# channels and of a stretch of 64, with groups that share a program and a last one that is alone.
KERNEL_GEOMETRIES = [
    (2, 5, 48, 16, 2), (1, 1, 127, 127, 1), (1, 15, 128, 64, 2), (2, 16, 129, 43, 3),
    (1, 17, 130, 65, 2), (1, 32, 66, 2, 2), (1, 33, 16, 4, 9), (2, 8, 301, 1, 1),
]
FORMS = pytest.mark.parametrize(
    "form", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)


@functools.cache
def compiled(form, out_dtype):
    keys = ("x", "norm_weight", "base", "projection")

    def both(a):
        options = dict(eps=EPS, out_dtype=out_dtype, implementation=form)
        out = conv.prepare(*(a[key] for key in keys), **options)
        done = conv.finish(a["x"], a["z"], a["base"], out.finish_delta, implementation=form)
        return out.prepared, out.finish_delta, done

    return jax.jit(both)


@FORMS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("batch, width, hidden, group, taps", KERNEL_GEOMETRIES)
def test_the_kernels_match_the_oracle_at_the_edges_of_tiles(
    batch, width, hidden, group, taps, dtype, form
):
    a = arrays(hidden, group, width, taps, batch=batch, dtype=dtype)
    main, delta, done = compiled(form, "float32")(a)
    expected = expected_prepare(a)
    assert_close(main, expected[0], SPLIT_BF16)
    assert_close(delta, expected[1], SPLIT_BF16)
    wide = [as_float64(v) for v in (a["x"], a["z"], a["base"], delta)]
    assert_close(done, oracle.finish(*wide), BF16_ROUND if dtype == "bfloat16" else SPLIT_BF16)


@FORMS
def test_the_kernels_round_once_and_where_xla_does(form):
    a = arrays(48, 16, 5, 2)
    main, delta, done = compiled(form, "bfloat16")(a)
    expected = expected_prepare(a)
    assert main.dtype == delta.dtype == done.dtype == jnp.bfloat16
    assert_close(main, expected[0], BF16_ROUND)
    assert_close(delta, expected[1], BF16_ROUND)
    wide = [as_float64(v) for v in (a["x"], a["z"], a["base"], delta)]
    assert_close(done, oracle.finish(*wide), BF16_ROUND)


@FORMS
def test_the_kernels_never_read_another_row_or_a_column_before_the_block(form):
    a = arrays(48, 16, 5, 3, batch=3)
    clean = compiled(form, "float32")(a)
    poisoned = {key: a[key].at[0].set(jnp.nan).at[2].set(jnp.nan) for key in ("x", "z")}
    dirty = compiled(form, "float32")({**a, **poisoned})
    for new, old in zip(dirty, clean, strict=True):
        assert np.array_equal(new[1], old[1])
    late = {**a, "x": a["x"].at[:, 3].set(jnp.nan), "z": a["z"].at[:, 3].set(jnp.nan)}
    for new, old in zip(compiled(form, "float32")(late), clean, strict=True):
        assert np.array_equal(new[:, :3], old[:, :3])


@FORMS
def test_a_finish_adds_the_parts_of_a_branch(form):
    a = arrays(48, 16, 5, 2)
    delta = prepared(a).finish_delta
    parts = np.random.default_rng(4).normal(size=(3, *a["z"].shape)).astype(np.float32)
    done, wanted = (
        conv.finish(a["x"], jnp.asarray(z), a["base"], delta, implementation=form)
        for z in (parts, parts[0] + parts[1] + parts[2])
    )
    assert np.array_equal(done, wanted)


def test_what_the_kernels_lack_is_refused():
    with pytest.raises(NotImplementedError, match="1..64 columns, got 65"):
        compiled("interpret", "float32")(arrays(12, 4, 65, 2))
