import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import candidate_selector as selector
from tests.oracles import candidate_selector as oracle
from tests.tolerances import FP32_CHAIN, as_float64, assert_close

VOCAB = 40


def lattice(dtype="bfloat16", batch=3, positions=4, count=5, rank=7, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(VOCAB)[:count] for _ in range(batch * positions)])
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return {
        "unary": jnp.asarray(rng.normal(size=(batch, positions, count)), jnp.float32),
        "candidates": jnp.asarray(ids.reshape(batch, positions, count), jnp.int32),
        "anchor": jnp.asarray(rng.integers(0, VOCAB, batch), jnp.int32),
        "query": draw(batch, positions, rank),
        "predecessor": draw(VOCAB, rank),
        "successor": draw(VOCAB, rank),
    }


def oracle_edges(a):
    ids = [np.asarray(a["candidates"]), np.asarray(a["anchor"])]
    books = [as_float64(a[key]) for key in ("query", "predecessor", "successor")]
    return oracle.edge_scores(as_float64(a["unary"]), *ids, *books)


def walk(edges, candidates, temperature, uniforms):
    return jax.jit(selector.conditional_walk)(
        jnp.asarray(edges, jnp.float32),
        jnp.asarray(candidates, jnp.int32),
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray(uniforms, jnp.float32),
    )


def one_position(scores, temperature, uniform):
    """Walks a single position with C candidates whose ids are 10 * rank."""
    count = len(scores)
    edges = np.broadcast_to(np.asarray(scores, np.float32), (1, 1, count, count))
    return walk(edges, 10 * np.arange(count)[None, None], [temperature], [[uniform]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count, rank", [(5, 7), (1, 3), (16, 8)])
def test_b1_edges_match_the_oracle_and_read_the_previous_candidates(dtype, count, rank):
    a = lattice(dtype, count=count, rank=rank)
    edges = selector.edge_scores(**a)
    assert edges.dtype == jnp.float32
    assert_close(edges, oracle_edges(a), FP32_CHAIN)


@pytest.mark.parametrize("form", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count, rank, positions", [(16, 8, 7), (2, 1, 1), (8, 32, 15)])
def test_the_kernel_walks_the_oracles_path_and_keeps_its_law(form, dtype, count, rank, positions):
    """Greedy and hot rows side by side; a draw is the inverse CDF of exactly the law kept."""
    a = lattice(dtype, batch=5, positions=positions, count=count, rank=rank)
    temperature = np.array([0.0, 0.5, 1.0, 1.7, -1.0], np.float32)
    uniforms = np.random.default_rng(3).random((5, positions)).astype(np.float32)
    out = selector.select(
        **a, temperature=jnp.asarray(temperature), uniforms=jnp.asarray(uniforms),
        implementation=form,
    )
    ranks, laws = oracle.conditional_walk(oracle_edges(a), temperature, uniforms)
    assert np.array_equal(out.ranks, ranks)
    assert_close(out.q, laws, FP32_CHAIN)
    candidates = np.asarray(a["candidates"])
    assert np.array_equal(out.tokens, np.take_along_axis(candidates, ranks[..., None], 2)[..., 0])
    q = np.asarray(out.q)
    assert (q[temperature <= 0].max(axis=-1) == 1.0).all()
    for b, i in np.ndindex(5, positions):
        drawn = oracle.draw(np.asarray(q[b, i]), uniforms[b, i])
        assert temperature[b] <= 0 or out.ranks[b, i] == drawn


@pytest.mark.parametrize("form", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)])
def test_the_kernel_stays_inside_a_lattice_of_nan_and_dead_ids(form):
    a = lattice(count=8, rank=4)
    a["unary"] = a["unary"].at[1].set(jnp.nan)
    a["candidates"], a["anchor"] = a["candidates"].at[2].set(2**31 - 1), a["anchor"].at[2].set(-7)
    hot, draws = jnp.asarray([0.0, 1.0, 0.0], jnp.float32), jnp.full((3, 4), 0.5, jnp.float32)
    dirty = selector.select(**a, temperature=hot, uniforms=draws, implementation=form)
    clean = selector.select(
        **lattice(count=8, rank=4), temperature=hot, uniforms=draws, implementation=form
    )
    assert ((np.asarray(dirty.ranks) >= 0) & (np.asarray(dirty.ranks) < 8)).all()
    assert np.array_equal(dirty.tokens[0], clean.tokens[0])
    assert np.array_equal(dirty.q[0], clean.q[0])


def test_lattices_the_kernel_lacks_are_refused():
    operands = dict(temperature=jnp.zeros(3), uniforms=jnp.zeros((3, 4)))
    with pytest.raises(NotImplementedError, match="candidate_selector: .* 5 candidates, rank 7"):
        selector.select(**lattice(), **operands, implementation="interpret")
    with pytest.raises(ValueError, match="implementation: expected"):
        selector.select(**lattice(), **operands, implementation="beam")


def test_every_predecessor_of_position_0_is_the_anchor():
    edges = np.asarray(selector.edge_scores(**lattice()))
    assert (edges[:, 0] == edges[:, 0, :1]).all()
    assert (edges[:, 1] != edges[:, 1, :1])[:, 1:].any()


def test_unary_is_added_last():
    a = lattice()
    pairwise = selector.edge_scores(**{**a, "unary": jnp.zeros_like(a["unary"])})
    whole = selector.edge_scores(**a)
    assert np.array_equal(whole, a["unary"][:, :, None, :] + pairwise)


def test_the_walk_follows_the_candidates_actually_chosen():
    a = lattice(batch=4, positions=6)
    edges = selector.edge_scores(**a)
    temperature = np.array([0.0, 0.3, 1.0, 1.7])
    uniforms = np.random.default_rng(3).random((4, 6)).astype(np.float32)
    out = walk(edges, a["candidates"], temperature, uniforms)
    ranks, q = oracle.conditional_walk(as_float64(edges), temperature, uniforms)
    assert np.array_equal(out.ranks, ranks)
    tokens = np.take_along_axis(np.asarray(a["candidates"]), ranks[..., None], axis=2)
    assert np.array_equal(out.tokens, tokens[..., 0])
    np.testing.assert_allclose(out.q, q, atol=2e-6, rtol=2e-5)
    assert np.abs(as_float64(out.q).sum(-1) - 1).max() <= 2e-6
    assert set(np.unique(out.q[0])) == {0.0, 1.0}


def test_the_draw_replays_from_the_stored_law():
    a = lattice(batch=64, positions=3, seed=5)
    uniforms = np.random.default_rng(6).random((64, 3)).astype(np.float32)
    out = walk(selector.edge_scores(**a), a["candidates"], np.full(64, 1.3), uniforms)
    q = as_float64(out.q)
    for b, i in np.ndindex(64, 3):
        margin = np.abs(np.cumsum(q[b, i]) - uniforms[b, i]).min()
        assert margin < 1e-6 or out.ranks[b, i] == oracle.draw(q[b, i], uniforms[b, i])


def test_greedy_ties_go_to_the_lowest_rank():
    out = one_position([1.0, 3.0, 3.0, 3.0], 0.0, 0.99)
    assert out.ranks.item() == 1 and out.tokens.item() == 10
    assert out.q.tolist() == [[[0.0, 1.0, 0.0, 0.0]]]
    assert one_position([-0.0, 0.0], -1.0, 0.0).ranks.item() == 0


@pytest.mark.parametrize(
    "uniform, rank", [(0.0, 0), (0.2499, 0), (0.25, 1), (0.5, 2), (0.75, 3), (1 - 2**-24, 3)]
)
def test_the_first_rank_whose_running_sum_exceeds_the_uniform_is_drawn(uniform, rank):
    assert one_position([2.0] * 4, 1.0, uniform).ranks.item() == rank


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24, 1.0])
def test_a_candidate_without_mass_is_never_drawn(uniform):
    out = one_position([-np.inf, 0.0, -1e9, 0.0, -np.inf], 1.0, uniform)
    assert out.ranks.item() in (1, 3)
    assert out.q.tolist() == [[[0.0, 0.5, 0.0, 0.5, 0.0]]]
    assert uniform < 1 or out.ranks.item() == 3


def test_a_tiny_temperature_is_greedy_without_nan():
    out = one_position([1.0, 2.0, 1.5], 1e-30, 0.9)
    assert out.ranks.item() == 1 and out.q.tolist() == [[[0.0, 1.0, 0.0]]]


def test_b4_c11_rows_do_not_depend_on_one_another():
    a = lattice(batch=3)
    temperature, uniforms = np.array([1.0, 0.0, 0.7]), np.full((3, 4), 0.6, np.float32)
    clean = walk(selector.edge_scores(**a), a["candidates"], temperature, uniforms)
    dead = {
        **a,
        "unary": a["unary"].at[1].set(jnp.nan),
        "candidates": a["candidates"].at[1].set(-7),
        "anchor": a["anchor"].at[1].set(VOCAB + 3),
    }
    out = walk(selector.edge_scores(**dead), dead["candidates"], temperature, uniforms)
    for row in (0, 2):
        assert np.array_equal(out.q[row], clean.q[row])
        assert np.array_equal(out.tokens[row], clean.tokens[row])


def test_wrong_shapes_are_errors():
    a = lattice()
    with pytest.raises(ValueError, match="unary"):
        selector.edge_scores(**{**a, "unary": a["unary"][:, :1]})
    with pytest.raises(ValueError, match="anchor, query"):
        selector.edge_scores(**{**a, "query": a["query"][:, :, 1:]})
    edges = selector.edge_scores(**a)
    with pytest.raises(ValueError, match="edges"):
        walk(edges[:, 1:], a["candidates"], np.zeros(3), np.zeros((3, 4)))
    with pytest.raises(ValueError, match="temperature, uniforms"):
        walk(edges, a["candidates"], np.zeros(2), np.zeros((3, 4)))
