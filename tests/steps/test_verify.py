"""verify: dead columns have no effect, and a tree equals its paths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.state.scratch import Acceptance, Proposal, RoundExtent, RoundScratch
from dflash_jax.steps import commit, verify
from tests import cases
from tests.steps.harness import assert_same_bytes, chain_proposal
from tests.steps.scenes import resumed
from tests.tolerances import FP32_CHAIN, assert_close

COLUMNS = 8
LANES = (5, 0, 3)
run_verify = jax.jit(verify, static_argnums=0, static_argnames="chain")

# Column 0 is the anchor; 1-2-3 the main chain, 4-5 and 6-7 leave it at 0 and 1.
PARENT = (0, 0, 1, 2, 0, 4, 1, 6)
DEPTH = (0, 1, 2, 3, 1, 2, 2, 3)
PATHS = ((0, 1, 2, 3), (0, 4, 5), (0, 1, 6, 7))


@functools.cache
def scene():
    """A session, its rows, random tokens [3, 8] after each anchor."""
    session = resumed("dense", "dflash2", 3, 3)
    tokens = np.random.default_rng(2).integers(0, 250, (3, COLUMNS))
    tokens[:, 0] = [session.lanes[lane].ledger[-1] for lane in LANES]
    return session, session.rows(list(LANES)), tokens.astype(np.int32)


def verified(tokens, columns, parent=None, depth=None, chain=True, params=None):
    """verify of tokens [3, W] with Q = columns per row, as NumPy arrays."""
    session, rows, _ = scene()
    proposal = chain_proposal(jnp.array(tokens))
    if parent is not None:
        proposal = proposal.replace(
            parent=jnp.array(np.tile(np.array(parent, np.int32), (3, 1))),
            depth=jnp.array(np.tile(np.array(depth, np.int32), (3, 1))),
        )
    live = np.broadcast_to(np.array(columns, np.int32), 3)
    extent = RoundExtent(
        proposals=jnp.array(live - 1), columns=jnp.array(live), draft_columns=jnp.array(live)
    )
    return cases.host(
        run_verify(
            session.models, params or session.params, session.state, rows, proposal, extent,
            chain=chain,
        )
    )


def take(verification, columns):
    """Every [B, cols, ...] leaf restricted to the given columns."""
    return jax.tree.map(lambda x: x[:, list(columns)], verification)


def assert_trees_close(actual, expected):
    jax.tree.map(lambda a, e: assert_close(a, e, FP32_CHAIN), actual, expected)


def test_live_columns_depend_neither_on_dead_tokens_nor_on_their_number():
    _, _, tokens = scene()
    whole = verified(tokens, COLUMNS)
    changed = tokens.copy()
    changed[:, 4:] = 0
    for other in (verified(tokens, 4), verified(changed, 4)):
        assert_same_bytes(take(other, range(4)), take(whole, range(4)))


def test_extents_differ_by_row():
    _, _, tokens = scene()
    whole, mixed = verified(tokens, COLUMNS), verified(tokens, [1, 5, 8])
    for row, live in enumerate((1, 5, 8)):
        assert_same_bytes(
            jax.tree.map(lambda x, r=row, n=live: x[r, :n], mixed),
            jax.tree.map(lambda x, r=row, n=live: x[r, :n], whole),
        )


def test_a_tree_that_is_a_chain_equals_the_chain():
    _, _, tokens = scene()
    parent, depth = np.maximum(np.arange(COLUMNS) - 1, 0), np.arange(COLUMNS)
    tree = verified(tokens, [COLUMNS, 5, 1], parent, depth, chain=False)
    chain = verified(tokens, [COLUMNS, 5, 1])
    for row, live in enumerate((COLUMNS, 5, 1)):
        assert_trees_close(
            jax.tree.map(lambda x, r=row, n=live: x[r, :n], tree),
            jax.tree.map(lambda x, r=row, n=live: x[r, :n], chain),
        )


def test_every_path_of_a_tree_equals_that_path_alone():
    _, _, tokens = scene()
    tree = verified(tokens, COLUMNS, PARENT, DEPTH, chain=False)
    for path in PATHS:
        alone = np.zeros_like(tokens)
        alone[:, : len(path)] = tokens[:, path]
        chain = verified(alone, len(path))
        assert_trees_close(take(tree, path), take(chain, range(len(path))))


CHAINED, LIVE = (0, 0, 1, 2, 4, 5, 6, 7), 4


def test_a_chain_in_a_tree_s_frame_is_the_same_whatever_says_that_it_ends():
    """Q of a chain row, or columns that the tree does not have: the same bytes."""
    _, _, tokens = scene()
    depth = (0, 1, 2, 3, 0, 0, 0, 0)
    row = verified(tokens, LIVE, np.maximum(np.arange(COLUMNS) - 1, 0), np.arange(COLUMNS), False)
    tree = verified(tokens, COLUMNS, CHAINED, depth, chain=False)
    assert_same_bytes(take(tree, range(LIVE)), take(row, range(LIVE)))


def test_an_accepted_path_leaves_the_gdn_states_of_that_path_alone():
    """In the same frame: GDN states bit for bit, everything else up to fp32 rounding."""
    _, _, tokens = scene()
    tree = verified(tokens, COLUMNS, PARENT, DEPTH, chain=False)
    for path in PATHS:
        columns = len(path)
        alone = np.zeros_like(tokens)
        alone[:, :columns] = tokens[:, path]
        parent = [max(c - 1, 0) if c < columns else c for c in range(COLUMNS)]
        depth = [c if c < columns else 0 for c in range(COLUMNS)]
        single = verified(alone, COLUMNS, parent, depth, chain=False)
        ours = committed(tree, path, columns)
        theirs = committed(single, range(columns), columns)
        assert_same_bytes(ours.target.gdn, theirs.target.gdn)
        assert_trees_close(ours, theirs)


def test_dead_columns_of_a_tree_change_nothing():
    """Beyond the nodes and beyond Q: any token, any parent before the column."""
    _, _, tokens = scene()
    parent, depth = (0, 0, 1, 0, 1, 5, 6, 7), (0, 1, 2, 1, 2, 0, 0, 0)
    whole = verified(tokens, COLUMNS, parent, depth, chain=False)
    changed = tokens.copy()
    changed[:, 5:] = 3
    cut = verified(changed, 5, (0, 0, 1, 0, 1, 2, 0, 4), (0, 1, 2, 1, 2, 9, 1, 30), chain=False)
    assert_same_bytes(take(cut, range(5)), take(whole, range(5)))
    # A NaN in a dead column's embedding stays there.
    session, _, _ = scene()
    changed[:, 5:] = 111
    embedding = session.params.target["embedding"].at[111].set(np.nan)
    poisoned = session.params.replace(target={**session.params.target, "embedding": embedding})
    found = verified(changed, COLUMNS, parent, depth, chain=False, params=poisoned)
    assert_same_bytes(take(found, range(5)), take(whole, range(5)))


def test_side_columns_leave_the_main_chain_alone():
    """Other tokens in the side columns change no byte of the main chain, in the same frame."""
    _, _, tokens = scene()
    changed = tokens.copy()
    changed[:, 4:] = (changed[:, 4:] + 1) % 250
    first, second = (verified(t, COLUMNS, PARENT, DEPTH, chain=False) for t in (tokens, changed))
    assert_same_bytes(take(first, range(4)), take(second, range(4)))
    assert not np.array_equal(first.logits[:, 4:], second.logits[:, 4:])


def committed(verification, path, count):
    """The state after committing `count` columns of a path of every row."""
    session, rows, _ = scene()
    width = session.models.run.block_width
    path = np.pad(np.array(path, np.int32), (0, width - len(path)))
    full = jnp.array(np.tile(path, (3, 1)))
    number = jnp.full((3,), count, jnp.int32)
    zeros = jnp.zeros((3, width), jnp.int32)
    scratch = RoundScratch(
        proposal=Proposal(tokens=zeros, parent=zeros, depth=zeros, candidates=zeros, q=zeros),
        verification=jax.tree.map(jnp.array, verification),
        acceptance=Acceptance(
            accepted=number - 1, licensed=number, outputs=zeros, path=full,
            fault=jnp.zeros((3,), bool),
        ),
    )
    state = jax.tree.map(jnp.array, cases.host(session.state))
    return cases.host(commit(session.models, state, rows, scratch, number))


def test_committing_a_path_equals_committing_its_columns_as_a_chain():
    """Bit for bit: the same columns moved to the front of the frame, and committed in order."""
    _, _, tokens = scene()
    tree = verified(tokens, COLUMNS, PARENT, DEPTH, chain=False)
    for path in PATHS:
        order = [*path, *(c for c in range(COLUMNS) if c not in path)]
        ours = committed(tree, path, len(path))
        assert_same_bytes(ours, committed(take(tree, order), range(len(path)), len(path)))


def test_committing_a_path_equals_having_verified_it_alone():
    _, _, tokens = scene()
    tree = verified(tokens, COLUMNS, PARENT, DEPTH, chain=False)
    for path in PATHS[1:]:
        alone = np.zeros_like(tokens)
        alone[:, : len(path)] = tokens[:, path]
        expected = committed(verified(alone, len(path)), range(len(path)), len(path))
        ours = committed(tree, path, len(path))
        floats = [
            [x for x in jax.tree.leaves((s.target, s.pending)) if x.dtype == np.float32]
            for s in (ours, expected)
        ]
        assert_trees_close(*floats)
        before = scene()[0].state.target.gdn[0].recurrent
        assert not np.array_equal(ours.target.gdn[0].recurrent, before)
