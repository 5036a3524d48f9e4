"""Drives the steps by hand over the lanes of one state, in compact batches of chosen lanes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.decode import DecodeState, Rows, check_invariants
from dflash_jax.state.scratch import Proposal, RoundExtent, RoundScratch
from dflash_jax.steps import (
    Admission,
    Models,
    Params,
    PrefillChunk,
    accept,
    begin,
    commit,
    draft_only,
    first_token,
    judge,
    prefill_chunk,
    speculate,
    verify,
)
from dflash_jax.steps.materialize import absorb_pending
from tests import cases


@dataclasses.dataclass
class Lane:
    """What the host knows about a live lane: its ledger, and when it ends."""

    ledger: list[int]
    prompt: int
    slot: int
    remaining: int
    capacity: int

    @property
    def frontier(self) -> int:
        return len(self.ledger) - 1

    @property
    def live(self) -> bool:
        return self.remaining > 0 and self.frontier < self.capacity

    @property
    def text(self) -> list[int]:
        return self.ledger[self.prompt :]


class Session:
    """A state with live lanes. `before` maps (models, state, lanes) to the state of the next step.

    Slots and pages are shuffled, so that no lane, slot, row and page number agree by accident.
    """

    def __init__(self, models: Models, params: Params, before=None):
        self.models, self.params, self.before = models, params, before
        self.state = models.zeros()
        self.lanes: dict[int, Lane] = {}
        self.licensed: list[int] = []
        shuffle = np.random.default_rng(5).permutation
        run = models.run
        self.slot_of = shuffle(run.slots)[: run.lanes]
        self.target_pages = shuffle(run.pages).reshape(run.lanes, run.max_pages)
        self.draft_pages = shuffle(run.pages).reshape(run.lanes, run.max_pages)

    def rows(self, lanes) -> Rows:
        """Rows of the given lanes in order, filled up with idle rows."""
        run = self.models.run
        idle = run.batch - len(lanes)
        slots = [int(self.slot_of[lane]) for lane in lanes] + [run.slots] * idle
        slot = np.array(slots, np.int32)
        lane = np.array([*lanes, *[run.lanes] * idle], np.int32)
        return Rows(lane=jnp.array(lane), read_slot=jnp.array(slot), write_slot=jnp.array(slot))

    def nobody(self, which: int) -> Rows:
        """Three rows without a lane: with no slot either (0, 1), or with slots that exist (2)."""
        run = self.models.run

        def three(size):
            ends = cases.outside(size)
            return jnp.array(np.array(ends[3 * (which % 2) :][:3], np.int32))

        slots = three(run.slots) if which < 2 else jnp.arange(3, dtype=jnp.int32)
        return Rows(lane=three(run.lanes), read_slot=slots, write_slot=slots)

    def admission(self, lanes, budgets, capacities, rope_delta=0) -> Admission:
        """Admission of a batch's rows; idle rows get zeros."""
        batch = self.models.run.batch

        def padded(values, dtype=np.int32):
            values = np.asarray(values, dtype)
            full = np.zeros((batch, *values.shape[1:]), dtype)
            full[: len(values)] = values
            return jnp.array(full)

        return Admission(
            remaining=padded(budgets),
            capacity=padded(capacities),
            rope_delta=padded([rope_delta] * len(lanes)),
            seed=padded(np.array([[lane, 0] for lane in lanes]).reshape(-1, 2), np.uint32),
            target_pages=padded(self.target_pages[list(lanes)]),
            draft_pages=padded(self.draft_pages[list(lanes)]),
        )

    def admit(self, prompts: dict[int, list[int]], budget, capacity=None, chunk=cases.CHUNK):
        """Prefills lanes in chunks of `chunk` tokens and chooses their first token."""
        lanes, batch = list(prompts), self.models.run.batch
        budgets = [budget(lane) if callable(budget) else budget for lane in lanes]
        limits = [capacity or self.models.run.max_context] * len(lanes)
        rows = self.rows(lanes)
        self.step(begin, self.models, rows=rows, admission=self.admission(lanes, budgets, limits))
        for lane, tokens, left, limit in zip(lanes, prompts.values(), budgets, limits, strict=True):
            self.lanes[lane] = Lane(
                ledger=list(tokens), prompt=len(tokens), slot=int(self.slot_of[lane]),
                remaining=left - 1, capacity=limit,
            )
        for start in range(0, max(len(p) for p in prompts.values()), chunk):
            tokens = np.zeros((batch, chunk), np.int32)
            length, frontier = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
            for row, prompt in enumerate(prompts.values()):
                part = prompt[start : start + chunk]
                tokens[row, : len(part)], length[row] = part, len(part)
                frontier[row] = min(start, len(prompt))
            piece = PrefillChunk.text(self.models, tokens, length, frontier)
            self.step(prefill_chunk, self.models, self.params, rows=rows, chunk=piece)
        greedy = SamplingArrays.greedy(batch)
        self.state, fault = first_token(
            self.models, self.params, self.poisoned(), rows, greedy
        )
        assert not np.asarray(fault).any()
        anchors = np.asarray(self.state.sequence.anchor)
        for lane in lanes:
            self.lanes[lane].ledger.append(int(anchors[lane]))
        self.check()

    def step(self, function, *args, **kwargs):
        """Calls a step that donates and returns the state."""
        self.state = function(*args, state=self.poisoned(), **kwargs)

    def poisoned(self) -> DecodeState:
        """The state after `before`."""
        if self.before is None:
            return self.state
        return self.before(self.models, self.state, self.lanes)

    def round(self, lanes, keep=None, proposals=None, grammar=None) -> RoundScratch:
        """One round of a batch; the host keeps keep(lane, L) outputs, all of them by default.

        `proposals`: None runs the draft; else {lane: the K tokens to verify instead}.
        `grammar`: a history of ids -> [V_pub] bool, what may follow; the round runs in two halves.
        """
        rows, batch = self.rows(lanes), self.models.run.batch
        state, greedy = self.poisoned(), SamplingArrays.greedy(batch)
        extent = extent_of(self.models, state, rows)
        if grammar is not None:
            self.state, proposal = draft_only(
                self.models, self.params, state, rows, greedy, extent
            )
            scratch = judge(
                self.models, self.params, self.state, rows, proposal, greedy, extent,
                jnp.array(self.masks(lanes, np.asarray(proposal.tokens), grammar)),
            )
        elif proposals is None:
            self.state, scratch = speculate(self.models, self.params, state, rows, greedy, extent)
        else:
            tokens = np.zeros((batch, self.models.run.block_width), np.int32)
            for row, lane in enumerate(lanes):
                tokens[row] = [self.lanes[lane].ledger[-1], *proposals[lane]]
            self.state, scratch = verify_proposals(
                self.models, self.params, state, rows, greedy, extent, jnp.array(tokens)
            )
        licensed, outputs = np.asarray(scratch.acceptance.licensed), np.asarray(
            scratch.acceptance.outputs
        )
        assert not np.asarray(scratch.acceptance.fault).any()
        committed = np.zeros(batch, np.int32)
        for row, lane in enumerate(lanes):
            assert 1 <= licensed[row] <= extent.columns[row]
            committed[row] = licensed[row] if keep is None else keep(lane, int(licensed[row]))
        self.step(commit, self.models, rows=rows, scratch=scratch, committed=jnp.array(committed))
        for row, lane in enumerate(lanes):
            count = int(committed[row])
            self.lanes[lane].ledger += outputs[row, :count].tolist()
            self.lanes[lane].remaining -= count
        self.licensed += licensed[: len(lanes)].tolist()
        self.check()
        return scratch

    def masks(self, lanes, tokens, grammar):
        """[B, W, V_pub] bool: what may follow the ledger and d_1..d_j, for every column j."""
        batch, width = tokens.shape
        allowed = np.ones((batch, width, self.models.target.public_vocab), bool)
        for row, lane in enumerate(lanes):
            for column in range(width):
                drafts = tokens[row, 1 : column + 1].tolist()
                allowed[row, column] = grammar(self.lanes[lane].ledger + drafts)
        return allowed

    def run(self, seed=0, keep=None, grammar=None) -> dict[int, list[int]]:
        """Rounds over random compact batches of live lanes until all have ended."""
        rng = np.random.default_rng(seed)
        while live := [lane for lane, known in self.lanes.items() if known.live]:
            chosen = rng.permutation(live)[: self.models.run.batch].tolist()
            self.round(chosen, keep, grammar=grammar)
        return {lane: known.text for lane, known in self.lanes.items()}

    def check(self):
        ledgers = {lane: known.ledger for lane, known in self.lanes.items() if known.live}
        check_invariants(self.state, ledgers, self.models.run)


@functools.partial(jax.jit, static_argnums=0)
def extent_of(models: Models, state: DecodeState, rows: Rows) -> RoundExtent:
    return models.extent(state.sequence.gather(rows.lane))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def verify_proposals(models, params, state, rows, sampling, extent, tokens):
    """`speculate` with the proposal given: tokens [B, W], the anchor first."""
    state = absorb_pending(models, params, state, rows)
    proposal = chain_proposal(tokens)
    verification = verify(models, params, state, rows, proposal, extent)
    acceptance = accept(
        proposal, verification, state.sequence.gather(rows.lane), sampling, extent,
        public_vocab=models.target.public_vocab,
    )
    return state, RoundScratch(
        proposal=proposal, verification=verification, acceptance=acceptance
    )


def chain_proposal(tokens) -> Proposal:
    """A proposal made of tokens [B, W] in a row."""
    batch, width = tokens.shape
    depth = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    return Proposal(
        tokens=tokens,
        parent=jnp.maximum(depth - 1, 0),
        depth=depth,
        candidates=tokens[:, 1:, None],
        q=jnp.ones((batch, width - 1, 1), jnp.float32),
    )


def assert_same_bytes(actual, expected):
    """Every leaf of two pytrees holds the same bytes."""
    jax.tree_util.tree_map_with_path(_same_bytes, actual, expected)


def _same_bytes(path, actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), path
    assert actual.tobytes() == expected.tobytes(), jax.tree_util.keystr(path)
