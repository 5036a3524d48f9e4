"""build_tree against the plain builder: topology, order and keys; and what a tree may never be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.candidate_selector import conditional_walk
from dflash_jax.sampling.uniform import seed_words
from dflash_jax.state.sequence import SequenceState
from dflash_jax.steps import build_tree
from dflash_jax.steps.tree import walk_uniforms
from tests.oracles import tree as oracle
from tests.tolerances import as_float64, assert_same_bits

BATCH = 24  # of most scenes, which share their compiled shapes
NEAR = 1e-5  # decisions closer than this may fall either way in fp32


def run(edges, candidates, temperature, sequence, nodes, paths):
    everyone = jnp.ones(temperature.shape, bool)
    uniforms = walk_uniforms(sequence, everyone, candidates.shape[1])
    walk = conditional_walk(edges, candidates, temperature, uniforms)
    return walk, build_tree(
        edges, candidates, walk, temperature, sequence, nodes=nodes, paths=paths
    )


JITTED = jax.jit(run, static_argnames=("nodes", "paths"))


@dataclasses.dataclass
class Scene:
    """Lattices of a batch and the numbers of its rows, on the host."""

    edges: np.ndarray
    temperature: np.ndarray
    seeds: np.ndarray
    frontier: np.ndarray

    def built(self, nodes, paths=8):
        """(walk, proposal) as NumPy arrays. Candidate c of position i has id 100 i + c + 1."""
        batch, positions, count, _ = self.edges.shape
        ids = 100 * np.arange(positions)[:, None] + np.arange(count) + 1
        sequence = SequenceState.zeros(batch, 7).replace(
            frontier=jnp.array(self.frontier, jnp.int32),
            seed=jnp.array(np.stack([seed_words(int(s)) for s in self.seeds])),
        )
        found = JITTED(
            jnp.array(self.edges, jnp.float32),
            jnp.array(np.broadcast_to(ids, (batch, positions, count)), jnp.int32),
            jnp.array(self.temperature, jnp.float32), sequence, nodes=nodes, paths=paths,
        )
        return jax.tree.map(np.asarray, found)

    def expected(self, row, nodes, paths=8):
        """(nodes of the plain builder, its narrowest decision)."""
        decisions = []
        temperature = float(np.float32(self.temperature[row]))
        found = oracle.build(
            as_float64(self.edges[row]), temperature, int(self.seeds[row]),
            int(self.frontier[row]), nodes, paths, decisions,
        )
        return found, min(decisions)


def scene(kind, batch, positions, count, seed=0):
    rng = np.random.default_rng(seed)
    edges = rng.normal(scale=2.0, size=(batch, positions, count, count)).astype(np.float32)
    temperature = np.where(np.arange(batch) % 3 == 0, 0.0, rng.uniform(0.3, 2.0, batch))
    if kind == "ties":
        # Equal among 1, 2, 4 or 8 candidates and nothing elsewhere: laws, scores and priorities are
        # powers of two, so that ties are exact.
        size = 2 ** rng.integers(0, int(np.log2(count)) + 1, (batch, positions, count, 1))
        order = rng.permuted(np.broadcast_to(np.arange(count), edges.shape), axis=-1)
        edges = np.where(order < size, 3.0, -np.inf).astype(np.float32)
    elif kind == "sharp":
        edges *= 12
    edges[:, 0] = edges[:, 0, :1]
    return Scene(
        edges=edges, temperature=temperature,
        seeds=rng.integers(0, 1 << 64, batch, dtype=np.uint64),
        frontier=rng.integers(0, 1 << 17, batch),
    )


def agree(rows: Scene, nodes, paths=8, least=0.9):
    """Every row but near ties equals the plain builder; the proposals and the share compared."""
    walk, found = rows.built(nodes, paths)
    compared = 0
    for row in range(len(rows.seeds)):
        expected, margin = rows.expected(row, nodes, paths)
        if margin < NEAR:
            continue
        compared += 1
        live = len(expected)
        assert found.parent[row, :live].tolist() == [node.parent for node in expected], row
        assert found.depth[row, :live].tolist() == [node.depth for node in expected], row
        tokens = [100 * (node.depth - 1) + node.rank + 1 for node in expected[1:]]
        assert found.tokens[row, 1:live].tolist() == tokens, row
        assert found.parent[row, live:].tolist() == list(range(live, nodes)), row
        for column, node in enumerate(expected[1:], start=1):
            law = expected[node.parent].law
            if rows.temperature[row] <= 0:
                law = np.eye(len(law))[node.rank]
            np.testing.assert_allclose(found.q[row, column - 1], law, atol=2e-6, rtol=2e-5)
    assert compared >= least * len(rows.seeds)
    return walk, found


@pytest.mark.parametrize(
    "positions, count, nodes, paths",
    [(3, 8, 5, 8), (3, 8, 12, 8), (7, 16, 16, 8), (7, 16, 32, 3), (1, 4, 5, 2), (15, 16, 24, 8)],
)
@pytest.mark.parametrize("kind", ["random", "sharp"])
def test_random_lattices_give_the_plain_builder_s_trees(kind, positions, count, nodes, paths):
    rows = scene(kind, BATCH, positions, count, seed=nodes)
    walk, found = agree(rows, nodes, paths, least=0.5 if kind == "sharp" else 0.9)
    assert_same_bits(found.tokens[:, 1 : positions + 1], walk.tokens)
    assert_same_bits(found.q[:, :positions], walk.q)


def test_exact_ties_go_to_the_lowest_column_and_rank():
    for seed in range(3):
        rows = scene("ties", BATCH, 3, 8, seed=seed)
        _, found = agree(rows, 12, least=0.6)
        # Columns whose law is exhausted have no child: some trees end early.
        live = 1 + (found.parent < np.arange(12)).sum(axis=1)
        assert live.min() < 12 and live.max() == 12


def fixed(edges, temperature):
    """The same lattice [K, C, C] in every row of a batch, with other draws."""
    edges = np.broadcast_to(np.asarray(edges, np.float32), (BATCH, *np.shape(edges)))
    return Scene(edges, np.full(BATCH, temperature), np.arange(BATCH), 5 + np.arange(BATCH))


def test_one_hot_laws_leave_a_chain():
    edges = np.full((3, 8, 8), -np.inf)
    edges[..., 2] = 0.0
    _, found = agree(fixed(edges, 0.5), 12, least=1.0)
    assert found.parent.tolist() == [[0, 0, 1, 2, *range(4, 12)]] * BATCH
    assert found.depth[:, 4:].max() == 0


def test_the_priority_of_a_column_without_mass_left_is_minus_infinity():
    """A child drawn from nothing would be accepted with a wrong probability."""
    edges = np.full((3, 8, 8), -np.inf)
    edges[0, :, :2] = 0.0
    edges[1:, :, 3] = 0.0
    _, found = agree(fixed(edges, 1.0), 12, least=1.0)
    assert found.parent.tolist() == [[0, 0, 1, 2, 0, 4, 5, *range(7, 12)]] * BATCH


def test_a_greedy_row_takes_the_edges_in_order_until_paths_are_used_up():
    edges = np.broadcast_to(np.array([1.0, 4.0, 4.0, 2.0]), (1, 4, 4))
    assert fixed(edges, 0.0).built(5, paths=2)[1].tokens.tolist() == [[0, 2, 3, 0, 0]] * BATCH
    edges = np.full((3, 8, 8), -np.inf)
    edges[0, :, :4] = 1.0, 4.0, 4.0, 2.0
    edges[1:, :, 0] = 50.0
    tokens = fixed(edges, 0.0).built(12)[1].tokens
    assert tokens[0].tolist() == [0, 2, 101, 201, 3, 101, 201, 4, 101, 201, 1, 101]


def test_every_tree_is_well_formed():
    rows = scene("random", BATCH, 7, 16, seed=9)
    for nodes, paths in ((16, 8), (32, 3)):
        _, found = rows.built(nodes, paths)
        for parent, depth, tokens in zip(found.parent, found.depth, found.tokens, strict=True):
            live = 1 + (parent < np.arange(nodes)).sum()
            assert live == nodes if paths == 8 else 8 < live <= 8 + 2 * 7
            assert parent[:8].tolist() == [0, *range(7)]
            side = slice(1, live)
            assert (depth[side] == depth[parent[side]] + 1).all() and depth.max() <= 7
            pairs = [*zip(parent.tolist(), tokens.tolist(), strict=True)][:live]
            assert len(set(pairs)) == live
            assert len(set(range(live)) - set(parent[:live].tolist())) <= paths


def test_a_narrower_tree_is_the_beginning_of_a_wider_one():
    """Nothing that a column's existence depends on lies behind it."""
    rows = scene("random", BATCH, 3, 8, seed=4)
    narrow, wide = rows.built(5)[1], rows.built(12)[1]
    for name in ("tokens", "parent", "depth"):
        assert_same_bits(getattr(narrow, name), getattr(wide, name)[:, :5])
    np.testing.assert_allclose(narrow.q, wide.q[:, :4], rtol=1e-6)


def test_rows_do_not_see_one_another():
    rows = scene("random", BATCH, 3, 8, seed=5)
    whole = rows.built(12)[1]
    others = dataclasses.replace(rows, edges=rows.edges.copy())
    others.edges[[0, 3]] = np.nan
    found = others.built(12)[1]
    for row in (1, 2, 4, 5):
        jax.tree.map(lambda a, b, r=row: assert_same_bits(a[r], b[r]), found, whole)
    assert (found.parent[0] <= np.arange(12)).all() and found.tokens.max() < 500

