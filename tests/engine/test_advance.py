"""Which rounds are started by the call that commits the one before, and that it changes nothing."""

import pytest

from dflash_jax.engine import lanes, rows, schedule
from dflash_jax.engine.request import FinishReason
from dflash_jax.engine.width import WidthController, WidthTable
from tests.engine import scenes
from tests.engine.scenes import alone, prompts


class Planted(Exception):
    """What a test makes fail."""


def logged(engine):
    """The calls for rounds from now on: a started round's lanes, "commit", "advance"."""
    own, calls = engine._lanes, []

    def wrapped(name, told):
        original = getattr(own, name)

        def call(*args):
            calls.append(told(*args))
            original(*args)

        setattr(own, name, call)

    wrapped("speculate", lambda live, nodes: tuple(live))
    wrapped("commit", lambda committed: "commit")
    wrapped("advance", lambda: "advance")
    return calls


def submit(engine, n, budget=30, **options):
    return engine.submit(prompts()[n], max_new_tokens=budget, **options)


def assert_whole(request, n, budget=30):
    assert tuple(request.tokens) == alone(prompts()[n], budget).tokens
    assert request.finish_reason is FinishReason.LENGTH


def test_all_rounds_between_the_first_and_the_last_are_one_call_and_compile_nothing():
    engine = scenes.engine(checkpoints=())
    submit(engine, 3)
    scenes.finish(engine)
    compiled, calls = scenes.traces(), logged(engine)
    request = submit(engine, 3)
    scenes.finish(engine)
    rounds = request.statistics.rounds + request.statistics.single_steps
    assert calls == [(0,), *["advance"] * (rounds - 1), "commit"] and rounds > 8
    assert scenes.traces() == compiled
    assert_whole(request, 3)


def test_a_round_of_other_rows_is_started_apart_once():
    """One row ends, and a request takes its lane later on."""
    engine = scenes.engine(checkpoints=())
    requests = [submit(engine, 3), submit(engine, 1, 12)]
    while not all(request.tokens for request in requests):
        engine.step()
    calls = logged(engine)
    while requests[1].finish_reason is None:
        engine.step()
    engine.step()
    assert calls == [*["advance"] * calls.index("commit"), "commit", (0,), "advance"]
    calls.clear()
    requests.append(submit(engine, 0, 12))
    while requests[2].finish_reason is None:
        engine.step()
    assert [call for call in calls if call != "advance"] == ["commit", (0, 1), "commit", (0,)]
    scenes.finish(engine)
    for request, n, budget in zip(requests, (3, 1, 0), (30, 12, 12), strict=True):
        assert_whole(request, n, budget)


@pytest.mark.parametrize("way", ["force", "last force", "cancel", "fork"])
def test_what_happens_to_a_row_in_a_round_is_in_force_after_it(way):
    """The round in flight is committed apart, and the next one has the rows that there are then."""
    engine = scenes.engine(checkpoints=())
    other, request = submit(engine, 3), submit(engine, 4)
    while not (other.tokens and request.tokens):
        engine.step()
    calls, said = logged(engine), list(request.tokens)
    if way == "cancel":
        engine.cancel(request)
    elif way == "fork":
        (copy,) = engine.fork(request)
    else:
        engine.force(request, [40] * (30 - len(said) if way == "last force" else 2))
    engine.step()
    rows = {"force": (0, 1), "last force": (0,), "cancel": (0,), "fork": (0, 1, 2)}[way]
    assert calls == ["commit", rows]
    engine.step()
    assert calls[2] == "advance"
    scenes.finish(engine)
    assert_whole(other, 3)
    if way == "fork":
        assert_whole(request, 4)
        assert_whole(copy, 4)
    elif way == "force":
        forced = (*said, 40, 40)
        rest = alone((*prompts()[4], *forced), 30 - len(forced)).tokens
        assert tuple(request.tokens) == (*forced, *rest)


def test_another_width_is_started_apart():
    class Changing:
        """A policy that changes its mind at every third round."""

        learned = 0

        def choose(self, rows):
            return 5 * (self.learned // 3 % 2)

        def learn(self, *_):
            self.learned += 1

    engine = scenes.engine(checkpoints=())
    engine._schedule._widths = Changing()
    speculate, widths = engine._lanes.speculate, []

    def chain(live, nodes):  # a tree would be a program of its own
        widths.append(nodes)
        speculate(live, 0)

    engine._lanes.speculate = chain
    calls, request = logged(engine), submit(engine, 3)
    scenes.finish(engine)
    # The first width is given up one round later: a round's call comes before its result.
    assert calls[:5] == [(0,), *["advance"] * 3, "commit"]
    assert calls[5:17] == [(0,), "advance", "advance", "commit"] * 3
    assert widths == [0, 5] * (len(widths) // 2) + [0] * (len(widths) % 2)
    assert_whole(request, 3)


@pytest.mark.parametrize("stops", [(), [(1, 2)]], ids=["ahead", "behind"])
def test_a_policy_that_learns_tries_every_width(stops):
    """Also where a round's width is chosen before the one ahead of it has been learned."""
    engine = scenes.engine(checkpoints=())
    engine._schedule._widths = WidthController(3)
    speculate, widths = engine._lanes.speculate, []

    def chain(live, nodes):  # a tree would be a program of its own
        widths.append(nodes)
        speculate(live, 0)

    engine._lanes.speculate = chain
    request = submit(engine, 3, 90, stop_sequences=stops)
    scenes.finish(engine)
    assert widths[:3] == [0, 8, 12]
    assert_whole(request, 3, 90)


def test_a_policy_learns_nothing_from_a_round_whose_rows_have_left():
    """An EOS id ends a row while the next round runs already: that one may lie for minutes."""

    class Learning(WidthTable):
        learned = ()

        def learn(self, rows, nodes, tokens, seconds):
            self.learned += ((rows, tokens),)

    engine = scenes.engine(checkpoints=())
    widths = engine._schedule._widths = Learning([0])
    ids = alone(prompts()[3], 30).tokens
    end = next(n for n in range(6, 30) if ids[n] not in ids[:n])
    other = submit(engine, 4, 12)
    for _ in range(2):
        request = submit(engine, 3, eos_ids=[ids[end]])
        scenes.finish(engine)
        assert tuple(request.tokens) == ids[: end + 1]
    assert engine._schedule._flight is not None  # nobody waits for it
    submit(engine, 4, 6)
    scenes.finish(engine)
    assert tuple(other.tokens) == alone(prompts()[4], 12).tokens
    assert {rows for rows, _ in widths.learned} == {1, 2}
    assert all(tokens >= rows for rows, tokens in widths.learned)
    by_one = sum(tokens for rows, tokens in widths.learned if rows == 1)
    assert by_one >= end


@pytest.mark.parametrize("stops, expected", [
    ((0, 0), ["advance", "last_result", "preview", "account", "publish"]),
    ((8, 0), ["advance", "last_result", "preview", "account", "publish"]),
    ((9, 0), ["result", "preview", "advance", "account", "publish"]),
    ((0, 1), ["result", "preview", "advance", "account", "publish"]),
], ids=str)
def test_the_next_round_runs_while_outputs_are_decided_or_else_entered_and_shown(
    monkeypatch, stops, expected
):
    """Decided, where the device sees every end by itself: few EOS ids, and no stop sequence."""
    engine, order = scenes.engine(checkpoints=()), []
    never = [n for n in range(60) if n not in alone(prompts()[3], 30).tokens]
    ids, sequences = stops
    stops = dict(eos_ids=never[:ids], stop_sequences=[never[:2]] * sequences)

    def told(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: (order.append(name), original(*a))[1])

    request = submit(engine, 3, on_tokens=lambda *_: None, **stops)
    while not request.tokens:
        engine.step()
    for owner, name in (
        (engine._lanes, "result"), (engine._lanes, "last_result"), (rows, "preview"),
        (engine._lanes, "advance"),
        (schedule, "account"), (schedule, "publish"),
    ):
        told(owner, name)
    engine.step()
    assert order == expected


@pytest.mark.parametrize("at", range(4))
def test_a_failure_behind_the_call_finds_the_round_committed_and_the_next_one_in_flight(
    monkeypatch, at
):
    """What the call did is entered by the next step; nothing is decided or run twice."""
    engine = scenes.engine()
    requests = [submit(engine, n) for n in (0, 3, 4)]
    while not all(request.tokens for request in requests):
        engine.step()
    read_later, calls = lanes.read_later, []

    def planted(summary):
        calls.append(1)
        if len(calls) == at + 1:
            raise Planted
        return read_later(summary)

    monkeypatch.setattr(lanes, "read_later", planted)
    faults = 0
    while not engine.idle:
        try:
            engine.step()
        except Planted:
            faults += 1
            pending = engine._schedule._pending
            assert pending is None or engine._lanes.commits == pending.commits + 1
        scenes.check(engine)
    assert faults == 1
    for request, n in zip(requests, (0, 3, 4), strict=True):
        assert_whole(request, n)
        expected = alone(prompts()[n], 30).statistics
        assert request.statistics.accepted_by_position == expected.accepted_by_position
