"""Requests that join, leave, fail and wait: each one says what it says alone."""

import types

import jax
import numpy as np
import pytest

from dflash_jax.engine import rows, schedule
from dflash_jax.engine.pages import CapacityError
from dflash_jax.engine.request import FinishReason
from tests.engine import scenes
from tests.engine.scenes import alone, check, controls, finish, prompts, traces
from tests.steps.poison import poison


class Planted(Exception):
    """What a test makes fail."""


def submit_all(engine, numbers=range(8), **options):
    return {
        n: engine.submit(
            prompts()[n], max_new_tokens=9 + 3 * n, sampling=controls(n), **options
        )
        for n in numbers
    }


def assert_as_alone(requests):
    for n, request in requests.items():
        expected = alone(prompts()[n], 9 + 3 * n, controls(n))
        assert tuple(request.tokens) == expected.tokens, n
        assert request.finish_reason is FinishReason.LENGTH
        counted = request.statistics
        assert counted.accepted_by_position == expected.statistics.accepted_by_position, n
        assert counted.widths == expected.statistics.widths, n


def test_eight_requests_through_three_rows_each_say_what_they_say_alone():
    engine = scenes.engine()
    requests = submit_all(engine)
    finish(engine)
    assert_as_alone(requests)
    assert sum(request.statistics.accepted for request in requests.values()) > 5


def test_without_a_draft_it_is_plain_decoding_with_everything_else():
    engine = scenes.engine(None)
    request = engine.submit(prompts()[1], max_new_tokens=18, sampling=controls(1))
    for _ in range(8):
        engine.step()
    others = [*engine.fork(request), engine.restore(engine.checkpoint(request))]
    finish(engine)
    follow = engine.submit(request.ledger, max_new_tokens=3)
    finish(engine)
    expected = alone(prompts()[1], 18, controls(1), None)
    assert [tuple(one.tokens) for one in (request, *others)] == [expected.tokens] * 3
    assert follow.statistics.reused_tokens == len(request.ledger) - 1
    assert tuple(follow.tokens) == alone(request.ledger, 3, controls(0), None).tokens


def test_requests_that_join_between_rounds_change_nothing_and_compile_nothing():
    engine = scenes.engine(checkpoints=())
    first = submit_all(engine, (5, 6))
    for _ in range(6):
        engine.step()
    first |= submit_all(engine, (3,))
    engine.step()
    compiled = traces()
    first |= submit_all(engine, (0, 1, 2, 4, 7))
    finish(engine)
    assert traces() == compiled
    assert_as_alone(first)
    assert engine._pools.num_free_slots == scenes.SLOTS


def test_poisoned_dead_bytes_of_earlier_lives_change_nothing():
    engine = scenes.engine(checkpoints=())
    requests = submit_all(engine)
    values = [np.nan, 1e30]
    while not engine.idle:
        rows = engine._schedule.rows
        lanes = {n: types.SimpleNamespace(slot=row.holding.slot) for n, row in rows.items()}
        engine._lanes._state = poison(
            engine.models, engine._lanes.state, lanes, values[len(rows) % 2]
        )
        engine.step()
    assert_as_alone(requests)


@pytest.mark.parametrize("budget", range(1, 10))
def test_e7_every_budget_ends_with_the_state_just_behind_the_text(budget):
    engine = scenes.engine()
    for n in (0, 1):
        request = engine.submit(prompts()[n], max_new_tokens=budget, sampling=controls(n))
        output = engine.wait_for(request)
        assert output.tokens == alone(prompts()[n], budget, controls(n)).tokens
        turn = max(engine._store, key=lambda image: image.used)
        assert turn.tokens == (*prompts()[n], *output.tokens[:-1])


@pytest.mark.parametrize("kind", ["eos", "sequence", "string"])
def test_e7_a_stop_at_every_index_of_a_round_ends_there(kind):
    """The state ends with the text: a second turn says what it says from nothing."""
    prompt, whole = prompts()[2], alone(prompts()[2], 16).tokens
    engine = scenes.engine()
    for index in range(16):
        last = whole[index : index + 1] if kind == "eos" else whole[max(index - 1, 0) : index + 1]
        end = next(i for i in range(index + 1) if whole[: i + 1][-len(last) :] == last)
        options = {
            "eos": {"eos_ids": last},
            "sequence": {"stop_sequences": [last]},
            "string": {"stop_strings": [scenes.Letters().decode(last)]},
        }[kind]
        output = engine.generate([prompt], max_new_tokens=16, **options)[0]
        assert output.tokens == whole[: end + 1]
        expected = FinishReason.EOS if kind == "eos" else FinishReason.STOP
        assert output.finish_reason is expected
        more = (*prompt, *output.tokens, 5)
        again = engine.submit(more, max_new_tokens=4)
        engine.wait_for(again)
        assert again.statistics.reused_tokens >= len(more) - 2
        assert tuple(again.tokens) == alone(more, 4).tokens
    check(engine)


def test_a_request_may_be_cancelled_at_every_stage():
    """Waiting, between chunks of its prompt, with one token, in the middle; others go on."""
    for steps in range(9):
        engine = scenes.engine()
        others = submit_all(engine, (3, 6))
        victim = engine.submit(prompts()[5], max_new_tokens=20)  # three chunks long
        late = submit_all(engine, (2,))
        for _ in range(steps):
            engine.step()
        said = list(victim.tokens)
        assert said == list(alone(prompts()[5], 20).tokens[: len(said)])
        engine.cancel(victim)
        check(engine)
        finish(engine)
        assert (victim.finish_reason, victim.tokens) == (FinishReason.CANCELLED, said)
        assert_as_alone(others | late)
    assert len(said) > 1


def test_a_callback_may_cancel_itself_and_others():
    engine = scenes.engine()
    others = submit_all(engine, (3,))
    victim = engine.submit(prompts()[5], max_new_tokens=60)

    def on_tokens(number, tokens):
        if len(canceller.tokens) > 4:
            engine.cancel(victim)
            return False

    canceller = engine.submit(prompts()[0], max_new_tokens=60, on_tokens=on_tokens)
    finish(engine)
    assert canceller.finish_reason is victim.finish_reason is FinishReason.CANCELLED
    assert 4 < len(canceller.tokens) < 60 and len(victim.tokens) < 60
    assert_as_alone(others)


def test_a_step_inside_a_callback_is_refused():
    engine = scenes.engine()
    request = engine.submit(prompts()[0], max_new_tokens=9, on_tokens=lambda *_: engine.step())
    with pytest.raises(RuntimeError, match="callback"):
        finish(engine)
    assert tuple(request.tokens) == alone(prompts()[0], 9).tokens[: len(request.tokens)] != ()
    engine.cancel(request)
    assert engine.idle


def test_out_of_pages_a_request_waits_or_is_refused_and_running_ones_finish():
    engine = scenes.engine(checkpoints=())
    ballast = engine._pools.take(16 * (engine._pools.target.num_free - 5))
    running = submit_all(engine, (5,))  # 41 + 23 positions: 4 pages of 16
    engine.step()
    with pytest.raises(CapacityError, match=r"^pages: need 3, have 1 of 24; draft pages: need 3"):
        submit_all(engine, (1,), wait=False)
    waiting = submit_all(engine, (1,))
    with pytest.raises(CapacityError, match="queue: need it empty, have 1 waiting"):
        submit_all(engine, (2,), wait=False)
    engine.step()
    assert waiting[1].tokens == [] and len(engine._schedule.rows) == 1
    finish(engine, ballast)
    assert_as_alone(running | waiting)
    assert submit_all(engine, (0,), wait=False)[0] is not None
    finish(engine, ballast)


def test_out_of_lanes_is_refused_and_what_can_never_fit_is_refused_at_once():
    engine = scenes.engine()
    submit_all(engine, (0, 1, 2), wait=False)
    with pytest.raises(CapacityError, match="lanes: need 1, have 0 of 3"):
        submit_all(engine, (3,), wait=False)
    finish(engine)
    engine.models = types.SimpleNamespace(
        run=types.SimpleNamespace(pages=3, max_context=128), target=engine.models.target
    )
    with pytest.raises(CapacityError, match="pages: need 4, have 3 in the whole pool"):
        submit_all(engine, (5,))


def test_a_request_that_nothing_can_make_room_for_is_an_error_not_a_hang():
    engine = scenes.engine(checkpoints=())
    engine._pools.take(16 * (engine._pools.target.num_free - 1))
    (request,) = submit_all(engine, (5,)).values()
    with pytest.raises(CapacityError, match="pages: need 4, have 1"):
        engine.wait_for(request)
    engine.cancel(request)
    assert engine.idle


def failing_once(function, at):
    """The function, which raises on its call number `at` before it does anything."""
    calls = iter(range(10**6))

    def wrapped(*args, **kwargs):
        if next(calls) == at:
            raise Planted
        return function(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize(
    "place",
    ["preview", "account", "publish", "commit", "advance", "result", "last_result", "draw"],
)
def test_an_exception_at_any_place_of_a_step_costs_nobody_a_token(monkeypatch, place, at):
    """After accept, in the host part of commit, in accounting, in publication."""
    engine = scenes.engine()
    requests = submit_all(engine, (0, 1, 3, 5, 6))
    if place in ("commit", "advance", "result", "last_result"):
        monkeypatch.setattr(
            engine._lanes, place, failing_once(getattr(engine._lanes, place), at)
        )
    elif place == "draw":
        original = engine._lanes.first_token

        def first_token(*args):
            token = original(*args)
            if args[0] == at % 3 and engine not in failed:
                failed.add(engine)
                raise Planted
            return token

        failed = set()
        monkeypatch.setattr(engine._lanes, "first_token", first_token)
    else:
        planted = failing_once(getattr(schedule, place), at)
        monkeypatch.setattr(schedule, place, planted)
        if place == "preview":  # of rounds; the schedule's own is that of first tokens
            monkeypatch.setattr(rows, place, planted)
    faults = 0
    while not engine.idle:
        try:
            engine.step()
        except Planted:
            faults += 1
        check(engine)
    assert faults == 1
    assert_as_alone(requests)


def test_a_device_that_loses_its_state_ends_the_rows_and_serves_the_next(monkeypatch):
    engine = scenes.engine()
    requests = submit_all(engine, (3, 5, 6, 7))
    for _ in range(4):
        engine.step()

    def lose(*_):
        for leaf in jax.tree.leaves(engine._lanes.state):
            leaf.delete()
        raise Planted

    with monkeypatch.context() as patch:
        patch.setattr(engine._lanes, "advance", lose)
        with pytest.raises(Planted):
            engine.step()
    check(engine)
    assert [requests[n].finish_reason for n in (3, 5, 6)] == [FinishReason.FAULT] * 3
    for leaf in jax.tree.leaves(engine._lanes.state):
        leaf.delete()  # outside a step, too
    engine.cancel(requests[3])
    finish(engine)
    assert_as_alone({7: requests[7]})


def test_a_nan_prompt_ends_its_row_alone():
    models, params = scenes.pair()
    embedding = params.target["embedding"].at[prompts()[3][0]].set(np.nan)
    ill = params.replace(target={**params.target, "embedding": embedding})
    engine = scenes.Engine(models, ill)
    requests = submit_all(engine, (0, 3, 4))
    finish(engine)
    assert requests[3].finish_reason is FinishReason.FAULT and requests[3].tokens == []
    assert_as_alone({n: requests[n] for n in (0, 4)})


def test_generate_runs_text_and_ids_and_cancels_all_if_one_cannot_be_run():
    engine = scenes.engine()
    letters = scenes.Letters()
    texts = [letters.decode(prompts()[n]) for n in (0, 2)]
    outputs = engine.generate([texts[0], prompts()[2]], max_new_tokens=6)
    assert [output.tokens for output in outputs] == [alone(prompts()[n], 6).tokens for n in (0, 2)]
    assert [output.text for output in outputs] == [letters.decode(o.tokens) for o in outputs]
    assert [output.statistics.prompt_tokens for output in outputs] == [3, 12]
    with pytest.raises(ValueError, match="prompt: expected ids"):
        engine.generate([texts[0], [999]], max_new_tokens=6)
    assert engine.idle


def test_a_request_of_another_engine_is_an_error_not_a_hang():
    request = scenes.engine().submit(prompts()[0], max_new_tokens=2)
    with pytest.raises(ValueError, match="request: expected one of this engine"):
        scenes.engine().wait_for(request)


def test_supplied_embeddings_take_the_place_of_tokens_and_are_never_reused():
    """Rows of the embedding under other ids: the text is that of the ids they stand for."""
    models, params = scenes.pair()
    engine = scenes.engine()
    prompt = list(prompts()[1])
    index = [2, 15, 16, 29]
    masked = [0 if place in index else token for place, token in enumerate(prompt)]
    rows = np.asarray(params.target["embedding"])[[prompt[place] for place in index]]
    for _ in range(2):
        request = engine.submit(
            masked, max_new_tokens=9, embeddings=scenes.embeddings(rows, index, len(prompt))
        )
        engine.wait_for(request)
        assert tuple(request.tokens) == alone(prompt, 9).tokens
        assert request.statistics.reused_tokens == 0
    plain = engine.submit(masked, max_new_tokens=9)
    assert engine.wait_for(plain).tokens == alone(masked, 9).tokens
    assert plain.statistics.reused_tokens == 0


@pytest.mark.slow
def test_trees_by_live_rows_say_what_trees_say_alone():
    """Greedy under a table of widths, sampled under one width; forks at every round too."""
    models, params = scenes.pair("dflash2")
    mixed = [controls(n) for n in (0, 1, 3)]
    for widths, sampling in (((8, 6, 0), [scenes.GREEDY] * 3), ((8,), mixed)):
        engine = scenes.Engine(models, params, tree_nodes=widths)
        requests = [
            engine.submit(prompts()[n], max_new_tokens=20, sampling=one)
            for n, one in zip((1, 3, 4), sampling, strict=True)
        ]
        children = []
        while not engine.idle:
            for request in requests:
                if request.tokens and request.finish_reason is None and len(children) < 4:
                    children.append((engine.fork(request)[0], request))
            engine.step()
            check(engine)
        for n, request, one in zip((1, 3, 4), requests, sampling, strict=True):
            (expected,) = scenes.generate(
                models, params, [prompts()[n]], max_new_tokens=20, sampling=one,
                tree_nodes=widths,
            )
            assert tuple(request.tokens) == expected.tokens
        assert len(children) == 4
        assert all(child.tokens == request.tokens for child, request in children)
        assert any(8 in request.statistics.widths for request in requests)
