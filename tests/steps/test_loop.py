"""Rounds of the device's own loop are the rounds that the host would have run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.state.decode import check_invariants
from dflash_jax.steps import commit, decode_rounds, speculate
from dflash_jax.steps.ends import first_end
from tests import cases
from tests.steps.harness import Session, assert_same_bytes, extent_of
from tests.steps.poison import poison_with
from tests.steps.scenes import HUGE

NO_END = np.full((3, 2), -1, np.int32)


@pytest.fixture(scope="module")
def scene():
    models = cases.tiny_models("dense", "dflash2", 3, 3)
    return models, cases.leaning_params(models)


def admitted(models, params, budgets=(9, 14, 20), before=None):
    session = Session(models, params, before)
    prompts = cases.prompts(models)
    session.admit({lane: prompts[lane] for lane in range(3)}, lambda lane: budgets[lane])
    return session


@pytest.fixture(scope="module")
def plain(scene):
    """Greedy texts of 20 tokens, the first of which the prefill chose."""
    return admitted(*scene, budgets=(20, 20, 20)).run(seed=3)


def by_the_host(session, sampling, ends, rounds):
    """Outputs of the same rounds, one by one, and the state after them."""
    models, texts = session.models, [[] for _ in range(3)]
    live = set(range(3))
    for _ in range(rounds):
        lanes = [lane if lane in live else None for lane in range(3)]
        full = session.rows([0, 1, 2])
        idle = jnp.array([lane is None for lane in lanes])
        rows = jax.tree.map(lambda x, idle=idle: jnp.where(idle, models.run.slots, x), full)
        state = session.poisoned()
        extent = extent_of(models, state, rows)
        state, scratch = speculate(models, session.params, state, rows, sampling, extent)
        licensed = np.asarray(scratch.acceptance.licensed)
        outputs = np.asarray(scratch.acceptance.outputs)
        counts = np.zeros(3, np.int32)
        for row in sorted(live):
            kept = outputs[row, : licensed[row]].tolist()
            stop = [i for i, token in enumerate(kept) if token in ends[row]]
            kept = kept[: stop[0] + 1] if stop else kept
            counts[row] = len(kept)
            texts[row] += kept
            session.lanes[row].ledger += kept
            session.lanes[row].remaining -= len(kept)
            if stop or not session.lanes[row].live:
                live.discard(row)
        session.state = commit(models, state, rows, scratch, jnp.array(counts))
    return texts, live


def text_of(log, row):
    counts = np.asarray(log.committed)[row]
    outputs = np.asarray(log.outputs)[row]
    return [token for kept, n in zip(outputs, counts, strict=True) for token in kept[:n].tolist()]


def test_outputs_and_state_are_those_of_single_rounds(scene):
    models, params = scene
    controls = SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.3, seed=5)
    sampling = SamplingArrays.of([SamplingParams(), controls, controls], models.target.public_vocab)
    session = admitted(models, params)
    expected, live = by_the_host(session, sampling, [()] * 3, 4)
    other = admitted(models, params)
    state, log = decode_rounds(
        models, params, other.state, other.rows([0, 1, 2]), sampling, NO_END, rounds=4
    )
    assert [text_of(log, row) for row in range(3)] == expected
    assert np.asarray(log.ended).tolist() == [row not in live for row in range(3)]
    assert not np.asarray(log.fault).any()
    ledgers = {row: session.lanes[row].ledger for row in live}
    check_invariants(state, ledgers, models.run)
    for name in ("frontier", "context_frontier", "anchor", "remaining", "counts"):
        assert_same_bytes(getattr(state.sequence, name), getattr(session.state.sequence, name))
    assert_same_bytes(state.target.gdn, session.state.target.gdn)


@pytest.mark.parametrize("place", [1, 2, 3, 4, 8])
def test_an_end_at_every_index_cuts_there_and_idles_the_row(scene, plain, place):
    models, params = scene
    greedy = SamplingArrays.greedy(3)
    ends = [(), (plain[1][place],), ()]
    first = plain[1].index(ends[1][0], 1)
    eos = np.array([[-1, -1], [-1, plain[1][place]], [-1, -1]], np.int32)
    session = admitted(models, params, (20, 20, 20), before=poison_with(np.nan, HUGE))
    state, log = decode_rounds(
        models, params, session.poisoned(), session.rows([0, 1, 2]), greedy, eos, rounds=8
    )
    found = text_of(log, 1)
    assert found == plain[1][1 : first + 1] and bool(log.ended[1])
    done = int(np.argmax(np.cumsum(np.asarray(log.committed)[1]) == len(found)))
    assert not np.asarray(log.committed)[1, done + 1 :].any()
    assert not np.asarray(log.licensed)[1, done + 1 :].any()
    for row in (0, 2):
        text = text_of(log, row)
        assert text == plain[row][1 : 1 + len(text)] and len(text) > 8


def test_two_calls_go_on_where_one_stops_and_trace_once(scene):
    models, params = scene
    greedy, traced = SamplingArrays.greedy(3), decode_rounds._cache_size()
    whole = admitted(models, params, budgets=(20, 20, 20))
    rows = whole.rows([0, 1, 2])
    state, log = decode_rounds(models, params, whole.state, rows, greedy, NO_END, rounds=6)
    expected = [text_of(log, row) for row in range(3)]
    halves = admitted(models, params, budgets=(20, 20, 20))
    state, first = decode_rounds(models, params, halves.state, rows, greedy, NO_END, rounds=3)
    state, second = decode_rounds(models, params, state, rows, greedy, NO_END, rounds=3)
    assert [text_of(first, row) + text_of(second, row) for row in range(3)] == expected
    assert decode_rounds._cache_size() == traced + 2


def test_bad_arguments_are_named(scene):
    models, params = scene
    session = admitted(models, params)
    rows, greedy = session.rows([0, 1, 2]), SamplingArrays.greedy(3)
    with pytest.raises(ValueError, match="rounds: expected at least 1, got 0"):
        decode_rounds(models, params, session.state, rows, greedy, NO_END, rounds=0)
    with pytest.raises(ValueError, match=r"eos_ids: expected \[3, E\], got \(2, 2\)"):
        decode_rounds(models, params, session.state, rows, greedy, NO_END[:2], rounds=1)


def test_n_ends_with_the_first_licensed_end():
    outputs = jnp.array([[5, 7, 9, 7], [5, 7, 9, 7], [5, 6, 8, 7], [7, 5, 6, 8]], jnp.int32)
    eos = jnp.array([[7, -1], [9, 7], [7, -1], [7, 7]], jnp.int32)
    count, stopped = first_end(outputs, jnp.array([4, 1, 3, 4], jnp.int32), eos)
    assert count.tolist() == [2, 1, 3, 1]
    assert stopped.tolist() == [True, False, False, True]
