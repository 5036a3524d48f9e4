"""accept at temperature > 0: hand values, the key of every draw, and what must never happen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.sampling.uniform import seed_words
from dflash_jax.state.scratch import RoundExtent, Verification
from dflash_jax.state.sequence import SequenceState
from dflash_jax.steps import accept
from tests.oracles import sampling as oracle
from tests.oracles.uniform import MASK, top_bits
from tests.steps.harness import chain_proposal
from tests.tolerances import assert_same_bits

V, V_PUB, K, C, F = 11, 9, 3, 5, 40


def step(proposal, logits, sequence, sampling, extent, allowed, drafted):
    empty = jnp.zeros((*proposal.tokens.shape, 0), jnp.float32)
    verification = Verification(
        logits=logits, hidden=empty, features=empty, kv_rows=(), gdn_records=()
    )
    return accept(
        proposal, verification, sequence, sampling, extent, public_vocab=V_PUB, drafted=drafted,
        allowed=allowed,
    )


JITTED = jax.jit(step, static_argnames="drafted")


def decide(logits, drafts, candidates, q, requests, **options):
    """accept for logits [B, W, V], drafts [B, K], candidates and q [B, K, C]; NumPy results.

    Options: seeds [B], proposals [B], frontier [B], counts, seen [B, V_PUB], allowed, drafted.
    """
    batch, width = np.shape(logits)[:2]
    proposals = np.asarray(options.get("proposals", [width - 1] * batch), np.int32)
    tokens = np.concatenate([np.zeros((batch, 1), int), drafts], axis=1).astype(np.int32)
    proposal = chain_proposal(jnp.array(tokens)).replace(
        candidates=jnp.array(candidates, jnp.int32), q=jnp.array(q, jnp.float32)
    )
    words = [seed_words(int(seed)) for seed in options.get("seeds", range(batch))]
    sequence = SequenceState.zeros(batch, V_PUB).replace(
        frontier=jnp.array(np.asarray(options.get("frontier", [F] * batch), np.int32)),
        counts=jnp.array(options.get("counts", np.zeros((batch, V_PUB))), jnp.int32),
        prompt_seen=jnp.array(options.get("seen", np.zeros((batch, V_PUB))), bool),
        seed=jnp.array(np.stack(words)),
    )
    extent = RoundExtent(
        proposals=jnp.array(proposals), columns=jnp.array(proposals + 1),
        draft_columns=jnp.array(proposals + 1),
    )
    found = JITTED(
        proposal, jnp.array(logits, jnp.float32), sequence, SamplingArrays.of(requests, V_PUB),
        extent, options.get("allowed"), drafted=options.get("drafted", True),
    )
    return jax.tree.map(np.asarray, found)


def drawn(seed, purpose, position):
    return top_bits(int(seed), position, purpose, 0) * 2.0**-24


def inverse_mix(x):
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        y = x
        for _ in range(64 // shift + 1):
            y = x ^ (y >> shift)
        x = y * pow(factor, -1, 1 << 64) & MASK
    return (x - 0x9E3779B97F4A7C15) & MASK


def seed_for(bits, purpose, position):
    """The seed whose draw at (position, purpose, 0) has these 24 bits."""
    key = inverse_mix((bits << 40) + 12345) ^ (purpose << 21)
    seed = inverse_mix(key) ^ (position * 0xD1B54A32D192ED03 & MASK)
    assert top_bits(seed, position, purpose, 0) == bits
    return seed


def logs(p):
    """Logits [.., V] whose law at temperature 1 is p [.., V_PUB]; reserved rows are huge."""
    with np.errstate(divide="ignore"):
        public = np.log(np.asarray(p, np.float64))
    return np.concatenate([public, np.full((*public.shape[:-1], V - V_PUB), 99.0)], axis=-1)


def law(**masses):
    """A law over the public ids from entries like t3=0.25."""
    p = np.zeros(V_PUB)
    for name, mass in masses.items():
        p[int(name[1:])] = mass
    assert np.isclose(p.sum(), 1)
    return p


def many(p, draft, candidates, q, rows=512, **options):
    """One proposal judged by law p [V_PUB] under many seeds; the column behind has the same law."""
    logits = np.broadcast_to(logs(p), (rows, 2, V))
    return decide(
        logits, np.full((rows, 1), draft), np.broadcast_to(candidates, (rows, 1, len(candidates))),
        np.broadcast_to(q, (rows, 1, len(q))), [SamplingParams(temperature=1.0)] * rows, **options,
    )


@pytest.mark.parametrize(
    "p_of_d, q_of_d",
    [(0.5, 0.5), (0.5, 0.25), (0.25, 0.5), (0.125, 1.0), (0.01, 0.9), (0.9, 1.0), (1.0, 1.0)],
)
def test_c3_accept_probability_is_the_ratio_of_p_and_q(p_of_d, q_of_d):
    p = law(t2=p_of_d, t4=1 - p_of_d)
    found = many(p, 2, [2, 6], [q_of_d, 1 - q_of_d])
    ratio = min(1.0, p_of_d / q_of_d)
    expected = [int(drawn(seed, oracle.ACCEPT, F + 1) < ratio) for seed in range(512)]
    assert found.accepted.tolist() == expected
    assert abs(np.mean(expected) - ratio) < 0.06


@pytest.mark.parametrize("offset, passes", [(-2, True), (1, False)])
def test_c3_the_draw_beside_the_ratio_decides(offset, passes):
    # p / q = 0.25 / 0.5, whose 24 bits are 2^23.
    seed = seed_for((1 << 23) + offset, oracle.ACCEPT, F + 1)
    found = many(law(t2=0.25, t4=0.75), 2, [2, 6], [0.5, 0.5], rows=1, seeds=[seed])
    assert found.accepted.tolist() == [int(passes)]


def test_the_correction_comes_from_the_normalised_residual():
    p = law(t1=0.2, t2=0.1, t4=0.4, t8=0.3)
    # max(p - q, 0): 0.1 for 1, nothing for 2 and 4, all 0.3 for 8, which is no candidate.
    found = many(p, 2, [1, 2, 4], [0.1, 0.5, 0.4])
    rejected = found.accepted == 0
    tokens = found.outputs[rejected, 0]
    u = [drawn(seed, oracle.CORRECTION, F + 1) for seed in np.flatnonzero(rejected)]
    assert tokens.tolist() == [1 if x < 0.25 else 8 for x in u]
    assert 300 < rejected.sum() < 480
    assert (found.outputs[~rejected, 0] == 2).all()


def test_a_point_mass_is_removed_from_p():
    p = law(t1=0.3, t2=0.4, t4=0.3)
    found = many(p, 2, [2], [1.0])
    for seed in range(512):
        if drawn(seed, oracle.ACCEPT, F + 1) < 0.4:
            assert found.outputs[seed, 0] == 2
        else:
            half = drawn(seed, oracle.CORRECTION, F + 1) < 0.5
            assert found.outputs[seed].tolist() == [1 if half else 4, 0]


def random_scene(rng, batch, point_mass):
    """Logits, drafts drawn from q, candidates and q of a batch of independent rows."""
    logits = rng.normal(scale=1.5, size=(batch, K + 1, V)).astype(np.float32)
    logits[..., V_PUB:] = 50.0
    if point_mass:
        candidates = np.argmax(logits[:, :K, :V_PUB], axis=-1)[..., None]
        return logits, candidates[..., 0], candidates, np.ones((batch, K, 1))
    # Some candidates are reserved ids, which the target never allows.
    candidates = rng.permuted(np.broadcast_to(np.arange(V), (batch, K, V)), axis=2)[..., :C]
    scores = np.take_along_axis(np.minimum(logits[:, :K], 2.0), candidates, axis=-1)
    scores += rng.normal(scale=0.7, size=scores.shape)
    q = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    ranks = np.array([rng.choice(C, p=row / row.sum()) for row in q.reshape(-1, C)])
    drafts = np.take_along_axis(candidates, ranks.reshape(batch, K, 1), axis=-1)[..., 0]
    return logits, drafts, candidates, q.astype(np.float32)


REQUESTS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=3, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=0.9, presence_penalty=1.5, frequency_penalty=0.4),
    SamplingParams(temperature=1.2, repetition_penalty=1.6, logit_bias={3: 1.0, 5: -2.0}),
    SamplingParams(temperature=1.0, allowed_ids=(0, 2, 3, 7)),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, presence_penalty=2.0, allowed_ids=(1, 2, 6, 8)),
)


def replayed(logits, drafts, candidates, q, request, seed, proposals, frontier, counts, seen, mask):
    """(A, terminal) of one row, with every uniform computed on the host from its key."""
    controls = oracle.Controls.of(request)
    columns = [
        oracle.adjusted(
            logits[j, :V_PUB], controls, counts, seen, drafts[:j], None if mask is None else mask[j]
        )
        for j in range(proposals + 1)
    ]
    if request.temperature == 0:
        best = [int(np.argmax(column)) for column in columns]
        wrong = [j for j in range(proposals) if best[j] != drafts[j]]
        accepted = wrong[0] if wrong else proposals
        return accepted, best[accepted]
    laws = [np.zeros(V) for _ in columns]
    for padded, column in zip(laws, columns, strict=True):
        padded[:V_PUB] = oracle.target_distribution(column, controls)
    retained = [
        dict(zip(ids.tolist(), mass.tolist(), strict=True))
        for ids, mass in zip(candidates[:proposals], q[:proposals], strict=True)
    ]
    return oracle.accept_chain(
        laws, drafts[:proposals].tolist(), retained,
        lambda purpose, offset: drawn(seed, purpose, frontier + offset),
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("point_mass", [False, True])
def test_c5_whole_rounds_equal_the_oracle_on_replayed_keys(point_mass, masked):
    rng = np.random.default_rng([point_mass, masked])
    batch = 45 * len(REQUESTS)
    requests = [REQUESTS[row % len(REQUESTS)] for row in range(batch)]
    logits, drafts, candidates, q = random_scene(rng, batch, point_mass)
    seeds = rng.integers(0, 1 << 64, batch, dtype=np.uint64)
    proposals, frontier = rng.integers(0, K + 1, batch), rng.integers(0, 1 << 18, batch)
    proposals[rng.random(batch) < 0.6] = K
    counts = rng.integers(0, 3, (batch, V_PUB)) * (rng.random((batch, V_PUB)) < 0.3)
    seen, mask = rng.random((batch, V_PUB)) < 0.3, None
    if masked:
        mask = rng.random((batch, K + 1, V_PUB)) < 0.7
        mask[:, :, [2]] = True
    found = decide(
        logits, drafts, candidates, q, requests, seeds=seeds, proposals=proposals,
        frontier=frontier, counts=counts, seen=seen, allowed=mask,
    )
    expected = [
        replayed(
            logits[row], drafts[row], candidates[row], q[row], requests[row], seeds[row],
            int(proposals[row]), int(frontier[row]), counts[row], seen[row],
            None if mask is None else mask[row],
        )
        for row in range(batch)
    ]
    accepted = np.array([a for a, _ in expected])
    assert found.accepted.tolist() == accepted.tolist()
    assert (found.licensed == accepted + 1).all() and not found.fault.any()
    terminal = np.take_along_axis(found.outputs, accepted[:, None], axis=1)[:, 0]
    assert terminal.tolist() == [token for _, token in expected]
    for row in range(batch):
        assert found.outputs[row, : accepted[row]].tolist() == drafts[row, : accepted[row]].tolist()
        assert not found.outputs[row, accepted[row] + 1 :].any()
    # The scene reaches every outcome.
    assert set(accepted.tolist()) == set(range(K + 1))


def test_without_a_draft_the_draw_has_the_key_of_ordinary_decoding():
    p = law(t1=0.3, t2=0.4, t4=0.3)
    rows = 64
    found = decide(
        np.broadcast_to(logs(p), (rows, 1, V)), np.zeros((rows, 0)), np.zeros((rows, 0, 1)),
        np.zeros((rows, 0, 1)), [SamplingParams(temperature=1.0)] * rows, drafted=False,
    )
    expected = [oracle.inverse_cdf(p, drawn(seed, oracle.DECODE, F)) for seed in range(rows)]
    assert found.outputs[:, 0].tolist() == expected and (found.licensed == 1).all()


def test_without_verified_proposals_the_bonus_comes_from_the_first_column():
    p = law(t1=0.3, t2=0.4, t4=0.3)
    found = many(p, 1, [1], [1.0], rows=64, proposals=[0] * 64)
    expected = [oracle.inverse_cdf(p, drawn(seed, oracle.BONUS, F + 1)) for seed in range(64)]
    assert found.outputs[:, 0].tolist() == expected and not found.accepted.any()


def test_c7_an_empty_residual_emits_the_best_candidate():
    p = law(t1=0.3, t2=0.2, t4=0.5)
    # q is p, but claims that d was twice as likely: half of the rows reject with nothing left.
    found = many(p, 2, [1, 2, 4], [0.3, 0.4, 0.5], rows=64)
    rejected = found.accepted == 0
    assert 10 < rejected.sum() < 54
    assert (found.outputs[rejected, 0] == 4).all() and not found.fault.any()


def test_c7_equal_laws_accept_everything_or_stay_finite():
    rng = np.random.default_rng(6)
    logits, drafts, candidates, _ = random_scene(rng, 200, point_mass=False)
    candidates = np.broadcast_to(np.arange(V_PUB), (200, K, V_PUB))
    drafts = np.minimum(drafts, V_PUB - 1)
    weights = np.exp(logits[:, :K, :V_PUB] - logits[:, :K, :V_PUB].max(-1, keepdims=True))
    q = weights / weights.sum(-1, keepdims=True)
    last = (1 << 24) - 1
    seeds = [seed_for(last, oracle.ACCEPT, F + 1)] * 200
    for factor in (1.0, 1.0 + 1e-6, 1.01):
        found = decide(
            logits, drafts, candidates, q * np.float32(factor),
            [SamplingParams(temperature=1.0)] * 200, seeds=seeds,
        )
        assert not found.fault.any()
        terminal = np.take_along_axis(found.outputs, found.accepted[:, None], axis=1)
        assert (terminal < V_PUB).all()
        if factor > 1.001:
            best = np.argmax(logits[:, 0, :V_PUB], axis=-1)
            assert not found.accepted.any() and np.array_equal(found.outputs[:, 0], best)


@pytest.mark.parametrize("q_of_d", [1.0, 0.5, 1e-30, 0.0])
def test_c8_probability_zero_is_never_accepted_even_at_u_0(q_of_d):
    seed = seed_for(0, oracle.ACCEPT, F + 1)
    p = law(t1=0.5, t4=0.5)
    for draft in (2, V_PUB):  # forbidden by its logit, and a reserved id
        found = many(p, draft, [draft, 4], [q_of_d, 1 - q_of_d], rows=1, seeds=[seed])
        assert found.accepted.tolist() == [0] and found.outputs[0, 0] in (1, 4)
    # At u = 0 anything else passes.
    found = many(law(t1=1e-6, t4=1 - 1e-6), 1, [1, 4], [1.0, 0.0], rows=1, seeds=[seed])
    assert found.accepted.tolist() == [1]


@pytest.mark.parametrize("purpose", [oracle.CORRECTION, oracle.BONUS])
def test_c8_the_ends_of_the_unit_interval_draw_what_has_mass(purpose):
    p = law(t2=0.25, t3=0.5, t6=0.25)
    proposals = [1 if purpose == oracle.CORRECTION else 0]
    for bits, token in ((0, 2), ((1 << 24) - 1, 6)):
        seed = seed_for(bits, purpose, F + 1)
        found = many(p, 8, [8], [1.0], rows=1, seeds=[seed], proposals=proposals)
        assert found.accepted.tolist() == [0] and found.outputs[0, 0] == token


def test_c10_a_column_s_mask_rejects_an_illegal_draft_and_binds_the_correction():
    p = law(t1=0.2, t2=0.6, t4=0.2)
    mask = np.ones((64, 2, V_PUB), bool)
    mask[:, 0, 2] = False
    found = many(p, 2, [2], [1.0], rows=64, allowed=mask)
    assert not found.accepted.any() and set(found.outputs[:, 0]) == {1, 4}
    mask[:, 0] = False
    assert many(p, 2, [2], [1.0], rows=64, allowed=mask).fault.all()


def mixed_scene(batch=8):
    rng = np.random.default_rng(17)
    requests = [REQUESTS[row % len(REQUESTS)] for row in range(batch)]
    seeds = rng.integers(0, 1 << 64, batch, dtype=np.uint64)
    return list(random_scene(rng, batch, point_mass=False)), requests, seeds


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_end_their_row_and_change_no_other(value):
    arrays, requests, seeds = mixed_scene()
    clean = decide(*arrays, requests, seeds=seeds)
    for row in range(8):
        logits = arrays[0].copy()
        logits[row, 0, slice(None) if value == -np.inf else 4] = value
        found = decide(logits, *arrays[1:], requests, seeds=seeds)
        others = np.arange(8) != row
        if 4 in (requests[row].allowed_ids or (4,)) or np.isneginf(value):
            assert found.fault.tolist() == (~others).tolist()
        jax.tree.map(lambda a, b, k=others: assert_same_bits(a[k], b[k]), found, clean)


def test_c11_a_row_does_not_depend_on_its_place_the_batch_or_the_p_of_others():
    arrays, requests, seeds = mixed_scene()
    rng = np.random.default_rng(3)
    together = decide(*arrays, requests, seeds=seeds)
    order = rng.permutation(8)
    for rows in (order, order[:1], np.concatenate([order, order])):
        proposals = rng.integers(0, K + 1, len(rows))
        proposals[0] = K
        found = decide(
            *[array[rows] for array in arrays], [requests[row] for row in rows], seeds=seeds[rows],
            proposals=proposals,
        )
        assert found.outputs[0].tolist() == together.outputs[rows[0]].tolist()
        assert found.accepted[0] == together.accepted[rows[0]]


def test_greedy_and_sampled_rows_share_one_program():
    arrays, requests, seeds = mixed_scene()
    warm, cold = SamplingParams(temperature=1.0), SamplingParams()
    decide(*arrays, requests, seeds=seeds)
    before = JITTED._cache_size()
    results = [
        decide(*arrays, mix, seeds=seeds)
        for mix in ([cold] * 8, [warm] * 8, [cold] * 4 + [warm] * 4, requests[::-1])
    ]
    assert JITTED._cache_size() == before
    for half, source in ((slice(0, 4), results[0]), (slice(4, 8), results[1])):
        assert_same_bits(results[2].outputs[half], source.outputs[half])
