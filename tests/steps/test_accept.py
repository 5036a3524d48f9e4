"""accept on hand-made logits: the longest agreeing prefix, the correction, and the bonus."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.scratch import RoundExtent, Verification
from dflash_jax.state.sequence import SequenceState
from dflash_jax.steps import accept
from tests.steps.harness import chain_proposal

V, V_PUB, K = 9, 7, 3


def decide(tokens, logits, proposals, columns=None):
    """accept for rows of tokens [B, K + 1] and logits [B, K + 1, V] with P per row."""
    proposals = np.asarray(proposals, np.int32)
    columns = proposals + 1 if columns is None else np.asarray(columns, np.int32)
    batch = len(tokens)
    empty = jnp.zeros((batch, K + 1, 0), jnp.float32)
    verification = Verification(
        logits=jnp.array(np.asarray(logits, np.float32)), hidden=empty, features=empty,
        kv_rows=(), gdn_records=(),
    )
    extent = RoundExtent(
        proposals=jnp.array(proposals), columns=jnp.array(columns),
        draft_columns=jnp.array(columns),
    )
    return accept(
        chain_proposal(jnp.array(np.asarray(tokens, np.int32))), verification,
        SequenceState.zeros(batch, V_PUB), SamplingArrays.greedy(batch), extent,
        public_vocab=V_PUB,
    )


def peaks(choices):
    """Logits [len, V] whose largest public entries are `choices`."""
    return np.eye(V)[choices]


@pytest.mark.parametrize("wrong", [1, 2, 3, None])
def test_prefix_before_the_first_wrong_proposal_is_accepted(wrong):
    choices = [4, 2, 6, 1]
    tokens = [0, 4, 2, 6]
    if wrong is not None:
        tokens[wrong] = 5
    found = decide([tokens], [peaks(choices)], [K])
    accepted = K if wrong is None else wrong - 1
    assert found.accepted.tolist() == [accepted]
    assert found.licensed.tolist() == [accepted + 1]
    outputs = choices[: accepted + 1] + [0] * (K - accepted)
    assert found.outputs.tolist() == [outputs]
    assert found.path.tolist()[0][: accepted + 1] == list(range(accepted + 1))
    assert not found.fault.any()


def test_agreement_after_a_wrong_proposal_does_not_count():
    found = decide([[0, 5, 2, 6]], [peaks([4, 2, 6, 1])], [K])
    assert found.outputs.tolist() == [[4, 0, 0, 0]]


@pytest.mark.parametrize("proposals", range(K + 1))
def test_at_most_p_proposals_are_accepted(proposals):
    found = decide([[0, 4, 2, 6]], [peaks([4, 2, 6, 1])], [proposals])
    assert found.accepted.tolist() == [proposals]
    assert found.outputs.tolist()[0][: proposals + 1] == [4, 2, 6, 1][: proposals + 1]
    assert found.outputs.tolist()[0][proposals + 1 :] == [0] * (K - proposals)


def test_rows_are_judged_apart():
    tokens = [[0, 4, 2, 6], [0, 1, 1, 1], [0, 4, 2, 0]]
    found = decide(tokens, [peaks([4, 2, 6, 1])] * 3, [3, 3, 1])
    assert found.accepted.tolist() == [3, 0, 1]


def test_an_idle_row_licenses_nothing():
    found = decide([[0, 4, 2, 6]] * 2, [peaks([4, 2, 6, 1])] * 2, [0, 3], columns=[0, 4])
    assert found.licensed.tolist() == [0, 4]
    assert found.outputs[0].tolist() == [0] * 4


def test_b5_the_largest_logit_of_a_reserved_row_is_never_emitted():
    logits = peaks([4, 2, 6, 1])
    logits[:, V_PUB:] = 100.0
    found = decide([[0, 4, V_PUB, 6]], [logits], [K])
    assert found.outputs.tolist() == [[4, 2, 0, 0]]


def test_equal_logits_choose_the_lowest_id():
    logits = np.zeros((K + 1, V))
    logits[0, [2, 5]] = 1.0
    logits[1, [0, 3]] = -0.0, 0.0
    found = decide([[0, 2, 3, 0]], [logits], [K])
    assert found.outputs.tolist() == [[2, 0, 0, 0]]


@pytest.mark.parametrize("column", range(K + 1))
def test_a_nan_is_a_fault_only_on_the_path(column):
    logits = peaks([4, 2, 6, 1])
    logits[column, 3] = np.nan
    found = decide([[0, 4, 5, 6]] * 2, [logits, peaks([4, 2, 6, 1])], [K, K])
    assert found.fault.tolist() == [column <= 1, False]


def test_no_finite_candidate_is_a_fault_and_nan_beyond_q_is_not():
    dead, beyond = np.full((K + 1, V), -np.inf), peaks([4, 2, 6, 1])
    beyond[2:] = np.nan
    found = decide([[0, 4, 2, 6]] * 2, [dead, beyond], [K, 1])
    assert found.fault.tolist() == [True, False]
