"""The whole state, and the invariants: each one fails when its equality is broken."""

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.state.decode import DecodeState, InvariantError, check_invariants
from tests import cases

MODELS = cases.tiny_models("dense", "dflash", 3, 2)
LEDGERS = {1: [5, 6, 7, 8], 4: [9, 9]}


def sound():
    """Lane 1 published [7, 8] after the prompt [5, 6]; lane 4 published [9]."""
    state = MODELS.zeros()
    sequence = state.sequence
    for lane, numbers in {1: (3, 1, 8, 5, 60), 4: (1, 1, 9, 2, 60)}.items():
        names = ("frontier", "context_frontier", "anchor", "remaining", "capacity")
        values = dict(zip(names, numbers, strict=True))
        sequence = sequence.replace(
            **{name: getattr(sequence, name).at[lane].set(n) for name, n in values.items()}
        )
    counts = sequence.counts.at[1, 7].set(1).at[1, 8].set(1).at[4, 9].set(1)
    ids = state.target_table.ids.at[1, :2].set(jnp.array([3, 4])).at[4, 0].set(5)
    return state.replace(
        sequence=sequence.replace(counts=counts),
        target_table=state.target_table.replace(ids=ids),
    )


def broken(field, lane, value):
    state = sound()
    sequence = state.sequence
    return state.replace(
        sequence=sequence.replace(**{field: getattr(sequence, field).at[lane].set(value)})
    )


def test_a_sound_state_passes():
    check_invariants(sound(), LEDGERS, MODELS.run)


@pytest.mark.parametrize(
    ("field", "lane", "value", "claim"),
    [
        ("frontier", 1, 2, "len(ledger) = F + 1"),
        ("anchor", 1, 7, "ledger[F] = anchor"),
        ("context_frontier", 4, 2, "0 <= F - F_ctx <= W"),
        ("capacity", 1, 3, "F < capacity"),
        ("remaining", 4, 0, "remaining > 0"),
        ("counts", 1, 0, "counts = published tokens"),
    ],
)
def test_a_broken_equality_is_named(field, lane, value, claim):
    value = jnp.zeros(250, jnp.int32).at[11].set(2) if field == "counts" else value
    with pytest.raises(InvariantError) as error:
        check_invariants(broken(field, lane, value), LEDGERS, MODELS.run)
    assert claim in str(error.value) and f"lane {lane}" in str(error.value)


def test_pending_rows_beyond_the_block_are_named():
    state = broken("frontier", 1, 6)
    with pytest.raises(InvariantError, match="F - F_ctx"):
        check_invariants(state, {1: [5, 6, 7, 8, 8, 8, 8]}, MODELS.run)


def test_reserved_ids_are_named():
    state = broken("anchor", 4, 250)
    with pytest.raises(InvariantError, match="public"):
        check_invariants(state, {4: [9, 250]}, MODELS.run)


def test_unmapped_and_shared_pages_are_named():
    state = sound()
    table = state.target_table
    unmapped = table.replace(ids=table.ids.at[4, 0].set(MODELS.run.pages))
    with pytest.raises(InvariantError, match="mapped"):
        check_invariants(state.replace(target_table=unmapped), LEDGERS, MODELS.run)
    shared = table.replace(ids=table.ids.at[4, 0].set(4))
    with pytest.raises(InvariantError, match="share"):
        check_invariants(state.replace(target_table=shared), LEDGERS, MODELS.run)


def test_full_pages_below_the_frontier_may_be_shared():
    """Page 5 is the first of both lanes; each has a second one of its own."""
    ledgers = {1: [5] * 15 + [7, 8], 4: [9] * 17}
    state = sound()
    sequence, ids = state.sequence, state.target_table.ids
    for lane in ledgers:
        sequence = sequence.replace(
            frontier=sequence.frontier.at[lane].set(16),
            context_frontier=sequence.context_frontier.at[lane].set(16),
        )
        ids = ids.at[lane, :2].set(jnp.array([5, 10 + lane]))
    table = state.target_table.replace(ids=ids)
    state = state.replace(sequence=sequence, target_table=table)
    check_invariants(state, ledgers, MODELS.run)
    table = table.replace(ids=ids.at[1, 2].set(5))  # lane 1 may still write its third page
    with pytest.raises(InvariantError, match="share"):
        check_invariants(state.replace(target_table=table), ledgers, MODELS.run)


def test_abstract_state_has_the_shapes_of_zeros():
    abstract = DecodeState.abstract(MODELS.target, MODELS.draft, MODELS.run)
    zeros = MODELS.zeros()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(
        lambda x: (x.shape, x.dtype), zeros
    )


def test_j14_no_two_leaves_share_a_buffer():
    """A state is donated whole: one buffer twice would be an error."""
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(MODELS.zeros())]
    assert len(set(pointers)) == len(pointers)
