"""The host loop on a mock device: order, extents, stopping, counters."""

import dataclasses

import pytest

from dflash_jax.config import DraftKind, RunConfig, tiny_draft, tiny_target
from dflash_jax.engine.device import RoundResult
from dflash_jax.engine.generate import check_prompts, run_draft_tokens, run_requests
from dflash_jax.engine.request import FinishReason, Request
from dflash_jax.engine.width import WidthController
from dflash_jax.steps import Models

K = 3


class MockDevice:
    """A target that counts upwards from the last token, and a draft that is right ``hits`` times.

    Checks what the real device relies on: it licenses at most the budget's columns, and a row is
    never advanced by more than it licensed.
    """

    block_width = K + 1

    def __init__(self, hits, rows=2, faults=(), bad_prompts=()):
        self.eos_ids, self.idle, self.last = {}, set(), None
        self.hits, self.rows, self.faults = hits, rows, set(faults)
        self.bad_prompts = set(bad_prompts)
        self.anchor, self.remaining, self.licensed, self.live = {}, {}, {}, ()
        self.events = []

    def prefill(self, row, prompt, max_new_tokens, eos_ids):
        self.eos_ids[row] = eos_ids
        self.anchor[row] = prompt[-1] + 1
        self.remaining[row] = max_new_tokens - 1
        self.events.append(("prefill", row))
        return None if row in self.bad_prompts else self.anchor[row]

    def warm_up(self, widths):
        assert widths == (0,)
        self.speculate((), 0)
        assert self.result().licensed == [0] * self.rows
        self.commit({})
        del self.events[-2:]

    def speculate(self, live, tree_nodes):
        assert tree_nodes == 0
        self.live, self.idle = tuple(live), set()
        self.events.append(("speculate", self.live))

    def result(self):
        outputs = [[0] * (K + 1) for _ in range(self.rows)]
        proposals, licensed = [0] * self.rows, [0] * self.rows
        for row in set(self.live) - self.idle:
            proposals[row] = min(K, self.remaining[row] - 1)
            licensed[row] = min(self.hits, proposals[row]) + 1
            outputs[row] = [self.anchor[row] + 1 + i for i in range(K + 1)]
        self.licensed = dict(enumerate(licensed))
        fault = [row in self.faults for row in range(self.rows)]
        return RoundResult(
            outputs=outputs, licensed=licensed, proposals=proposals,
            columns=[count + 1 for count in proposals], fault=fault,
        )

    def commit(self, committed):
        self.events.append(("commit", tuple(sorted(committed.items()))))
        for row, count in committed.items():
            assert 0 <= count <= self.licensed[row]
            self.anchor[row] += count
            self.remaining[row] -= count

    def last_result(self):
        return self.last

    def advance(self):
        """The rule of `steps.advance`: up to the first EOS id, nothing of a row with a fault."""
        self.last, counts, ended = self.result(), {}, set(self.idle)
        for row in self.live:
            said = self.last.outputs[row][: self.last.licensed[row]]
            ends = [n for n, token in enumerate(said, 1) if token in self.eos_ids[row]]
            counts[row] = 0 if self.last.fault[row] else ends[0] if ends else len(said)
            if ends or self.last.fault[row]:
                ended.add(row)
        self.commit(counts)
        self.idle = ended
        assert all(self.remaining[row] > 0 for row in self.live if row not in ended)
        self.events[-1] = ("advance", self.events[-1][1])


def request(row, prompt, max_new_tokens, **fields):
    return Request(row=row, prompt=prompt, max_new_tokens=max_new_tokens, **fields)


@pytest.mark.parametrize("hits", range(K + 1))
@pytest.mark.parametrize("budget", range(1, 12))
def test_every_budget_and_acceptance_gives_the_targets_own_tokens(hits, budget):
    row = request(0, (4, 5), budget)
    run_requests(MockDevice(hits), [row])
    assert row.tokens == list(range(6, 6 + budget))
    assert row.finish_reason is FinishReason.LENGTH
    counters = row.statistics
    assert counters.new_tokens == budget
    assert counters.accepted + counters.rounds + counters.single_steps == budget - 1


@pytest.mark.parametrize("stop", range(6, 12))
def test_e7_state_and_output_end_at_the_eos(stop):
    device = MockDevice(hits=K)
    row = request(0, (5,), 50, eos_ids=frozenset([stop]))
    run_requests(device, [row])
    assert row.tokens == list(range(6, stop + 1))
    assert row.finish_reason is FinishReason.EOS
    assert device.anchor[0] == stop


def test_rows_of_one_batch_end_on_their_own():
    device = MockDevice(hits=1)
    rows = [request(0, (5,), 2), request(1, (50,), 6)]
    run_requests(device, rows)
    assert [row.tokens for row in rows] == [[6, 7], list(range(51, 57))]
    rounds = [event for event in device.events if event[0] != "prefill"]
    assert rounds == [
        ("speculate", (0, 1)), ("commit", ((0, 1), (1, 2))), ("speculate", (1,)),
        ("advance", ((1, 2),)), ("commit", ((1, 1),)),
    ]


@pytest.mark.parametrize("budget, call", [(5, "commit"), (6, "advance")])
def test_a_fault_ends_its_row_alone_and_commits_nothing_of_it(budget, call):
    """Whether the host decides or the device does."""
    device = MockDevice(hits=K, faults=[0])
    rows = [request(0, (5,), budget), request(1, (50,), budget)]
    run_requests(device, rows)
    assert (rows[0].tokens, rows[0].finish_reason) == ([6], FinishReason.FAULT)
    assert rows[1].tokens == list(range(51, 51 + budget))
    assert (call, ((0, 0), (1, 4))) in device.events


def test_a_prompt_without_a_finite_candidate_publishes_nothing():
    device = MockDevice(hits=K, bad_prompts=[0])
    rows = [request(0, (5,), 1), request(1, (50,), 6)]
    run_requests(device, rows)
    assert (rows[0].tokens, rows[0].finish_reason) == ([], FinishReason.FAULT)
    assert rows[1].tokens == list(range(51, 57))


def test_tokens_are_shown_only_after_their_commit():
    device = MockDevice(hits=K)
    shown = lambda row, tokens: device.events.append(("shown", tuple(tokens)))  # noqa: E731
    run_requests(device, [request(0, (5,), 5, on_tokens=shown)])
    assert [event[0] for event in device.events] == [
        "prefill",
        "shown",
        "speculate",
        "commit",
        "shown",
    ]
    assert device.events[-1] == ("shown", (7, 8, 9, 10))


def test_a_callback_that_answers_false_cancels_its_row():
    row = request(0, (5,), 50, on_tokens=lambda row, tokens: tokens[-1] < 10)
    run_requests(MockDevice(hits=K), [row])
    assert row.finish_reason is FinishReason.CANCELLED
    assert row.tokens == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("stops", [(), [(1, 2)]], ids=["ahead", "behind"])
def test_a_policy_that_learns_tries_every_width(stops):
    """Also where a round's width is chosen before the one ahead of it has been learned."""

    class AnyWidth(MockDevice):
        def warm_up(self, widths):
            self.widths = []

        def speculate(self, live, tree_nodes):
            super().speculate(live, 0)
            self.widths.append(tree_nodes)

    device, row = AnyWidth(hits=1), request(0, (5,), 99, stop_sequences=stops)
    run_requests(device, [row], WidthController(K))
    assert device.widths[:3] == [0, K + 5, K + 9]
    assert row.tokens == list(range(6, 105))


def models(**run):
    run = {"draft_tokens": 0, "batch": 2, "max_context": 16, **run}
    return Models(target=tiny_target(), draft=None, run=RunConfig(**run))


@pytest.mark.parametrize(
    ("prompts", "max_new_tokens", "message"),
    [
        ([], 1, r"prompts: expected 1\.\.2 \(batch\), got 0"),
        ([[1]] * 3, 1, r"prompts: expected 1\.\.2 \(batch\), got 3"),
        ([[1], []], 1, r"prompts\[1\]: expected at least one token"),
        ([[1, 250]], 1, r"prompts\[0\]: expected ids in \[0, 250\), got 250"),
        ([[1, -1]], 1, r"got -1"),
        ([[1]], 0, "max_new_tokens: expected an integer >= 1, got 0"),
        ([[1] * 10], 7, r"max_context: expected at least 17 .*, got 16"),
    ],
)
def test_faults_of_the_caller_are_named(prompts, max_new_tokens, message):
    with pytest.raises(ValueError, match=message):
        check_prompts(models(), prompts, max_new_tokens)


def test_the_largest_request_that_fits_passes():
    check_prompts(models(), [[249] * 10, [0]], 6)


def test_f4_default_draft_tokens_is_block_size_minus_one_and_logged(caplog):
    draft = dataclasses.replace(tiny_draft(DraftKind.DFLASH2), block_size=8)
    with caplog.at_level("INFO", logger="dflash_jax.engine.generate"):
        assert run_draft_tokens(draft) == 7
    assert "draft_tokens 7 = block_size 8 - 1" in caplog.text
    assert run_draft_tokens(draft, 3) == 3
    assert run_draft_tokens(None) == 0
    with pytest.raises(ValueError, match="without a draft"):
        run_draft_tokens(None, 3)
    with pytest.raises(ValueError, match="no block_size"):
        run_draft_tokens(dataclasses.replace(draft, block_size=None))
