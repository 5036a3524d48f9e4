"""accept_tree: a chain gives what accept gives, and whole rounds equal the plain walk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.sampling.uniform import seed_words
from dflash_jax.state.scratch import Proposal, RoundExtent, Verification
from dflash_jax.state.sequence import SequenceState
from dflash_jax.steps import accept, accept_tree
from tests.oracles import sampling as oracle
from tests.oracles import tree as tree_oracle
from tests.steps.harness import assert_same_bytes, chain_proposal

V, V_PUB, K, C, NODES, PATHS = 11, 9, 3, 5, 9, 8
BATCH = 210
NEAR = 1e-5
REQUESTS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=4, min_p=0.05),
    SamplingParams(temperature=0.9, presence_penalty=1.5, frequency_penalty=0.4),
    SamplingParams(temperature=1.2, repetition_penalty=1.6, logit_bias={3: 1.0}),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, presence_penalty=2.0),
)


def step(proposal, logits, sequence, sampling, extent, allowed, tree):
    empty = jnp.zeros((*proposal.tokens.shape, 0), jnp.float32)
    verification = Verification(
        logits=logits, hidden=empty, features=empty, kv_rows=(), gdn_records=()
    )
    rule, options = (accept_tree, {"paths": PATHS}) if tree else (accept, {})
    return rule(
        proposal, verification, sequence, sampling, extent, public_vocab=V_PUB, allowed=allowed,
        **options,
    )


JITTED = jax.jit(step, static_argnames="tree")


def numbers(seeds, frontier, counts, seen):
    """`SequenceState` of rows, and the same as host arrays."""
    return SequenceState.zeros(len(seeds), V_PUB).replace(
        frontier=jnp.array(frontier, jnp.int32),
        counts=jnp.array(counts, jnp.int32),
        prompt_seen=jnp.array(seen, bool),
        seed=jnp.array(np.stack([seed_words(int(seed)) for seed in seeds])),
    )


def extents(proposals, columns):
    columns = jnp.array(columns, jnp.int32)
    return RoundExtent(
        proposals=jnp.array(proposals, jnp.int32), columns=columns, draft_columns=columns
    )


def random_scene(seed, batch):
    """Logits of all columns, a tree, laws, and everything a row needs, as host arrays.

    Trees are random with siblings drawn without replacement from the law of their parent.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=1.2, size=(batch, NODES, V)).astype(np.float32)
    logits[..., V_PUB:] = 50.0
    candidates = rng.permuted(np.broadcast_to(np.arange(V), (batch, K, V)), axis=2)[..., :C]
    parent = np.zeros((batch, NODES), np.int32)
    depth, tokens = np.zeros_like(parent), np.zeros_like(parent)
    q = np.zeros((batch, NODES - 1, C), np.float32)
    live = rng.integers(1, NODES + 1, batch)
    for row in range(batch):
        laws = {}
        for column in range(1, NODES):
            if column >= live[row]:
                parent[row, column] = column
                continue
            children = [0] * column
            for other in range(1, column):
                children[parent[row, other]] += 1
            open_ = [v for v in range(column) if depth[row, v] < K and children[v] < 4]
            v = open_[-1] if column <= K else rng.choice(open_)
            ids = candidates[row, depth[row, v]]
            if v not in laws:
                scores = np.minimum(logits[row, v], 2.0)[ids] + rng.normal(scale=0.7, size=C)
                laws[v] = np.exp(scores) / np.exp(scores).sum()
            taken = [tokens[row, c] for c in range(1, column) if parent[row, c] == v]
            left = np.where(np.isin(ids, taken), 0.0, laws[v])
            parent[row, column], depth[row, column] = v, depth[row, v] + 1
            tokens[row, column] = rng.choice(ids, p=left / left.sum())
            q[row, column - 1] = laws[v]
    return {
        "logits": logits, "candidates": candidates, "parent": parent, "depth": depth,
        "tokens": tokens, "q": q, "live": live,
        "seeds": rng.integers(0, 1 << 64, batch, dtype=np.uint64),
        "frontier": rng.integers(0, 1 << 18, batch),
        "counts": rng.integers(0, 3, (batch, V_PUB)) * (rng.random((batch, V_PUB)) < 0.3),
        "seen": rng.random((batch, V_PUB)) < 0.3,
        "requests": [REQUESTS[row % len(REQUESTS)] for row in range(batch)],
    }


def decide(scene, columns=None, tree=True, allowed=None):
    """The rule on a scene, as NumPy arrays; Q is W_t unless `columns` says otherwise."""
    names = ("tokens", "parent", "depth", "candidates", "q")
    proposal = Proposal(**{name: jnp.array(scene[name]) for name in names})
    batch = len(scene["live"])
    columns = np.full(batch, scene["tokens"].shape[1]) if columns is None else columns
    sequence = numbers(scene["seeds"], scene["frontier"], scene["counts"], scene["seen"])
    sampling = SamplingArrays.of(scene["requests"], V_PUB)
    found = JITTED(
        proposal, jnp.array(scene["logits"]), sequence, sampling,
        extents(np.minimum(columns - 1, K), columns), allowed, tree=tree,
    )
    return jax.tree.map(np.asarray, found)


def replayed(scene, row, decisions, allowed=None):
    """(path, terminal) of one row from the plain walk."""
    live, parent, tokens = scene["live"][row], scene["parent"][row], scene["tokens"][row]
    request = scene["requests"][row]
    controls = oracle.Controls.of(request)
    columns = []
    for column in range(live):
        drafts, v = [], column
        while v:
            drafts.append(tokens[v])
            v = parent[v]
        columns.append(oracle.adjusted(
            scene["logits"][row, column, :V_PUB], controls, scene["counts"][row],
            scene["seen"][row], drafts, None if allowed is None else allowed[row, column],
        ))
    retained, laws, choices = [{} for _ in columns], None, None
    for column in range(1, live):
        ids = scene["candidates"][row, scene["depth"][row, column] - 1]
        law = scene["q"][row, column - 1].astype(np.float64)
        retained[parent[column]] = dict(zip(ids.tolist(), law.tolist(), strict=True))
    if request.temperature == 0:
        choices = [int(np.argmax(column)) for column in columns]
    else:
        laws = [oracle.target_distribution(column, controls) for column in columns]
    path, terminal, _ = tree_oracle.accept(
        parent[:live].tolist(), tokens[:live].tolist(), choices, laws, retained,
        int(scene["seeds"][row]), int(scene["frontier"][row]), decisions,
    )
    return path, terminal


@pytest.mark.parametrize("masked", [False, True])
def test_whole_rounds_equal_the_plain_walk_on_replayed_keys(masked):
    batch, lengths, late = BATCH, set(), 0
    scene = random_scene(int(masked), batch)
    allowed = None
    if masked:
        allowed = np.random.default_rng(5).random((batch, NODES, V_PUB)) < 0.8
        allowed[..., 2] = True
    found = decide(scene, allowed=allowed)
    compared = 0
    for row in range(batch):
        decisions = [1.0]
        path, terminal = replayed(scene, row, decisions, allowed)
        if min(decisions) < NEAR:
            continue
        compared += 1
        accepted = len(path) - 1
        drafts = scene["tokens"][row, path[1:]].tolist()
        assert found.accepted[row] == accepted, row
        assert found.licensed[row] == accepted + 1
        assert found.path[row, : accepted + 1].tolist() == path
        assert found.outputs[row].tolist() == drafts + [terminal] + [0] * (K - accepted), row
        lengths.add(accepted)
        late += any(column > K for column in path)
    assert compared > 0.95 * batch and not found.fault.any()
    assert lengths == set(range(K + 1)) and late > 5


def test_chains_are_judged_bit_for_bit_as_accept_judges_them():
    """The same columns in the wider frame; also where q of a draft is 0, or far too large."""
    rng = np.random.default_rng(4)
    batch = BATCH
    scene = random_scene(3, batch)
    width = K + 1
    proposals = rng.integers(0, K + 1, batch)
    q = np.exp(rng.normal(scale=1.5, size=(batch, NODES - 1, C))).astype(np.float32)
    q /= q.sum(-1, keepdims=True)
    q[::7] *= 3.0
    q[3::7, :, 0] = 0.0
    place = rng.integers(0, C, (batch, K, 1))
    place[3::7] = 0
    drafts = np.take_along_axis(scene["candidates"], place, axis=2)[..., 0]
    tokens = np.concatenate([np.zeros((batch, 1), int), drafts], axis=1).astype(np.int32)
    narrow = chain_proposal(tokens)
    chain = {
        **scene, "tokens": tokens, "q": q[:, :K], "logits": scene["logits"][:, :width],
        "parent": np.array(narrow.parent), "depth": np.array(narrow.depth),
    }
    expected = decide(chain, columns=proposals + 1, tree=False)
    assert set(expected.accepted.tolist()) == set(range(K + 1))
    assert_same_bytes(without_path(decide(chain, columns=proposals + 1)), without_path(expected))

    side = NODES - width
    spare = np.broadcast_to(np.arange(width, NODES, dtype=np.int32), (batch, side))
    wide = {
        **chain, "logits": scene["logits"], "q": q,
        "tokens": np.pad(tokens, ((0, 0), (0, side))),
        "parent": np.concatenate([chain["parent"], spare], axis=1),
        "depth": np.pad(chain["depth"], ((0, 0), (0, side))),
    }
    found = decide(wide, columns=proposals + 1)
    assert_same_bytes(without_path(found), without_path(expected))
    taken = np.arange(width) <= found.accepted[:, None]
    assert (found.path[taken] == np.broadcast_to(np.arange(width), taken.shape)[taken]).all()
    # A tree without side columns: every chain column lives, W_t is allowed, K + 1 exist.
    full = decide(wide)
    assert_same_bytes(
        without_path(full), without_path(decide(chain, np.full(batch, width), tree=False))
    )


def without_path(acceptance):
    """Entries of the path past A are never read, and differ."""
    return acceptance.replace(path=np.zeros(0, np.int32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_columns_that_do_not_exist_change_nothing(value):
    scene = random_scene(6, BATCH)
    whole = decide(scene)
    poisoned = {name: np.array(x) for name, x in scene.items() if name != "requests"}
    poisoned["requests"] = scene["requests"]
    dead = np.arange(NODES) >= scene["live"][:, None]
    poisoned["logits"][dead] = value
    poisoned["q"][dead[:, 1:]] = value
    poisoned["tokens"][dead] = 7
    poisoned["depth"][dead] = 1
    assert_same_bytes(decide(poisoned), whole)
    # Likewise columns that Q cuts off, whatever they claim to be.
    cut = np.minimum(scene["live"], 1 + np.arange(BATCH) % NODES)
    first = decide(scene, columns=cut)
    poisoned = {**scene, "logits": np.array(scene["logits"]), "tokens": np.array(scene["tokens"])}
    beyond = np.arange(NODES) >= cut[:, None]
    poisoned["logits"][beyond], poisoned["tokens"][beyond] = value, 3
    assert_same_bytes(decide(poisoned, columns=cut), first)


def test_a_nan_is_a_fault_only_on_the_path_and_an_idle_row_licenses_nothing():
    scene = random_scene(8, BATCH)
    clean = decide(scene)
    on_path = np.zeros((BATCH, NODES), bool)
    for row, accepted in enumerate(clean.accepted):
        on_path[row, clean.path[row, : accepted + 1]] = True
    off = {**scene, "logits": np.array(scene["logits"])}
    off["logits"][~on_path] = np.nan
    found = decide(off)
    assert_same_bytes(found, clean)
    broken = {**scene, "logits": np.array(scene["logits"])}
    last = np.take_along_axis(clean.path, clean.accepted[:, None], axis=1)[:, 0]
    broken["logits"][np.arange(BATCH), last, 4] = np.nan
    assert decide(broken).fault.all()
    columns = np.where(np.arange(BATCH) % 2, NODES, 0)
    idle = decide(scene, columns=columns)
    assert not idle.licensed[::2].any() and not idle.outputs[::2].any() and not idle.fault.any()
    assert (idle.licensed[1::2] == clean.licensed[1::2]).all()


def test_plain_rows_need_only_the_argmax():
    """All rows plain take the short branch, and decide as the long one does."""
    scene = random_scene(9, BATCH)
    scene["requests"] = [SamplingParams()] * BATCH
    short = decide(scene)
    mask = np.ones((BATCH, NODES, V_PUB), bool)
    assert_same_bytes(short, decide(scene, allowed=mask))
    assert short.accepted.max() > 1


def test_a_later_sibling_of_a_sharp_law_keeps_its_share():
    """1 - q(x_0) is 0 in fp32 here; the sibling that was drawn all the same passes as it should."""
    batch, tiny = BATCH, 2.0**-26
    logits = np.full((batch, NODES, V), -np.inf, np.float32)
    logits[:, :, [1, 2, 4]] = np.log([0.25, 0.25, 0.5])
    parent = np.tile(np.array([0, 0, 0, *range(3, NODES)], np.int32), (batch, 1))
    tokens = np.zeros((batch, NODES), np.int32)
    tokens[:, 1:3] = 1, 2
    q = np.zeros((batch, NODES - 1, C), np.float32)
    q[:, :2, :2] = 1.0, tiny
    scene = {
        "logits": logits, "parent": parent, "tokens": tokens, "q": q,
        "depth": (parent < np.arange(NODES)).astype(np.int32),
        "candidates": np.tile(np.array([1, 2, 5, 6, 7], np.int32), (batch, K, 1)),
        "live": np.full(batch, 3), "seeds": np.arange(batch), "frontier": np.full(batch, 9),
        "counts": np.zeros((batch, V_PUB)), "seen": np.zeros((batch, V_PUB)),
        "requests": [SamplingParams(temperature=1.0)] * batch,
    }
    found = decide(scene)
    # x_0 = 1 passes with p = 1/4; then r = (2: 1/3, 4: 2/3) and x_1 = 2 was certain.
    share = [np.mean(found.outputs[:, 0] == token) for token in (1, 2, 4)]
    np.testing.assert_allclose(share, [0.25, 0.25, 0.5], atol=0.1)
