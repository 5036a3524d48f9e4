"""A target that is a table, and drafts over it: whole rounds of thousands of rows in one call.

The logits of the next token depend on the last two tokens. The proposal goes through the real
`edge_scores` and `conditional_walk` (DFlash2; for trees `build_tree` too) or is a fixed chain
(DFlash), the decision through the real `accept` or `accept_tree`; the exact law of the first tokens
comes from the float64 oracle.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.ops.candidate_selector import conditional_walk, edge_scores
from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.state.scratch import Proposal, Verification
from dflash_jax.state.sequence import SequenceState, round_extent
from dflash_jax.steps import accept, accept_tree, build_tree
from dflash_jax.steps.tree import walk_uniforms
from tests.oracles import sampling as oracle
from tests.steps.harness import chain_proposal

V, V_PUB, CANDIDATES, RANK, LONGEST = 11, 8, 6, 4, 7
PROMPT, ANCHOR, FRONTIER = (2, 5, 5), 3, 10
LENGTH = 4  # tokens whose law is tested
PATHS = 8
ROWS = 8192  # of one call
# These programs run for longer than they compile, so XLA compiles them as it does by itself and not
# as tests/conftest.py says.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 3}
if jax.__version_info__ < (0, 11):
    COMPILER_OPTIONS["xla_cpu_use_fusion_emitters"] = True


@dataclasses.dataclass(frozen=True)
class Tables:
    """after, before: [V_PUB, V] logits by the last token and by the one before it.

    chain [V_PUB, LONGEST] and candidates, unary [V_PUB, LONGEST, CANDIDATES], query [V_PUB,
    LONGEST, RANK] by the anchor; codebooks predecessor, successor [V, RANK].
    """

    after: np.ndarray
    before: np.ndarray
    chain: np.ndarray
    candidates: np.ndarray
    unary: np.ndarray
    query: np.ndarray
    predecessor: np.ndarray
    successor: np.ndarray


@functools.cache
def tables() -> Tables:
    """Drafts agree with the target well enough that all of seven proposals may pass."""
    rng = np.random.default_rng(11)
    predecessor, successor = rng.normal(size=(2, V, RANK)).astype(np.float32)
    shared = predecessor[:V_PUB] @ successor.T
    after = shared + rng.normal(scale=0.4, size=(V_PUB, V))
    after[:, V_PUB:] = 30.0  # reserved ids, never to be emitted
    best = np.argmax(after[:, :V_PUB], axis=1)
    chain = np.zeros((V_PUB, LONGEST), np.int32)
    chain[:, 0] = best
    for i in range(1, LONGEST):
        chain[:, i] = best[chain[:, i - 1]]
    chain[::3, 2:] = rng.integers(0, V_PUB, chain[::3, 2:].shape)
    shape = (V_PUB, LONGEST)
    candidates = rng.permuted(np.broadcast_to(np.arange(V_PUB), (*shape, V_PUB)), axis=2)
    return Tables(
        after=after.astype(np.float32),
        before=rng.normal(scale=0.5, size=(V_PUB, V)).astype(np.float32),
        chain=chain,
        candidates=candidates[:, :, :CANDIDATES].astype(np.int32),
        unary=rng.normal(scale=0.5, size=(*shape, CANDIDATES)).astype(np.float32),
        query=(1 + rng.normal(scale=0.2, size=(*shape, RANK))).astype(np.float32),
        predecessor=predecessor,
        successor=successor,
    )


def play(draft: str, draft_tokens: int, nodes: int = 0):
    """A jitted (sampling of one row, seeds [B, 2]) -> (tokens [B, LENGTH], rounds); never cached.

    nodes: W_t of tree rounds, 0 for chains.

    Tracing happens here anew, so that a test may replace parts of the library before.
    """

    def run(sampling, seeds):
        rows = len(seeds)
        sampling = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), sampling)
        previous = jnp.full((rows,), PROMPT[-1], jnp.int32)
        text, length = jnp.zeros((rows, LENGTH), jnp.int32), jnp.zeros((rows,), jnp.int32)

        def step(carry, _):
            sequence, previous, text, length = carry
            sequence, previous, outputs, licensed = one_round(
                draft, draft_tokens, nodes, sequence, previous, sampling
            )
            index = jnp.arange(outputs.shape[1])[None, :]
            place = jnp.where(index < licensed[:, None], length[:, None] + index, LENGTH)
            text = text.at[jnp.arange(rows)[:, None], place].set(outputs, mode="drop")
            return (sequence, previous, text, length + licensed), jnp.sum(length < LENGTH)

        carry = (start(seeds), previous, text, length)
        (_, _, text, _), rounds = jax.lax.scan(step, carry, length=LENGTH)
        return text, rounds.sum()

    return jax.jit(run, compiler_options=COMPILER_OPTIONS)


def start(seeds) -> SequenceState:
    """Rows after the prompt and the anchor; every fourth may publish LENGTH tokens only."""
    rows = len(seeds)
    remaining = jnp.where(jnp.arange(rows) % 4 == 0, LENGTH, 99).astype(jnp.int32)
    return SequenceState.zeros(rows, V_PUB).replace(
        frontier=jnp.full((rows,), FRONTIER, jnp.int32),
        anchor=jnp.full((rows,), ANCHOR, jnp.int32),
        remaining=remaining,
        capacity=jnp.full((rows,), 999, jnp.int32),
        counts=jnp.zeros((rows, V_PUB), jnp.int32).at[:, ANCHOR].set(1),
        prompt_seen=jnp.zeros((rows, V_PUB), bool).at[:, np.array(PROMPT)].set(True),
        seed=seeds,
    )


def one_round(draft: str, draft_tokens: int, nodes: int, sequence, previous, sampling):
    """(sequence, token before the anchor) after a round that publishes all it may, and its L."""
    rows = len(previous)
    extent = round_extent(
        sequence, draft_tokens=draft_tokens, whole_block=draft == "dflash2", tree_nodes=nodes
    )
    takes_tree = extent.columns > extent.proposals + 1
    proposal = propose(draft, draft_tokens, nodes, sequence, sampling, takes_tree)
    rule, options = (accept_tree, {"paths": PATHS}) if nodes else (accept, {})
    acceptance = rule(
        proposal, verified(proposal, previous), sequence, sampling, extent, public_vocab=V_PUB,
        **options,
    )
    outputs, licensed = acceptance.outputs, acceptance.licensed
    everyone = jnp.arange(rows, dtype=jnp.int32)
    told = jnp.concatenate([sequence.anchor[:, None], outputs], axis=1)
    last_two = jnp.take_along_axis(told, jnp.stack([licensed - 1, licensed], axis=1), axis=1)
    sequence = sequence.count_tokens(everyone, outputs, licensed).replace(
        frontier=sequence.frontier + licensed,
        anchor=last_two[:, 1],
        remaining=sequence.remaining - licensed,
    )
    return sequence, last_two[:, 0], outputs, licensed


def propose(draft: str, draft_tokens, nodes, sequence, sampling, takes_tree) -> Proposal:
    """K proposals or a tree; they depend on the anchor and, for DFlash2, on the request's draws."""
    table, anchor = jax.tree.map(jnp.asarray, dataclasses.asdict(tables())), sequence.anchor
    if draft == "dflash":
        chain = table["chain"][anchor, :draft_tokens]
        return chain_proposal(jnp.concatenate([anchor[:, None], chain], axis=1))
    by_anchor = {
        name: table[name][anchor, :draft_tokens] for name in ("unary", "candidates", "query")
    }
    edges = edge_scores(
        **by_anchor, anchor=anchor, predecessor=table["predecessor"], successor=table["successor"]
    )
    uniforms = walk_uniforms(sequence, takes_tree, draft_tokens)
    candidates = by_anchor["candidates"]
    walk = conditional_walk(edges, candidates, sampling.temperature, uniforms)
    if nodes:
        return build_tree(
            edges, candidates, walk, sampling.temperature, sequence, nodes=nodes, paths=PATHS
        )
    tokens = jnp.concatenate([anchor[:, None], walk.tokens], axis=1)
    return chain_proposal(tokens).replace(candidates=candidates, q=walk.q)


def verified(proposal: Proposal, previous) -> Verification:
    """The table's logits behind every column."""
    tokens = proposal.tokens
    before = jnp.take_along_axis(tokens, proposal.parent, axis=1).at[:, 0].set(previous)
    logits = jnp.asarray(tables().after)[tokens] + jnp.asarray(tables().before)[before]
    empty = jnp.zeros((*tokens.shape, 0), jnp.float32)
    return Verification(logits=logits, hidden=empty, features=empty, kv_rows=(), gdn_records=())


def samples(game, params: SamplingParams, least_rounds: int, case: int):
    """Tokens [N, LENGTH] of at least that many rounds; `case` keeps the seeds of cases apart."""
    one, rounds, texts = SamplingArrays.of([params], V_PUB), 0, []
    while rounds < least_rounds:
        seeds = np.full((ROWS, 2), case, np.uint32)
        seeds[:, 0] = np.arange(len(texts) * ROWS, (len(texts) + 1) * ROWS)
        text, count = game(one, jnp.array(seeds))
        texts.append(np.asarray(text))
        rounds += int(count)
    return np.concatenate(texts)


def exact_joint(params: SamplingParams):
    """P(y_1, .., y_LENGTH) [V_PUB] * LENGTH of decoding one token after the other, in float64."""
    controls, table = oracle.Controls.of(params), tables()
    seen = np.isin(np.arange(V_PUB), PROMPT)
    joint = np.zeros((V_PUB,) * LENGTH)

    def extend(text, mass):
        if len(text) == LENGTH:
            joint[text] = mass
            return
        told = (PROMPT[-1], ANCHOR, *text)
        counts = np.bincount(told[1:], minlength=V_PUB)
        logits = table.after[told[-1]] + table.before[told[-2]]
        values = oracle.adjusted(logits[:V_PUB], controls, counts, seen)
        law = oracle.target_distribution(values, controls)
        for token in np.flatnonzero(law):
            extend((*text, int(token)), mass * law[token])

    extend((), 1.0)
    return joint
