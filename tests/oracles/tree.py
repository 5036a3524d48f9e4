"""Trees in float64, one row at a time, from contracts 8.2, 8.3 and 8.5.

Draws are keyed by the round's frontier, as the docstring of `steps/tree.py` explains.

`decisions` collects, for every choice made, how far it was from going the other way, relative to
the numbers compared, so that a test can leave out rows that rounding may decide.
"""

import dataclasses

import numpy as np

from tests.oracles import candidate_selector as selector
from tests.oracles.sampling import ACCEPT, BONUS, CORRECTION, PROPOSAL, inverse_cdf
from tests.oracles.uniform import top_bits


@dataclasses.dataclass
class Node:
    """One column. `law` and `edges` are those of its children; empty at depth K."""

    parent: int
    depth: int
    rank: int
    score: float
    edges: np.ndarray
    law: np.ndarray
    children: list[int] = dataclasses.field(default_factory=list)


def drawn(seed, position, purpose, sub):
    return top_bits(seed, position, purpose, sub) * 2.0**-24


def build(edges, temperature, seed, frontier, width, paths, decisions):
    """Nodes of one row from its lattice [K, C, C]; the main chain first."""
    positions, count, _ = edges.shape
    greedy = temperature <= 0
    nodes = []

    def add(parent, rank):
        above = nodes[parent] if parent is not None else None
        depth = above.depth + 1 if above else 0
        outgoing = edges[depth, rank] if depth < positions else np.zeros(0)
        law = selector.law(outgoing, 1.0 if greedy else temperature) if len(outgoing) else outgoing
        score = above.score * above.law[rank] if above else 1.0
        nodes.append(Node(parent if above else 0, depth, rank, score, outgoing, law))
        if above:
            above.children.append(len(nodes) - 1)

    def next_rank(v):
        """Rank of v's next child."""
        node = nodes[v]
        sub = ((v + 1) << 5) | len(node.children)
        taken = [nodes[c].rank for c in node.children]
        left = [r for r in range(count) if r not in taken]
        if greedy:
            best = max(node.edges[r] for r in left)
            decisions.extend(best - node.edges[r] for r in left if node.edges[r] < best)
            return next(r for r in left if node.edges[r] == best)
        mass = sum(node.law[r] for r in left)
        goal, total, last = drawn(seed, frontier, PROPOSAL, sub) * mass, 0.0, None
        for r in left:
            total += node.law[r]
            if node.law[r] > 0:
                decisions.append(abs(goal - total) / mass)
                last = r
                if goal < total:
                    break
        return last

    def priority(v):
        node = nodes[v]
        taken = {nodes[c].rank for c in node.children}
        left = np.array([node.law[r] for r in range(count) if r not in taken])
        if greedy:
            return node.score * left.max()
        return node.score * np.sum(left**2) / left.sum() if left.sum() > 0 else -np.inf

    def may_grow(v, leaves):
        node = nodes[v]
        room = node.depth < positions and len(node.children) < count
        return room and (not node.children or leaves < paths)

    add(None, 0)
    for v in range(positions):
        add(v, next_rank(v))
    while len(nodes) < width:
        leaves = sum(not node.children for node in nodes)
        ranking = [(priority(v), v) for v in range(len(nodes)) if may_grow(v, leaves)]
        ranking = [entry for entry in ranking if entry[0] > -np.inf]
        if not ranking:
            break
        best = max(value for value, _ in ranking)
        decisions.extend((best - value) / best for value, _ in ranking if 0 < value < best)
        chosen = next(v for value, v in ranking if value == best)
        add(chosen, next_rank(chosen))
    return nodes


def accept(parents, tokens, greedy_choices, laws, retained, seed, frontier, decisions):
    """One round of one row.

    Args:
      parents, tokens: of the columns that exist, in order.
      greedy_choices: the adjusted argmax of every column for a greedy row, else None.
      laws: p of every column over all ids (sampled rows).
      retained: per column {id: probability}, the law of its children.
    Returns:
      (path, terminal id, purpose of the terminal draw).
    """
    path, v = [0], 0
    while True:
        children = [c for c in range(1, len(parents)) if parents[c] == v]
        depth = len(path)
        if greedy_choices is not None:
            match = [c for c in children if tokens[c] == greedy_choices[v]]
            if not match:
                return path, greedy_choices[v], None
            v = match[0]
            path.append(v)
            continue
        r, q, entered = np.array(laws[v], np.float64), dict(retained[v]), None
        for j, child in enumerate(children):
            x = tokens[child]
            z = {token: mass / sum(q.values()) for token, mass in q.items()}
            u = drawn(seed, frontier + depth, ACCEPT, j)
            px = r[x] / r.sum() if x < len(r) and r.sum() > 0 else 0.0
            decisions.append(abs(u * z[x] - px) / max(px, z[x]))
            if px > 0 and u * z[x] < px:
                entered = child
                break
            mass = r.sum()
            for token, share in z.items():
                if token < len(r):
                    r[token] = max(r[token] - mass * share, 0.0)
            del q[x]
        if entered is None:
            purpose = CORRECTION if children else BONUS
            if r.sum() <= 0:
                return path, int(np.argmax(laws[v])), purpose
            u = drawn(seed, frontier + depth, purpose, 0)
            share = np.cumsum(r) / r.sum()
            decisions.append(np.abs(share - u).min())
            return path, inverse_cdf(r, u), purpose
        v = entered
        path.append(v)
