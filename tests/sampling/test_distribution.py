"""Processed distributions against the float64 oracle with a plain sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.distribution import adjusted_logits, target_distribution
from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from tests.oracles import sampling as oracle
from tests.tolerances import FP32, assert_close, assert_same_bits

V, V_PUB, K = 29, 26, 4
# One row each, judged in one call.
REQUESTS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5, top_k=3),
    SamplingParams(temperature=1.7, top_k=1),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(temperature=1.3, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=3, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=2.5, top_k=12, top_p=0.6, min_p=0.3),
    SamplingParams(temperature=1.0, presence_penalty=1.5, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, repetition_penalty=1.4),
    SamplingParams(temperature=0.7, repetition_penalty=0.8, presence_penalty=-0.6, top_p=0.9),
    SamplingParams(temperature=1.0, logit_bias={0: 3.0, 25: -9.0, 7: 0.4}, repetition_penalty=2.0),
    SamplingParams(temperature=1.0, allowed_ids=(1, 4, 9, 25), top_k=2),
    SamplingParams(temperature=0.6, top_k=V_PUB, top_p=1.0),
    SamplingParams(temperature=1e-3),
)
B = len(REQUESTS)


@pytest.fixture(scope="module")
def scene():
    """Logits [B, W, V] with huge reserved rows, counts, prompt ids, and drafts that repeat."""
    rng = np.random.default_rng(4)
    logits = rng.normal(scale=2, size=(B, K + 1, V)).astype(np.float32)
    logits[..., V_PUB:] = 1e4
    logits[:, :, 3] = 0.0
    counts = rng.integers(0, 3, (B, V_PUB)) * (rng.random((B, V_PUB)) < 0.4)
    seen = rng.random((B, V_PUB)) < 0.3
    drafts = rng.integers(0, V_PUB, (B, K))
    drafts[:, 2] = drafts[:, 0]
    drafts[:, 3] = np.argmax(logits[:, 0, :V_PUB], axis=1)
    return logits, counts.astype(np.int32), seen, drafts.astype(np.int32)


def ours(scene, requests=REQUESTS, allowed=None, max_candidates=0):
    """(adjusted, p) of every row and column."""
    sampling = SamplingArrays.of(requests, V_PUB)
    adjusted = jax.jit(adjusted_logits)(scene[0], sampling, *scene[1:], allowed)
    law = jax.jit(target_distribution, static_argnums=2)(adjusted, sampling, max_candidates)
    return np.asarray(adjusted), np.asarray(law.weights / law.total[..., None]), law


def expected(scene, requests=REQUESTS, allowed=None, max_candidates=0):
    logits, counts, seen, drafts = scene
    adjusted, p = np.zeros((2, B, K + 1, V_PUB))
    for row, column in np.ndindex(B, K + 1):
        controls = oracle.Controls.of(requests[row])
        mask = None if allowed is None else allowed[row, column]
        adjusted[row, column] = oracle.adjusted(
            logits[row, column, :V_PUB], controls, counts[row], seen[row],
            drafts[row, :column], mask,
        )
        p[row, column] = oracle.target_distribution(adjusted[row, column], controls, max_candidates)
    return adjusted, p


def assert_same_law(actual, wanted):
    assert np.array_equal(actual > 0, wanted > 1e-40), "the supports differ"
    assert_close(actual, wanted, FP32)


def test_adjusted_logits_equal_the_oracle_in_every_column(scene):
    adjusted, _ = expected(scene)
    found, _, _ = ours(scene)
    forbidden = np.isneginf(adjusted)
    assert np.array_equal(np.isneginf(found), forbidden)
    assert_close(np.where(forbidden, 0, found), np.where(forbidden, 0, adjusted), FP32)


@pytest.mark.parametrize("row", range(B))
def test_laws_equal_the_oracle(scene, row):
    found, wanted = ours(scene)[1][row], expected(scene)[1][row]
    if REQUESTS[row].temperature < 0.01:
        assert np.array_equal(found.argmax(-1), wanted.argmax(-1))
        return
    assert_same_law(found, wanted)


def test_the_best_candidate_weighs_one_and_ids_give_their_probability(scene):
    _, p, law = ours(scene)
    assert (np.asarray(law.weights).max(-1) == 1).all()
    ids = jnp.asarray(scene[3])
    probability = jax.tree.map(lambda x: x[:, :-1], law).probability(ids)
    wanted = np.take_along_axis(p[:, :-1], np.asarray(ids)[..., None], axis=-1)[..., 0]
    assert_close(probability, wanted, FP32)


@pytest.mark.parametrize("cap", [1, 5, 20])
def test_the_candidate_cap_of_the_reference_engine(scene, cap):
    _, found, _ = ours(scene, max_candidates=cap)
    _, wanted = expected(scene, max_candidates=cap)
    warm = [row for row in range(B) if REQUESTS[row].temperature > 0.01]
    assert_same_law(found[warm], wanted[warm])
    assert ((found > 0).sum(-1) <= cap).all()


def test_c10_a_mask_per_column_joins_the_request_s_own(scene):
    rng = np.random.default_rng(8)
    allowed = rng.random((B, K + 1, V_PUB)) < 0.5
    allowed[:, :, [4, 9]] = True
    _, found, _ = ours(scene, allowed=jnp.asarray(allowed))
    _, wanted = expected(scene, allowed=allowed)
    warm = [row for row in range(B) if REQUESTS[row].temperature > 0.01]
    assert_same_law(found[warm], wanted[warm])
    assert not found[~allowed].any()


def test_c6_columns_equal_sequential_decoding_bit_for_bit(scene):
    logits, counts, seen, drafts = scene
    blockwise, _, _ = ours(scene)
    told, none = counts.copy(), np.zeros((B, 0), np.int32)
    for column in range(K + 1):
        alone, _, _ = ours((logits[:, column : column + 1], told, seen, none))
        assert_same_bits(blockwise[:, column], alone[:, 0])
        if column < K:
            np.add.at(told, (np.arange(B), drafts[:, column]), 1)


def test_c6_presence_counts_each_accepted_id_once():
    request = SamplingParams(temperature=1.0, presence_penalty=1.5)
    logits = np.zeros((1, 4, V), np.float32)
    drafts = np.array([[5, 5, 2]], np.int32)
    sampling = SamplingArrays.of([request], V_PUB)
    counts, seen = np.zeros((1, V_PUB), np.int32), np.ones((1, V_PUB), bool)
    counts[0, 7] = 3
    found = np.asarray(adjusted_logits(logits, sampling, counts, seen, drafts))
    touched = [{int(v) for v in np.flatnonzero(found[0, column])} for column in range(4)]
    assert touched == [{7}, {5, 7}, {5, 7}, {2, 5, 7}]
    assert set(found[found != 0].tolist()) == {-1.5}


def test_c3_filters_in_their_order_on_hand_values():
    weights = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    logits = np.log(weights).astype(np.float32)[None, None]

    def support(**fields):
        sampling = SamplingArrays.of([SamplingParams(temperature=1.0, **fields)], 5)
        return np.flatnonzero(np.asarray(target_distribution(logits, sampling).weights)).tolist()

    assert support() == [0, 1, 2, 3, 4]
    assert support(top_k=2) == [0, 1]
    assert support(top_p=0.69) == [0, 1]
    assert support(top_p=0.71) == [0, 1, 2]
    # 0.06 / 0.4 = 0.15 and 0.04 / 0.4 = 0.1.
    assert support(min_p=0.14) == [0, 1, 2, 3]
    assert support(min_p=0.16) == [0, 1, 2]
    # The share is of what top-k keeps, 0.7: 0.4 / 0.7 = 0.571.
    assert support(top_k=2, top_p=0.57) == [0]
    assert support(top_k=2, top_p=0.58) == [0, 1]
    # The share counts what min-p cuts: of 0.9 alone, 0.77 would be reached by two.
    assert support(min_p=0.4, top_p=0.77) == [0, 1, 2]
    assert support(min_p=0.4, top_p=0.95) == [0, 1, 2]


def test_ties_at_a_cut_keep_the_lower_ids():
    logits = np.array([[[1.0, -0.0, 2.0, 0.0, 1.0, 1.0]]], np.float32)
    for kept, ids in {2: [0, 2], 3: [0, 2, 4], 5: [0, 1, 2, 4, 5]}.items():
        sampling = SamplingArrays.of([SamplingParams(temperature=1.0, top_k=kept)], 6)
        law = target_distribution(logits, sampling)
        assert np.flatnonzero(np.asarray(law.weights)).tolist() == ids


@pytest.mark.parametrize("top_p", [1e-6, 1e-38, 1e-44, 1e-60])
def test_at_least_one_candidate_stays(top_p):
    logits = np.array([[[0.5, 2.0, 1.0, 2.0]]], np.float32)
    sampling = SamplingArrays.of([SamplingParams(temperature=1.0, top_p=top_p, min_p=0.999)], 4)
    law = target_distribution(logits, sampling)
    assert np.asarray(law.weights).tolist() == [[[0, 1, 0, 0]]]


def test_penalties_apply_before_the_repetition_sign_is_lost_and_bias_before_both():
    logits = np.array([[[1.0, -1.0, 0.0, 1.0]]], np.float32)
    request = SamplingParams(
        temperature=1.0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5,
        logit_bias={1: 3.0, 2: -2.0},
    )
    counts, seen = np.array([[2, 0, 1, 0]], np.int32), np.array([[0, 1, 0, 0]], bool)
    found = adjusted_logits(
        logits, SamplingArrays.of([request], 4), counts, seen, np.zeros((1, 0), np.int32)
    )
    assert np.asarray(found).tolist() == [[[0.5 - 0.25 - 1.0, 1.0, -4.0 - 0.25 - 0.5, 1.0]]]


def test_a_row_does_not_depend_on_the_filters_of_others(scene):
    _, together, law = ours(scene)
    for row in (0, 3, 8):
        one = tuple(part[row : row + 1] for part in scene)
        _, _, alone = ours(one, REQUESTS[row : row + 1])
        assert_same_bits(law.weights[row], alone.weights[0])
        assert_same_bits(law.total[row], alone.total[0])


def test_a_large_vocabulary_and_low_precision_logits():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(scale=3, size=(2, 1, 5000)), jnp.bfloat16)
    requests = (
        SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(temperature=0.8, top_k=50)
    )
    sampling = SamplingArrays.of(requests, 5000)
    counts, seen = np.zeros((2, 5000), np.int32), np.zeros((2, 5000), bool)
    none = np.zeros((2, 0), np.int32)
    law = target_distribution(adjusted_logits(logits, sampling, counts, seen, none), sampling)
    p = np.asarray(law.weights / law.total[..., None])
    for row, request in enumerate(requests):
        values = np.asarray(logits[row, 0]).astype(np.float64)
        assert_same_law(p[row, 0], oracle.target_distribution(values, oracle.Controls.of(request)))
