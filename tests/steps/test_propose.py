"""propose: what each draft's block depends on, and what a proposal holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.scratch import RoundExtent
from dflash_jax.steps import propose
from tests import cases
from tests.steps.harness import assert_same_bytes
from tests.steps.poison import poison
from tests.steps.scenes import HUGE, resumed

run_propose = jax.jit(propose, static_argnums=0)
DRAFTS = tuple(cases.DRAFTS)
K, LANES = 3, (2, 5, 1)


@functools.cache
def scene(draft):
    """A session whose draft context reaches F."""
    return resumed("dense", draft, K, 3)


def proposed(draft, proposals=K, state=None, lanes=LANES, params=None):
    """The proposal of a batch with P = proposals, as NumPy arrays."""
    session = scene(draft)
    p = np.broadcast_to(np.array(proposals, np.int32), 3)
    whole = session.models.whole_block
    extent = RoundExtent(
        proposals=jnp.array(p), columns=jnp.array(p + 1),
        draft_columns=jnp.array(np.full(3, K + 1, np.int32) if whole else p + 1),
    )
    return cases.host(
        run_propose(
            session.models, params or cases.unbiased_params(session.models),
            session.state if state is None else state,
            session.rows(list(lanes)), SamplingArrays.greedy(3), extent,
        )
    )


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_proposal_is_a_chain_with_laws_that_drew_it(draft):
    session, found = scene(draft), proposed(draft)
    assert found.tokens[:, 0].tolist() == [session.lanes[lane].ledger[-1] for lane in LANES]
    assert found.parent.tolist() == [[0, 0, 1, 2]] * 3
    assert found.depth.tolist() == [[0, 1, 2, 3]] * 3
    np.testing.assert_array_equal(found.q.sum(axis=-1), 1.0)
    drawn = found.candidates == found.tokens[:, 1:, None]
    assert (drawn.sum(axis=-1) == 1).all()
    assert (found.q[drawn] == 1.0).all()
    for ids in found.candidates.reshape(-1, found.candidates.shape[-1]):
        assert len(set(ids.tolist())) == len(ids)


@pytest.mark.parametrize("draft", DRAFTS)
def test_b5_reserved_rows_are_never_proposed(draft):
    """The mask id is a reserved row, and the reserved rows of the head have the largest logits."""
    session = scene(draft)
    assert session.models.draft.mask_token_id >= session.models.target.public_vocab
    params = cases.unbiased_params(session.models)
    first = proposed(draft)
    head = params.target["head"]
    loud = head.at[250:].set(50.0 * head[jnp.array(first.tokens[0, 1:].tolist() * 3)[:7]])
    again = proposed(draft, params=params.replace(target={**params.target, "head": loud}))
    assert again.candidates.max() < 250
    assert_same_bytes(again, first)


def test_dflash2_proposes_whole_blocks_whatever_p_is():
    assert_same_bytes(proposed("dflash2", [0, 1, 2]), proposed("dflash2", K))


def test_dflash_proposals_change_with_p():
    """Its last layer is bidirectional: a short block is no prefix of a long one (claim 13)."""
    changed = [
        proposed("dflash", 1, lanes=lanes).tokens[:, 1] != whole.tokens[:, 1]
        for lanes in ((2, 5, 1), (0, 3, 4))
        for whole in [proposed("dflash", K, lanes=lanes)]
    ]
    assert np.any(changed)


@pytest.mark.parametrize("draft", DRAFTS)
def test_rows_do_not_see_one_another(draft):
    whole = proposed(draft)
    order = [1, 2, 0]
    turned = proposed(draft, lanes=[LANES[i] for i in order])
    assert_same_bytes(turned, jax.tree.map(lambda x: x[order], whole))
    mixed = proposed(draft, lanes=(7, LANES[1], 6))
    assert_same_bytes(*(jax.tree.map(lambda x: x[1], p) for p in (mixed, whole)))
    alone = proposed(draft, [0, K, 0], lanes=(7, LANES[1], 6))
    assert_same_bytes(*(jax.tree.map(lambda x: x[1], p) for p in (alone, whole)))


@pytest.mark.parametrize("draft", DRAFTS)
def test_dead_bytes_never_reach_a_proposal(draft):
    session, whole = scene(draft), proposed(draft)
    for value in (np.nan, HUGE, -HUGE):
        state = poison(session.models, session.state, session.lanes, value)
        assert_same_bytes(proposed(draft, state=state), whole)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a10_the_context_conditions_the_proposal(draft):
    """Zeroed context, or one that lags behind F, gives other proposals."""
    session, whole = scene(draft), proposed(draft)
    context = jax.tree.map(jnp.zeros_like, session.state.context)
    emptied = proposed(draft, state=session.state.replace(context=context))
    assert not np.array_equal(emptied.tokens, whole.tokens)


def test_a6_positions_older_than_the_window_do_not_matter_to_local_layers():
    """DFlash2 has local layers only: its rings hold what it can see, and no more."""
    session, whole = scene("dflash2"), proposed("dflash2")
    lane = LANES[1]
    frontier = session.lanes[lane].frontier
    assert frontier > cases.WINDOW
    copy = jax.tree.map(np.array, session.state)
    for ring in copy.context.rings:
        # The oldest row of the ring is at distance S from the anchor, so no column sees it.
        ring.key[session.lanes[lane].slot, :, frontier % cases.WINDOW] = 7.0
        ring.value[session.lanes[lane].slot, :, frontier % cases.WINDOW] = 7.0
    state = jax.tree.map(jnp.array, copy)
    assert_same_bytes(proposed("dflash2", state=state), whole)
    for ring in copy.context.rings:
        ring.key[session.lanes[lane].slot, :, (frontier - 1) % cases.WINDOW] *= -3.0
        ring.value[session.lanes[lane].slot, :, (frontier - 1) % cases.WINDOW] *= -3.0
    nearer = proposed("dflash2", state=jax.tree.map(jnp.array, copy))
    assert not np.array_equal(nearer.candidates[1], whole.candidates[1])
