"""Products of a few rows agree with float64 in every form, whole and cut into parts."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import skinny_linear as op
from dflash_jax.ops.skinny_linear import skinny_linear, skinny_parts, skinny_swiglu
from dflash_jax.pallas import skinny_linear as kernel
from dflash_jax.pallas.tiling import PROCESSORS, cut
from tests.tolerances import BF16_MATMUL, FP32_CHAIN, as_float64, assert_close

ON_GPU = [pytest.param(form, marks=pytest.mark.gpu) for form in ("pallas", "mosaic")]
FORMS = pytest.mark.parametrize("form", ["xla", "interpret", *ON_GPU])
TOLERANCE = {"bfloat16": BF16_MATMUL, "float32": FP32_CHAIN}
# tokens, matrix rows, width: at the edges of tiles of 16 tokens, 64 rows and steps of 64; the wide
# ones are cut into parts.
SIZES = [
    (1, 64, 64, "bfloat16"), (15, 63, 65, "float32"), (16, 65, 63, "bfloat16"),
    (17, 136, 128, "bfloat16"), (7, 8, 1024, "bfloat16"), (2, 127, 640, "float32"),
]


def operands(tokens, rows, width, dtype):
    rng = np.random.default_rng(rows + width)
    x = jnp.asarray(rng.normal(size=(tokens, width)), dtype)
    return x, jnp.asarray(rng.normal(size=(rows, width)) / np.sqrt(width), dtype)


LACKS = "mosaic takes 16-bit matrices whose rows divide by 8 and widths by 64"


def lacks(form, rows, width, dtype):
    return form == "mosaic" and (rows % 8 or width % 64 or dtype == "float32")


@FORMS
@pytest.mark.parametrize("tokens, rows, width, dtype", SIZES)
def test_products_and_residuals_match_float64(tokens, rows, width, dtype, form):
    if lacks(form, rows, width, dtype):
        pytest.skip(LACKS)
    x, matrix = operands(tokens, rows, width, dtype)
    exact = as_float64(x) @ as_float64(matrix).T
    wide = skinny_linear(x, matrix, jnp.float32, implementation=form)
    assert wide.dtype == jnp.float32
    assert_close(wide, exact, FP32_CHAIN)
    residual = jnp.asarray(np.random.default_rng(0).normal(size=(tokens, rows)), dtype)
    out = skinny_linear(x, matrix, residual.dtype, residual=residual, implementation=form)
    assert out.dtype == residual.dtype
    assert_close(out, as_float64(residual) + exact, TOLERANCE[dtype])


@pytest.mark.parametrize("form", ["xla", "interpret", ON_GPU[0]])
@pytest.mark.parametrize("tokens, rows, width, dtype", SIZES)
def test_parts_add_up_to_the_product(tokens, rows, width, dtype, form):
    x, matrix = operands(tokens, rows, width, dtype)
    parts = skinny_parts(x.reshape(tokens, 1, width), matrix, implementation=form)
    assert parts.dtype == jnp.float32 and parts.shape[1:] == (tokens, 1, rows)
    if form == "xla" or width % 64:
        assert len(parts) == 1
    elif width == 1024:
        assert len(parts) > 1
    exact = as_float64(x) @ as_float64(matrix).T
    assert_close(jnp.sum(parts, axis=0)[:, 0], exact, FP32_CHAIN)


@pytest.mark.parametrize("form", ["interpret", ON_GPU[0]])
@pytest.mark.parametrize(
    "tokens, rows, width, parts", [(33, 17, 192, 3), (5, 30, 65, 1), (33, 17, 320, 3)]
)
def test_parts_are_the_same_whichever_side_is_the_left_one(tokens, rows, width, parts, form):
    """Both of odd counts, whole, with a rest of the shared axis, and in parts that differ: of one
    step, of two and of two."""
    x, matrix = operands(tokens, rows, width, "bfloat16")
    tiles = kernel.Tiles(tokens=16, step=64, num_warps=4, num_stages=2)
    cuts = [part * (width // 64) // parts * 64 for part in range(1, parts)]
    for turned in (False, True):
        plan = kernel.Plan(rows=32, parts=parts, tiles=tiles, turned=turned)
        made = kernel.parts(x, matrix, interpret=form == "interpret", plan=plan)
        assert made.shape == (parts, tokens, rows)
        for part, (own, other) in enumerate(
            zip(*(np.split(as_float64(one), cuts, axis=1) for one in (x, matrix)), strict=True)
        ):
            assert_close(made[part], own @ other.T, FP32_CHAIN)


@pytest.mark.parametrize("form", ["interpret", ON_GPU[0]])
@pytest.mark.parametrize("tokens", [127, 128, 129, 257])
def test_many_tokens_take_several_tiles(tokens, form):
    x, matrix = operands(tokens, 72, 128, "bfloat16")
    out = skinny_linear(x, matrix, jnp.float32, implementation=form)
    assert_close(out, as_float64(x) @ as_float64(matrix).T, FP32_CHAIN)


@pytest.mark.parametrize(
    "tokens, rows, width, dtype, pays",
    [
        (8, 16480, 5120, "bfloat16", True),
        (64, 5120, 17408, "bfloat16", True), (65, 5120, 17408, "bfloat16", False),
        (8, 34816, 5120, "bfloat16", False), (8, 16480, 5120, "float32", False),
        (1, 2048, 4096, "bfloat16", False), (2, 2048, 4096, "bfloat16", True),
        (8, 1024, 2048, "bfloat16", False),
    ],
)
def test_auto_takes_the_kernel_where_it_was_faster(tokens, rows, width, dtype, pays):
    assert op._pays(tokens, rows, width, dtype) == pays


@pytest.mark.parametrize(
    "tokens, rows, width, dtype, pays",
    [
        (1, 34816, 5120, "bfloat16", True), (16, 34816, 5120, "bfloat16", True),
        (64, 34816, 5120, "bfloat16", True), (65, 34816, 5120, "bfloat16", False),
        (8, 34816, 5120, "float32", False), (8, 12288, 2048, "bfloat16", False),
        (0, 34816, 5120, "bfloat16", False),
    ],
)
def test_auto_mixes_inside_the_product_where_it_was_faster(tokens, rows, width, dtype, pays):
    assert op._mixing_pays(tokens, rows, width, dtype) == pays


@pytest.mark.parametrize(
    "tokens, rows, width, parts, step, stages",
    [
        (1, 16480, 5120, 1, 128, 4), (8, 16480, 5120, 1, 128, 4), (1, 5120, 17408, 4, 128, 3),
        (8, 5120, 17408, 4, 128, 3), (1, 5120, 6144, 3, 128, 3), (8, 5120, 6144, 3, 128, 3),
        (8, 14336, 5120, 1, 128, 4), (8, 12352, 2048, 1, 128, 4), (1, 9216, 2048, 2, 128, 3),
        (16, 9216, 2048, 2, 128, 3), (8, 2048, 4096, 4, 128, 4), (64, 16480, 5120, 1, 128, 3),
        (64, 14336, 5120, 1, 128, 3), (64, 5120, 17408, 3, 128, 3), (64, 5120, 6144, 3, 128, 3),
        (64, 2048, 4096, 4, 128, 4), (40, 10240, 5120, 2, 64, 4), (40, 5120, 25600, 3, 128, 3),
        (8, 70, 96, 1, 64, 4),
    ],
)
def test_plans_are_those_measured(tokens, rows, width, parts, step, stages):
    plan = kernel.Plan.of(tokens, rows, width, "bfloat16")
    assert (plan.rows, plan.parts) == (kernel.TILE, parts)
    assert (plan.tiles.step, plan.tiles.num_stages) == (step, stages)


@FORMS
def test_a_residual_meets_the_rounded_product(form):
    """1 + (2^-8 + 2^-18): the product rounds to 2^-8, and then the sum is a tie, to even."""
    for width in (64, 1024):
        x = jnp.zeros((1, 1, width), jnp.bfloat16).at[..., :2].set(1.0)
        matrix = jnp.zeros((64, width), jnp.bfloat16).at[:, 0].set(2.0**-8)
        matrix = matrix.at[:, 1].set(2.0**-18)
        residual = jnp.ones((1, 1, 64), jnp.bfloat16)
        out = skinny_linear(x, matrix, jnp.bfloat16, residual=residual, implementation=form)
        assert out.shape == (1, 1, 64) and (out == 1.0).all()
        plain = skinny_linear(x, matrix, jnp.float32, implementation=form)
        assert (plain == 2.0**-8 + 2.0**-18).all()


@FORMS
@pytest.mark.parametrize(
    "tokens, inner, width, dtype, rounded",
    [(3, 64, 64, "bfloat16", True), (17, 33, 65, "float32", False),
     (2, 68, 1024, "bfloat16", False), (130, 33, 64, "bfloat16", False),
     (17, 33, 65, "bfloat16", False), (63, 64, 128, "bfloat16", True),
     (64, 65, 192, "bfloat16", False)],
)
def test_swiglu_matches_float64(tokens, inner, width, dtype, rounded, form):
    if lacks(form, 2 * inner, width, dtype):
        pytest.skip(LACKS)
    x, matrix = operands(tokens, 2 * inner, width, dtype)
    gate, up = np.split(as_float64(x) @ as_float64(matrix).T, 2, axis=1)
    out = skinny_swiglu(x, matrix, rounded=rounded, implementation=form)
    assert out.dtype == x.dtype
    exact = gate / (1.0 + np.exp(-gate)) * up
    assert_close(out, exact, TOLERANCE[dtype])


@FORMS
def test_rounded_halves_are_rounded(form):
    """Gate 200, up 1 + 3 * 2^-9, which is 1 + 2^-7 in bf16: 201.2 against 201.6."""
    x = jnp.zeros((1, 64), jnp.bfloat16).at[:, :2].set(1.0)
    matrix = jnp.zeros((128, 64), jnp.bfloat16).at[:64, 0].set(200.0).at[64:, 0].set(1.0)
    matrix = matrix.at[64:, 1].set(3 * 2.0**-9)
    for rounded, expected in ((False, 201.0), (True, 202.0)):
        out = skinny_swiglu(x, matrix, rounded=rounded, implementation=form)
        assert (out == expected).all()


@FORMS
def test_a_dead_row_reaches_no_other(form):
    x, matrix = operands(5, 64, 1024, "bfloat16")
    clean = skinny_linear(x, matrix, jnp.float32, implementation=form)
    dirty = skinny_linear(x.at[4].set(jnp.nan), matrix, jnp.float32, implementation=form)
    assert np.array_equal(clean[:4], dirty[:4])


@pytest.mark.parametrize("rows", [96, 5120, 10240, 34816, 248320])
@pytest.mark.parametrize("width", [64, 100, 5120, 17408])
def test_pieces_are_whole_and_keep_most_processors_busy(rows, width):
    tile, parts = cut(rows, width, 8, step=64, slots=PROCESSORS, tiles=(128, 64))
    assert tile in (64, 128) and width // 64 % parts == 0
    assert parts == 1 or width % 64 == 0
    pieces = -(-rows // tile) * parts
    if width > 100 and rows > 96:
        assert pieces / (-(-pieces // PROCESSORS) * PROCESSORS) > 0.85


def test_what_does_not_fit_is_an_error():
    x, matrix = operands(129, 8, 64, "bfloat16")
    with pytest.raises(NotImplementedError, match="skinny_linear: .* 1..128 rows, got 129"):
        skinny_linear(x, matrix, jnp.float32, implementation="mosaic")
    plain = functools.partial(skinny_linear, out_dtype=jnp.float32)
    for call in (plain, skinny_parts, skinny_swiglu):
        with pytest.raises(NotImplementedError, match="at least one row, got none"):
            call(x[:0], matrix, implementation="pallas")
    with pytest.raises(ValueError, match="implementation: expected auto, xla, pallas or interpret"):
        skinny_parts(x, matrix, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="multiples of 8 and 64"):
        skinny_linear(x[:2], matrix[:7], jnp.float32, implementation="mosaic")
    with pytest.raises(ValueError, match="matrix: expected"):
        skinny_linear(x, matrix.astype(jnp.float32), jnp.float32)
    with pytest.raises(ValueError, match="residual: expected"):
        skinny_linear(x[:2], matrix, jnp.bfloat16, residual=jnp.ones((2, 8)))
    with pytest.raises(ValueError, match="even number of rows"):
        skinny_swiglu(x, matrix[:7])
    for call in (plain, skinny_parts, skinny_swiglu):
        for none in (matrix[:0], matrix[:, :0]):
            with pytest.raises(ValueError, match="matrix: expected at least one row and column"):
                call(x[:, : none.shape[1]], none)
