"""How a tree grows from DFlash2's lattice.

The main chain is the walk's. Then, while there is room, the column with the highest priority draws
its next child, without replacement, from the law of its candidates:

    score(child) = score(parent) * law(parent)[rank of child],   score(anchor) = 1
    priority(v)  = score(v) * expected law value of v's next child

A priority never depends on the draw that it leads to: whether a column exists is decided before its
token, so that acceptance by siblings is exact. Source: contracts 8.2 and 8.3, but for the keys.

A draw deep in the tree decides which columns exist beside it, and so where a path may end. Were
its number used again by the next round, that round would see it under a condition. A chain may key
its draws by position, because those it throws away decide nothing; a tree keys all of its draws,
those of the main chain included, by the frontier of its round and the place in the tree.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from dflash_jax.ops.candidate_selector import Walk, edge_law
from dflash_jax.ops.indices import DROP
from dflash_jax.sampling.uniform import Purpose, uniform
from dflash_jax.state.scratch import Proposal
from dflash_jax.state.sequence import SequenceState

CHILD_BITS = 5  # a child's key holds its parent's column, raised by 1, above its sibling index


@struct.dataclass
class _Growth:
    """A tree while it grows, by column; B rows, W_t columns, C candidates.

    rank:     [B, W_t] int32, candidate chosen at the column; 0 at the anchor.
    parent:   [B, W_t] int32; its own place at the anchor and where no column exists yet.
    depth:    [B, W_t] int32.
    edges:    [B, W_t, C] fp32, scores of the column's children.
    law:      [B, W_t, C] fp32, the law of its first child.
    taken:    [B, W_t, C] bool, ranks that its children hold.
    score:    [B, W_t] fp32.
    priority: [B, W_t] fp32; -inf where the column can have no further child.
    leaves:   [B] int32.
    """

    rank: jax.Array
    parent: jax.Array
    depth: jax.Array
    edges: jax.Array
    law: jax.Array
    taken: jax.Array
    score: jax.Array
    priority: jax.Array
    leaves: jax.Array

    def at(self, column):
        """The values of one column a row, [B] and [B, C]; `leaves` as it is."""
        take = jnp.take_along_axis

        def pick(x):
            index = column.reshape(-1, *(1,) * (x.ndim - 1))
            return take(x, index, axis=1)[:, 0] if x.ndim > 1 else x

        return jax.tree.map(pick, self)

    def put(self, column, where, **fields) -> "_Growth":
        """Writes the named fields at one column of the rows where `where` holds."""
        rows, target = jnp.arange(len(column)), jnp.where(where, column, self.rank.shape[1])
        return self.replace(
            **{
                name: getattr(self, name).at[rows, target].set(value, **DROP)
                for name, value in fields.items()
            }
        )


def walk_uniforms(sequence: SequenceState, takes_tree, positions: int):
    """The draws [B, K] of the walk: by position on a chain, by round and column in a tree.

    Args:
      takes_tree: [B] bool; a row without a tree walks exactly as in a run without trees.
      positions:  K. Static.
    Source: contracts 5.10; the module docstring for trees.
    """
    step = jnp.arange(positions, dtype=jnp.int32)
    takes_tree, frontier = takes_tree[:, None], sequence.frontier[:, None]
    position = jnp.where(takes_tree, frontier, frontier + step)
    sub = jnp.where(takes_tree, (step + 1) << CHILD_BITS, 0)
    return uniform(sequence.seed[:, None], position, Purpose.PROPOSAL, sub)


def build_tree(
    edges, candidates, walk: Walk, temperature, sequence: SequenceState, *, nodes: int, paths: int
) -> Proposal:
    """The tree of every row, greedy and sampled rows mixed; rows that keep a chain are cut by Q.

    A sampled row's child is drawn by inverse CDF in rank order under the key (seed, F, Proposal,
    (v + 1) << 5 | j) of its parent v and its place j among siblings; a greedy row takes the largest
    edge. Growth ends early when no column can have a child.

    Args:                                                    (B rows, K positions, C candidates)
      edges:       [B, K, C, C] fp32, the lattice of `edge_scores`.
      candidates:  [B, K, C] int32.
      walk:        `conditional_walk` of these edges with `walk_uniforms`: the main chain, kept bit
        for bit.
      temperature: [B] fp32; <= 0 is greedy.
      sequence:    the batch's rows: anchors, frontiers and seeds.
      nodes:       W_t, K + 2 or more. Static.
      paths:       leaves at most. Static.
    Returns:
      `Proposal` of W_t columns. q of column c is the whole law of its parent on sampled rows (what
      remains for the later siblings follows from it), a one-hot on greedy rows.
    Source: contracts 8.2 and 8.3.
    """
    positions, num_candidates = candidates.shape[1:]
    growth = _main_chain(edges, walk, temperature, nodes)

    def grow(column, growth):
        parent, grows = _most_promising(growth, paths)
        return _add_child(growth, column, parent, grows, edges, temperature, sequence)

    growth = lax.fori_loop(positions + 1, nodes, grow, growth)
    ids = jnp.take_along_axis(candidates, jnp.maximum(growth.depth - 1, 0)[..., None], axis=1)
    tokens = jnp.take_along_axis(ids, growth.rank[..., None], axis=2)[..., 0]
    exists = growth.parent < jnp.arange(nodes)
    q = jnp.take_along_axis(growth.law, growth.parent[:, 1:, None], axis=1)
    point = jax.nn.one_hot(growth.rank[:, 1:], num_candidates, dtype=jnp.float32)
    return Proposal(
        tokens=jnp.where(exists, tokens, sequence.anchor[:, None]),
        parent=growth.parent,
        depth=growth.depth,
        candidates=candidates,
        q=jnp.where((temperature <= 0)[:, None, None], point, q),
    )


def _main_chain(edges, walk: Walk, temperature, nodes: int) -> _Growth:
    """Columns 0..K of the walk, each the first child of the one before, and room for the others."""
    batch, positions, _, num_candidates = edges.shape

    def padded(x, value=0):
        spare = [(0, 0), (0, nodes - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, spare, constant_values=value)

    chosen = jnp.pad(walk.ranks[:, :-1], ((0, 0), (1, 0)))
    scores = jnp.take_along_axis(edges, chosen[:, :, None, None], axis=2)[:, :, 0]
    greedy = (temperature <= 0)[:, None]
    # A sampled walk's own q, so that siblings share its bits; a greedy one is a point mass.
    law = jnp.where(greedy[..., None], edge_law(scores, temperature[:, None]), walk.q)
    reached = jnp.take_along_axis(law, walk.ranks[..., None], axis=2)[..., 0]
    score = [jnp.ones((batch,), jnp.float32)]
    for position in range(positions):
        score.append(score[-1] * reached[:, position])
    column = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (batch, nodes))
    growth = _Growth(
        rank=padded(jnp.pad(walk.ranks, ((0, 0), (1, 0)))),
        parent=jnp.where(column <= positions, jnp.maximum(column - 1, 0), column),
        depth=jnp.where(column <= positions, column, 0),
        edges=padded(scores),
        law=padded(law),
        taken=padded(jax.nn.one_hot(walk.ranks, num_candidates, dtype=bool), False),
        score=padded(jnp.stack(score, axis=1)),
        priority=jnp.full((batch, nodes), -jnp.inf, jnp.float32),
        leaves=jnp.ones((batch,), jnp.int32),
    )
    main = jax.tree.map(lambda x: x[:, :positions] if x.ndim > 1 else x, growth)
    return growth.replace(priority=padded(_priority(main, greedy), -jnp.inf))


def _most_promising(growth: _Growth, paths: int):
    """The column [B] that gets the next child, ties to the lowest, and whether there is one."""
    childless = ~jnp.any(growth.taken, axis=-1)
    allowed = childless | (growth.leaves < paths)[:, None]
    priority = jnp.where(allowed, growth.priority, -jnp.inf)
    parent = jnp.argmax(priority, axis=1).astype(jnp.int32)
    return parent, jnp.max(priority, axis=1) > -jnp.inf


def _add_child(growth, column, parent, grows, edges, temperature, sequence) -> _Growth:
    """Draws the next child of `parent` [B] into `column`, where `grows` holds."""
    batch, positions, _, num_candidates = edges.shape
    greedy = temperature <= 0
    above = growth.at(parent)
    children = jnp.sum(above.taken, axis=-1, dtype=jnp.int32)
    key = ((parent + 1) << CHILD_BITS) | children
    u = uniform(sequence.seed, sequence.frontier, Purpose.PROPOSAL, key)
    drawn = _without_replacement(above.law, above.taken, u)
    rank = jnp.where(greedy, _largest_edge(above.edges, above.taken), drawn)
    taken = above.taken | jax.nn.one_hot(rank, num_candidates, dtype=bool)
    priority = _priority(above.replace(taken=taken), greedy)
    growth = growth.put(parent, grows, taken=taken, priority=priority)

    depth = above.depth + 1
    inner = depth < positions
    rows = jnp.arange(batch)
    scores = edges[rows, jnp.minimum(depth, positions - 1), rank]
    own_law = edge_law(scores, temperature)
    child = _Growth(
        rank=rank, parent=parent, depth=depth, edges=scores, law=own_law,
        taken=jnp.zeros_like(taken),
        score=above.score * jnp.take_along_axis(above.law, rank[:, None], axis=1)[:, 0],
        priority=above.priority, leaves=growth.leaves + (grows & (children > 0)).astype(jnp.int32),
    )
    priority = jnp.where(inner, _priority(child, greedy), -jnp.inf)
    fields = {
        name: getattr(child, name)
        for name in ("rank", "parent", "depth", "edges", "law", "taken", "score")
    }
    place = jnp.full((batch,), column, jnp.int32)
    return growth.put(place, grows, priority=priority, **fields).replace(leaves=child.leaves)


def _priority(column: _Growth, greedy):
    """Score times the expected law value of the next child; -inf when there can be none.

    A greedy row takes the largest value left, a sampled one draws from what is left. Without mass
    left there is no law to draw from, and a child would be accepted with a wrong probability.
    """
    left = jnp.where(column.taken, 0.0, column.law)
    mass = jnp.sum(left, axis=-1)
    mean = jnp.sum(left * left, axis=-1) / jnp.where(mass > 0.0, mass, 1.0)
    expected = jnp.where(greedy, jnp.max(left, axis=-1), mean)
    possible = jnp.where(greedy, ~jnp.all(column.taken, axis=-1), mass > 0.0)
    return jnp.where(possible, column.score * expected, -jnp.inf)


def _without_replacement(law, taken, u):
    """Rank [B] by inverse CDF over the ranks of law [B, C] that are not taken."""
    left = jnp.where(taken, 0.0, law)
    goal = u * jnp.sum(left, axis=-1)
    positive = left > 0.0
    reached = (goal[:, None] < jnp.cumsum(left, axis=-1)) & positive
    last = law.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    return jnp.where(reached.any(-1), jnp.argmax(reached, axis=-1), last).astype(jnp.int32)


def _largest_edge(edges, taken):
    """The lowest rank with the largest edge among those not taken, [B]; edges may be -inf."""
    best = jnp.max(jnp.where(taken, -jnp.inf, edges), axis=-1, keepdims=True)
    return jnp.argmax(~taken & (edges == best), axis=-1).astype(jnp.int32)
