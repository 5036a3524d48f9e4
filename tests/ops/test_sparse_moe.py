import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.ops import sparse_moe as moe
from dflash_jax.ops.block_scaled_linear import BlockScale
from dflash_jax.pallas import sparse_moe_tiles
from tests.oracles import block_scaled_linear as blocks
from tests.oracles import sparse_moe as oracle
from tests.pallas import h200
from tests.tolerances import BF16_CHAIN, BF16_MATMUL, FP32_CHAIN, as_float64, assert_close

TOLERANCE = {"bfloat16": BF16_MATMUL, "float32": FP32_CHAIN}


@pytest.fixture
def small_tiles(monkeypatch):
    """Beyond 6 tokens: tiles of 4 rows, 3 a step."""
    monkeypatch.setattr(moe, "_FEW_TOKENS", 6)
    monkeypatch.setattr(moe, "_TILE_ROWS", 4)
    monkeypatch.setattr(moe, "_TILES_PER_STEP", 3)


# Called eagerly, each operation in them would be a program of its own to compile.
route = jax.jit(
    moe.route, static_argnums=1, static_argnames=("experts", "shared", "implementation")
)


@functools.cache
def program(tiles, out_dtype, implementation):
    """Of the experts; the tiles are read when it is traced."""
    def call(x, routing, gate_up, down, scales):
        return moe.expert_mlp(
            x, routing, gate_up, down, out_dtype, scales=scales, implementation=implementation
        )

    return jax.jit(call)


def expert_mlp(x, routing, gate_up, down, out_dtype, scales=(None, None), implementation="auto"):
    tiles = moe._FEW_TOKENS, moe._TILE_ROWS, moe._TILES_PER_STEP
    return program(tiles, out_dtype, implementation)(x, routing, gate_up, down, scales)


def arrays(tokens, dtype="float32", experts=17, hidden=10, inner=5):
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, hidden)), dtype)
    logits = jnp.asarray(rng.normal(size=(tokens, experts)), jnp.float32)
    gate_up = jnp.asarray(rng.normal(size=(experts, 2 * inner, hidden)) / 3, dtype)
    return x, logits, gate_up, jnp.asarray(rng.normal(size=(experts, hidden, inner)), dtype)


def expected_of(x, routing, gate_up, down):
    wide = [as_float64(a) for a in (x, routing.weights, gate_up, down)]
    return oracle.expert_mlp(wide[0], np.asarray(routing.experts), *wide[1:])


FORMS = pytest.mark.parametrize(
    "form", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
ROUTE_FORMS = pytest.mark.parametrize(
    "form", ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tokens", [1, 2, 4, 6, 7, 23])
def test_expert_mlp_matches_the_oracle_at_every_token_count(small_tiles, dtype, tokens):
    x, logits, gate_up, down = arrays(tokens, dtype)
    routing = route(logits, 2)
    out = expert_mlp(x, routing, gate_up, down, jnp.float32)
    assert out.dtype == jnp.float32
    assert_close(out, expected_of(x, routing, gate_up, down), TOLERANCE[dtype])
    assert expert_mlp(x, routing, gate_up, down, jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("tokens", [5, 12, 13])
def test_experts_may_be_empty_or_take_every_token(small_tiles, tokens):
    x, _, gate_up, down = arrays(tokens)
    experts = jnp.broadcast_to(jnp.asarray([16, 0], jnp.int32), (tokens, 2))
    routing = moe.Routing(experts=experts, weights=jnp.full((tokens, 2), 0.5, jnp.float32))
    out = expert_mlp(x, routing, gate_up, down, jnp.float32)
    assert_close(out, expected_of(x, routing, gate_up, down), FP32_CHAIN)


@pytest.mark.parametrize("tokens", [3, 6, 20])
def test_permuted_tokens_give_permuted_results(small_tiles, tokens):
    x, logits, gate_up, down = arrays(tokens)
    order = np.random.default_rng(0).permutation(tokens)
    straight = expert_mlp(x, route(logits, 3), gate_up, down, jnp.float32)
    routing = route(logits[order], 3)
    permuted = expert_mlp(x[order], routing, gate_up, down, jnp.float32)
    assert np.array_equal(permuted, np.asarray(straight)[order])


@pytest.mark.parametrize("tokens", [3, 6, 20])
def test_dead_tokens_reach_no_other(small_tiles, tokens):
    x, logits, gate_up, down = arrays(tokens)
    clean = expert_mlp(x, route(logits, 2), gate_up, down, jnp.float32)
    x, logits = x.at[1].set(jnp.nan), logits.at[1].set(jnp.nan)
    out = expert_mlp(x, route(logits, 2), gate_up, down, jnp.float32)
    live = np.arange(tokens) != 1
    assert np.array_equal(np.asarray(out)[live], np.asarray(clean)[live])


@FORMS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tokens, k", [(1, 2), (5, 1), (15, 3), (16, 2), (17, 5), (40, 2)])
def test_the_kernel_matches_the_oracle_and_keeps_dead_tokens_apart(tokens, k, dtype, form):
    x, logits, gate_up, down = arrays(tokens, dtype, experts=9, hidden=48, inner=32)
    routing = route(logits, k)
    out = expert_mlp(x, routing, gate_up, down, jnp.float32, implementation=form)
    assert_close(out, expected_of(x, routing, gate_up, down), TOLERANCE[dtype])
    last = tokens - 1
    dirty = expert_mlp(
        x.at[last].set(jnp.nan), routing, gate_up, down, jnp.float32, implementation=form
    )
    assert np.array_equal(np.asarray(dirty)[:last], np.asarray(out)[:last])


@FORMS
def test_the_kernel_serves_an_expert_that_takes_every_token_and_one_that_takes_none(form):
    x, _, gate_up, down = arrays(12, hidden=32, inner=16)
    experts = jnp.broadcast_to(jnp.asarray([16, 0], jnp.int32), (12, 2))
    routing = moe.Routing(experts=experts, weights=jnp.full((12, 2), 0.5, jnp.float32))
    poisoned = gate_up.at[5].set(jnp.nan), down.at[5].set(jnp.nan)
    out = expert_mlp(x, routing, *poisoned, jnp.float32, implementation=form)
    assert_close(out, expected_of(x, routing, gate_up, down), FP32_CHAIN)


@FORMS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_many_tokens_match_the_oracle_at_every_fill_of_a_tile_and_keep_dead_ones_apart(dtype, form):
    """Experts with one choice less than a tile, a tile, one more, many, one, and none."""
    rows = sparse_moe_tiles.Tiles.of(50.0, 48, 80, jnp.dtype(dtype)).rows
    counts = [rows - 1, 0, rows, rows + 1, 0, 2 * rows, 1, 129, 0]
    chosen = np.random.default_rng(1).permutation(np.repeat(np.arange(9), counts))[:, None]
    tokens = len(chosen)
    x, _, gate_up, down = arrays(tokens, dtype, experts=9, hidden=48, inner=80)
    gate_up, down = (a.at[jnp.asarray([1, 4, 8])].set(jnp.nan) for a in (gate_up, down))
    weights = jnp.linspace(0.1, 1.0, tokens, dtype=jnp.float32)[:, None]
    routing = moe.Routing(experts=jnp.asarray(chosen, jnp.int32), weights=weights)
    out = expert_mlp(x, routing, gate_up, down, jnp.float32, implementation=form)
    assert_close(out, expected_of(x, routing, gate_up, down), TOLERANCE[dtype])
    dirty = expert_mlp(
        x.at[7].set(jnp.nan), routing, gate_up, down, jnp.float32, implementation=form
    )
    live = np.arange(tokens) != 7
    assert np.array_equal(np.asarray(dirty)[live], np.asarray(out)[live])


@FORMS
@pytest.mark.parametrize("tokens, k", [(129, 2), (200, 1)])
def test_many_tokens_may_all_choose_the_same_expert(tokens, k, form):
    x, _, gate_up, down = arrays(tokens, experts=5, hidden=16, inner=16)
    experts = jnp.broadcast_to(jnp.asarray([4, 0][:k], jnp.int32), (tokens, k))
    routing = moe.Routing(experts=experts, weights=jnp.full((tokens, k), 1 / k, jnp.float32))
    out = expert_mlp(x, routing, gate_up, down, jnp.float32, implementation=form)
    assert_close(out, expected_of(x, routing, gate_up, down), FP32_CHAIN)


@FORMS
@pytest.mark.parametrize("choices, rows, experts", [(40, 4, 9), (33, 16, 5), (5000, 64, 11)])
def test_the_sort_lists_every_choice_once_and_its_tiles_share_an_expert(
    choices, rows, experts, form
):
    ids = np.random.default_rng(rows).integers(0, experts, choices).astype(np.int32)
    ids[ids == 2] = 3
    order, table = sparse_moe_tiles.sort(jnp.asarray(ids), experts, rows, form == "interpret")
    listed = np.asarray(order).reshape(-1, rows)
    live = listed < choices
    assert np.array_equal(listed[live], np.argsort(ids, kind="stable"))
    assert np.all(listed[~live] == choices) and np.all(live == np.sort(live, axis=1)[:, ::-1])
    assert np.array_equal(np.repeat(table, live.sum(axis=1)), np.sort(ids))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [129, 1024, 4096])
def test_a_chunk_of_the_official_layer_matches_the_oracle_on_sampled_tokens(tokens):
    count, k, hidden, inner = 256, 8, 2048, 512
    keys = jax.random.split(jax.random.key(tokens), 4)
    x = jax.random.normal(keys[0], (tokens, hidden), jnp.bfloat16)
    gate_up = 0.02 * jax.random.normal(keys[1], (count, 2 * inner, hidden), jnp.bfloat16)
    down = 0.04 * jax.random.normal(keys[2], (count, hidden, inner), jnp.bfloat16)
    routing = route(jax.random.normal(keys[3], (tokens, count)), k)
    out = expert_mlp(x, routing, gate_up, down, jnp.float32, implementation="pallas")
    some = np.asarray([0, tokens // 2, tokens - 1])
    used, place = np.unique(np.asarray(routing.experts)[some], return_inverse=True)
    expected = oracle.expert_mlp(
        as_float64(x[some]), place.reshape(len(some), k), as_float64(routing.weights[some]),
        as_float64(gate_up[used]), as_float64(down[used]),
    )
    assert_close(out[some], expected, BF16_MATMUL)


def test_what_the_kernel_lacks_is_refused():
    x, logits, gate_up, down = arrays(4)
    routing = route(logits, 2)
    with pytest.raises(NotImplementedError, match="sparse_moe: .* hidden 10, inner 5"):
        expert_mlp(x, routing, gate_up, down, jnp.float32, implementation="interpret")
    with pytest.raises(ValueError, match="implementation: expected"):
        expert_mlp(x, routing, gate_up, down, jnp.float32, implementation="ragged")


def test_many_tokens_never_hold_every_tokens_expert_matrices():
    tokens, k, experts, hidden, inner = 1024, 8, 64, 32, 16
    shape = jax.ShapeDtypeStruct
    routing = moe.Routing(
        experts=shape((tokens, k), jnp.int32), weights=shape((tokens, k), jnp.float32)
    )
    compiled = jax.jit(moe.expert_mlp, static_argnames="out_dtype").lower(
        shape((tokens, hidden), jnp.bfloat16),
        routing,
        shape((experts, 2 * inner, hidden), jnp.bfloat16),
        shape((experts, hidden, inner), jnp.bfloat16),
        out_dtype=jnp.float32,
    ).compile()
    gathered = tokens * k * 2 * inner * hidden * 2
    assert compiled.memory_analysis().temp_size_in_bytes < gathered / 2


def test_wrong_shapes_and_dtypes_are_errors():
    x, logits, gate_up, down = arrays(4)
    routing = route(logits, 2)
    with pytest.raises(ValueError, match="gate_up, down"):
        expert_mlp(x, routing, gate_up[:, 1:], down, jnp.float32)
    with pytest.raises(ValueError, match="x: expected dtype"):
        expert_mlp(x.astype(jnp.bfloat16), routing, gate_up, down, jnp.float32)
    with pytest.raises(ValueError, match="routing"):
        expert_mlp(x[:3], routing, gate_up, down, jnp.float32)
    with pytest.raises(ValueError, match="routing: expected 4 tokens, got .4, 2. with weights"):
        expert_mlp(x, routing.replace(weights=routing.weights[:, :1]), gate_up, down, jnp.float32)
    with pytest.raises(ValueError, match="experts_per_token"):
        route(logits, 18)
    with pytest.raises(ValueError, match="logits"):
        route(logits.astype(jnp.bfloat16), 2)


def blocked(tokens, rows=16, columns=16):
    """bf16 tokens, logits, float8 matrices with their scales, and the float64 matrices."""
    x, logits, gate_up, down = arrays(tokens, "bfloat16", experts=9, hidden=48, inner=32)
    rng, stored, exact = np.random.default_rng(5), [], []
    for matrices in (gate_up, down):
        values = np.asarray(matrices * 64).astype(ml_dtypes.float8_e4m3fn)
        count, out, inner = values.shape
        shape = (count, out // rows, -(-inner // columns))
        scale = (np.exp(rng.normal(size=shape) / 2) / 64).astype(np.float32)
        stored.append((jnp.asarray(values), BlockScale(jnp.asarray(scale), columns)))
        exact.append(np.stack([
            blocks.dequantise(as_float64(v), s, rows, columns)
            for v, s in zip(values, scale, strict=True)
        ]))
    (gate_up, first), (down, second) = stored
    return x, logits, gate_up, down, (first, second), exact


@pytest.mark.parametrize(
    "form", ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("tokens, k", [(1, 2), (5, 3), (17, 2), (130, 2)])
def test_float8_experts_match_the_oracle_of_their_dequantised_matrices(tokens, k, form):
    x, logits, gate_up, down, scales, exact = blocked(tokens)
    routing = route(logits, k)
    out = expert_mlp(
        x, routing, gate_up, down, jnp.float32, scales=scales, implementation=form
    )
    expected = oracle.expert_mlp(
        as_float64(x), np.asarray(routing.experts), as_float64(routing.weights), *exact
    )
    assert_close(out, expected, BF16_CHAIN)


def test_float8_experts_of_many_tokens_and_without_copies_match_too(small_tiles):
    for tokens in (6, 23):
        x, logits, gate_up, down, scales, exact = blocked(tokens, rows=8, columns=64)
        routing = route(logits, 4)
        out = expert_mlp(x, routing, gate_up, down, jnp.float32, scales=scales)
        expected = oracle.expert_mlp(
            as_float64(x), np.asarray(routing.experts), as_float64(routing.weights), *exact
        )
        assert_close(out, expected, BF16_CHAIN)


@pytest.mark.parametrize("form", ["xla", "interpret"])
def test_a_shared_expert_without_a_score_or_not_alone_is_an_error(form):
    x, logits, gate_up, down = arrays(4, hidden=32, inner=16)
    routing, stack = moe.Routing(experts=logits[:, :2].astype(jnp.int32), weights=logits[:, :2]), (
        moe.Matrices(gate_up=gate_up, down=down)
    )
    one, two = (jax.tree.map(lambda leaf, count=count: leaf[:count], stack) for count in (1, 2))
    for score in (None, logits[:, :1], logits[:3, 0]):
        with pytest.raises(ValueError, match=r"routing.shared: expected \(4,\)"):
            moe.expert_parts(x, routing.replace(shared=score), stack, one, implementation=form)
    with pytest.raises(ValueError, match="shared: expected one expert, got 2"):
        moe.expert_parts(
            x, routing.replace(shared=logits[:, 0]), stack, two, implementation=form
        )


def test_scales_without_float8_and_float8_without_scales_are_errors():
    x, logits, gate_up, down, scales, _ = blocked(4)
    routing = route(logits, 2)
    with pytest.raises(ValueError, match="x: expected dtype float8_e4m3fn of gate_up"):
        expert_mlp(x, routing, gate_up, down, jnp.float32)
    wide = gate_up.astype(x.dtype)
    with pytest.raises(ValueError, match="kernel: expected float8_e4m3fn, got bfloat16"):
        expert_mlp(x, routing, wide, down, jnp.float32, scales=scales)
    half = expert_mlp(x, routing, wide, down, jnp.float32, scales=(None, scales[1]))
    assert np.isfinite(half).all()


def shared_expert(hidden, inner, dtype):
    """`Matrices` of one expert, and float64 [1, ...] gate_up and down."""
    rng = np.random.default_rng(7)
    made = (
        jnp.asarray(rng.normal(size=shape) / 3, dtype)
        for shape in ((1, 2 * inner, hidden), (1, hidden, inner))
    )
    gate_up, down = made
    return moe.Matrices(gate_up=gate_up, down=down), as_float64(gate_up), as_float64(down)


def expected_with_shared(x, scores, k, exact, shared):
    """[T, H] float64 from router scores [T, E + 1]."""
    routed = oracle.expert_mlp(x, *oracle.route(scores[:, :-1], k), *exact)
    gate = 1.0 / (1.0 + np.exp(-scores[:, -1:]))
    none, one = np.zeros((len(x), 1), int), np.ones((len(x), 1))
    return routed + gate * oracle.expert_mlp(x, none, one, *shared)


@ROUTE_FORMS
@pytest.mark.parametrize(
    "tokens, k, inner, dtype",
    [(1, 2, 32, "float32"), (17, 3, 32, "bfloat16"), (5, 2, 48, "float32"),
     (130, 1, 32, "bfloat16")],
)
def test_routed_and_shared_experts_add_up_to_the_oracle(tokens, k, inner, dtype, form):
    """The shared one like the others and not; in parts whose sum it is, and dead tokens apart."""
    x, _, gate_up, down = arrays(tokens, dtype, experts=9, hidden=48, inner=32)
    matrices = moe.Matrices(gate_up=gate_up, down=down)
    shared, *exact = shared_expert(48, inner, dtype)
    router = jnp.asarray(np.random.default_rng(3).normal(size=(10, 48)), dtype)

    @jax.jit
    def run(x):
        routing = moe.choose_experts(x, router, k, experts=9, shared=True, implementation=form)
        return moe.expert_parts(x, routing, matrices, shared, implementation=form)

    parts = run(x)
    scores = as_float64(x) @ as_float64(router).T
    expected = expected_with_shared(
        as_float64(x), scores, k, (as_float64(gate_up), as_float64(down)), exact
    )
    assert parts.shape[1:] == x.shape and parts.dtype == jnp.float32
    assert_close(np.sum(parts, axis=0), expected, TOLERANCE[dtype])
    dirty = run(x.at[tokens - 1].set(jnp.nan))
    assert np.array_equal(dirty[:, : tokens - 1], parts[:, : tokens - 1])


@pytest.mark.parametrize(
    "tokens, inner, products", [(128, 32, 0), (128, 48, 2), (129, 32, 2), (129, None, 0)]
)
def test_a_shared_expert_has_products_of_its_own_where_the_kernels_do_not_take_it(
    tokens, inner, products
):
    """It shares their launches if it is stored like the others and tokens are few."""
    x, logits, gate_up, down = arrays(tokens, experts=9, hidden=48, inner=32)
    matrices = moe.Matrices(gate_up=gate_up, down=down)
    shared = None if inner is None else shared_expert(48, inner, "float32")[0]
    routing = moe.Routing(
        experts=jnp.zeros((tokens, 1), jnp.int32), weights=logits[:, :1], shared=logits[:, 0]
    )
    call = functools.partial(moe.expert_parts, implementation="pallas")
    text = h200.lowered(call, x, routing, matrices, shared)
    assert text.count("stablehlo.dot_general") == products


@ROUTE_FORMS
def test_a_float8_shared_expert_matches_the_oracle_of_its_dequantised_matrices(form):
    x, logits, gate_up, down, scales, exact = blocked(5)
    matrices = moe.Matrices(
        gate_up=gate_up, down=down, gate_up_scale=scales[0], down_scale=scales[1]
    )
    shared = jax.tree.map(lambda leaf: leaf[3:4], matrices)
    logits = jnp.concatenate([logits, logits[:, :1]], axis=1)
    routing = route(logits, 2, experts=9, shared=True, implementation=form)
    parts = jax.jit(functools.partial(moe.expert_parts, implementation=form))(
        x, routing, matrices, shared
    )
    expected = expected_with_shared(
        as_float64(x), as_float64(logits), 2, exact, [m[3:4] for m in exact]
    )
    assert_close(np.sum(parts, axis=0), expected, BF16_CHAIN)
