"""Numbers of live sequences: idle rows, dropped writes, and the extents of a round."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.state.sequence import SequenceState, round_extent


def ints(*values):
    return jnp.array(np.array(values, np.int32))


def sequence(**fields):
    base = SequenceState.zeros(3, 5)
    return base.replace(**{name: ints(*values) for name, values in fields.items()})


@pytest.mark.parametrize(
    ("frontier", "remaining", "capacity", "proposals", "columns"),
    [
        (10, 50, 100, 7, 8),
        (10, 8, 100, 7, 8),
        (10, 7, 100, 6, 7),
        (10, 2, 100, 1, 2),
        (10, 1, 100, 0, 1),
        (92, 50, 100, 7, 8),
        (93, 50, 100, 6, 7),
        (99, 50, 100, 0, 1),
        (100, 50, 100, 0, 0),
        (0, 0, 0, 0, 0),
    ],
)
def test_extent_follows_budget_and_capacity(frontier, remaining, capacity, proposals, columns):
    rows = sequence(frontier=[frontier], remaining=[remaining], capacity=[capacity])
    short = round_extent(rows, draft_tokens=7, whole_block=False)
    whole = round_extent(rows, draft_tokens=7, whole_block=True)
    assert short.proposals.tolist() == whole.proposals.tolist() == [proposals]
    assert short.columns.tolist() == whole.columns.tolist() == [columns]
    assert short.draft_columns.tolist() == [columns]
    assert whole.draft_columns.tolist() == [8 if columns else 0]


def test_idle_rows_gather_zeros():
    rows = sequence(frontier=[4, 5, 6], anchor=[1, 2, 3]).gather(ints(2, 3, 2**30, 0))
    assert rows.frontier.tolist() == [6, 0, 0, 4]
    assert rows.anchor.tolist() == [3, 0, 0, 1]
    assert rows.counts.shape == (4, 5)


def test_put_writes_the_named_fields_of_chosen_rows():
    before = sequence(frontier=[4, 5, 6], anchor=[1, 2, 3])
    after = before.put(ints(2, 0, 3), jnp.array([True, False, True]), frontier=ints(7, 8, 9))
    assert after.frontier.tolist() == [4, 5, 7]
    assert after.anchor.tolist() == [1, 2, 3]


def test_count_tokens_adds_the_first_tokens_of_live_rows():
    tokens = jnp.array(np.array([[1, 1, 4], [2, 2, 2], [3, 3, 3]], np.int32))
    after = SequenceState.zeros(3, 5).count_tokens(ints(1, 0, 3), tokens, ints(2, 0, 3))
    assert after.counts.tolist() == [[0] * 5, [0, 2, 0, 0, 0], [0] * 5]


def test_reserved_ids_of_a_prompt_are_not_marked():
    tokens = jnp.array(np.array([[1, 9, 0]], np.int32))
    after = SequenceState.zeros(3, 5).mark_prompt(ints(2), tokens, ints(2))
    assert np.argwhere(np.asarray(after.prompt_seen)).tolist() == [[2, 1]]
