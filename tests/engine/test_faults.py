"""What callers, tokenizers and files may do wrong costs the others nothing and is never silent."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from dflash_jax.engine import lanes
from dflash_jax.engine.request import Embeddings, FinishReason
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import images
from tests.engine import scenes

PROMPTS = scenes.prompts()
HIDDEN = scenes.pair()[0].target.hidden


def run(engine, request, tokens):
    """Steps until a request has said so much."""
    while len(request.tokens) < tokens:
        engine.step()
    return request


def alone(prompt, tokens):
    engine = scenes.engine()
    return engine.wait_for(engine.submit(prompt, max_new_tokens=tokens)).tokens


def supplied(**changes):
    length = len(PROMPTS[0])
    fields = dict(rows=np.zeros((1, HIDDEN), np.float32), index=np.array([1]),
                  positions=np.zeros((length, 3), np.int32), rope_delta=0)
    return Embeddings(**(fields | changes))


@pytest.mark.parametrize("changes, name", [
    ({"rope_delta": None}, "rope_delta"),
    ({"rope_delta": 2**40}, "rope_delta"),
    ({"rows": [[0.0] * HIDDEN]}, "rows"),
    ({"rows": np.full((1, HIDDEN), "x")}, "rows"),
    ({"index": np.array([1.0])}, "index"),
    ({"positions": np.full((len(PROMPTS[0]), 3), -1)}, "positions"),
])
def test_embeddings_that_cannot_run_are_refused_at_submission(changes, name):
    engine = scenes.engine()
    with pytest.raises(ValueError, match=f"embeddings.{name}: expected"):
        engine.submit(PROMPTS[0], max_new_tokens=3, embeddings=supplied(**changes))
    assert engine.idle


class Moody(scenes.Letters):
    """Cannot decode one id, once it has been told so."""

    broken = False

    def decode(self, ids):
        if self.broken and 77 in ids:
            raise RuntimeError("no text for 77")
        return super().decode(ids)


def test_a_tokenizer_that_keeps_failing_ends_the_request_it_fails_on():
    moody = Moody()
    engine = scenes.Engine(*scenes.pair(), tokenizer=moody)
    odd = engine.submit(PROMPTS[0], max_new_tokens=20)
    run(engine, odd, 2)
    odd.decode = moody.decode
    others = [engine.submit(prompt, max_new_tokens=12) for prompt in PROMPTS[1:3]]
    for other in others:
        other.decode = None
        other.watch = dataclasses.replace(other.watch, decode=None)
    moody.broken, raised = True, 0
    for _ in range(60):
        try:
            if not engine.step():
                break
        except RuntimeError:
            raised += 1
    assert raised and odd.finish_reason is FinishReason.FAULT
    for prompt, other in zip(PROMPTS[1:3], others, strict=True):
        assert tuple(other.tokens) == alone(prompt, 12)


def steps_with_faults(engine, kind=RuntimeError):
    """Steps until nothing is left; how many of them raised."""
    raised = 0
    for _ in range(200):
        try:
            if engine.idle or not engine.step():
                return raised
        except kind:
            raised += 1
        scenes.check(engine)
    raise AssertionError("it goes on for ever")


def test_a_first_token_that_has_no_text_stops_nobody_else():
    engine = scenes.engine()
    others = [engine.submit(PROMPTS[3], max_new_tokens=12)]
    odd = engine.submit(PROMPTS[0], max_new_tokens=20)
    others.append(engine.submit(PROMPTS[1], max_new_tokens=12))
    moody = Moody()
    moody.broken, odd.decode = True, moody.decode
    odd.watch = dataclasses.replace(odd.watch, decode=lambda ids: moody.decode([77]))
    assert steps_with_faults(engine) == 2
    assert (odd.finish_reason, odd.tokens) == (FinishReason.FAULT, [])
    for prompt, other in zip((PROMPTS[3], PROMPTS[1]), others, strict=True):
        assert tuple(other.tokens) == alone(prompt, 12)


@pytest.mark.parametrize("place", ["prefill", "begin", "from_host", "copy"])
def test_a_request_that_cannot_be_read_or_placed_stops_nobody_else(monkeypatch, place):
    """Whatever the device raises for it, again and again, it ends at the second time."""
    engine = scenes.engine(checkpoints=(), host_bytes=None)
    going = run(engine, engine.submit(PROMPTS[0], max_new_tokens=30), 1)
    image = engine.checkpoint(going)
    if place == "from_host":
        engine.replicate(image, drop_device=True)

    def fail(*args):
        raise RuntimeError(place)

    with monkeypatch.context() as patch:
        patch.setattr(engine._lanes, place, fail)
        odd = (
            engine.restore(image) if place in ("from_host", "copy")
            else engine.submit(PROMPTS[3], max_new_tokens=5)
        )
        late = engine.restore(image) if place in ("prefill", "begin") else None
        assert steps_with_faults(engine) == 2
    assert odd.finish_reason is FinishReason.FAULT
    assert tuple(going.tokens) == alone(PROMPTS[0], 30)
    if late is not None:
        assert tuple(late.tokens) == alone(PROMPTS[0], 30)
    again = engine.restore(image)  # nothing has happened to it
    assert engine.wait_for(again).tokens == alone(PROMPTS[0], 30)
    scenes.check(engine)


class Broken:
    """An array whose program failed."""

    def __array__(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def copy_to_host_async(self):
        pass


@pytest.mark.parametrize("where", ["round", "first token", "host copy"])
def test_a_program_that_failed_on_the_device_ends_its_rows_and_the_next_are_served(
    monkeypatch, where
):
    """Known only when its numbers are read: the state that it left is lost with them."""
    engine = scenes.engine(checkpoints=(), host_bytes=None)
    rows = [run(engine, engine.submit(PROMPTS[0], max_new_tokens=30), 2)]
    image = engine.checkpoint(rows[0])
    rows += [engine.submit(PROMPTS[n], max_new_tokens=30) for n in (1, 2)]
    late = engine.submit(PROMPTS[3], max_new_tokens=12)

    with monkeypatch.context() as patch, pytest.raises(jax.errors.JaxRuntimeError):
        if where == "round":
            patch.setattr(lanes, "read_later", lambda summary: Broken())
        elif where == "first token":
            patch.setattr(lanes, "_first", lambda models, params, state, *_: (state, Broken()))
        else:
            patch.setattr(images, "read_slot", lambda *_: Broken())
            engine.replicate(image)
        while True:
            engine.step()
    steps_with_faults(engine)
    assert rows[0].finish_reason is FinishReason.FAULT
    assert tuple(late.tokens) == alone(PROMPTS[3], 12)
    assert image.dropped
    scenes.check(engine)


@pytest.mark.parametrize("call", ["_set_row", "begin"])
def test_a_request_placed_at_once_recovers_a_state_that_the_one_before_it_lost(monkeypatch, call):
    engine = scenes.engine(checkpoints=())
    going = run(engine, engine.submit(PROMPTS[0], max_new_tokens=30), 2)
    original = getattr(lanes, call)

    def interrupted(*args):
        original(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lanes, call, interrupted)
        engine.submit(PROMPTS[1], max_new_tokens=5, wait=False)
    request = engine.submit(PROMPTS[3], max_new_tokens=12, wait=False)
    assert tuple(engine.wait_for(request).tokens) == alone(PROMPTS[3], 12)
    assert going.finish_reason is FinishReason.FAULT
    scenes.check(engine)


@pytest.mark.parametrize("call", ["_set_row", "advance", "begin", "prefill_chunk", "_first"])
def test_a_call_that_is_interrupted_behind_the_device_ends_its_rows_and_the_next_are_served(
    monkeypatch, call
):
    """It has taken the memory of what it was to replace, and nobody has what it made of it."""
    engine = scenes.engine(checkpoints=())
    going = run(engine, engine.submit(PROMPTS[0], max_new_tokens=30), 2)
    engine.submit(PROMPTS[1], max_new_tokens=30)
    late = [engine.submit(PROMPTS[3], max_new_tokens=12) for _ in range(3)]

    original = getattr(lanes, call)

    def interrupted(*args):
        original(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lanes, call, interrupted)
        while engine.step():
            pass
    assert going.finish_reason is FinishReason.FAULT
    scenes.finish(engine)
    assert tuple(late[-1].tokens) == alone(PROMPTS[3], 12)


def test_an_image_that_cannot_be_entered_is_not_left_behind(monkeypatch):
    engine = scenes.engine(checkpoints=(), device_bytes=1, host_bytes=None)
    request = run(engine, engine.submit(PROMPTS[0], max_new_tokens=12), 1)

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine._lanes, "to_host", fail)
        with pytest.raises(MemoryError):
            engine.checkpoint(request)
    assert len(engine._store) == 0
    scenes.check(engine)
    assert engine.wait_for(request).tokens == alone(PROMPTS[0], 12)


def test_an_image_that_could_not_be_taken_over_keeps_its_own_pages(monkeypatch):
    engine = scenes.engine(checkpoints=("turn",))
    ballast = [engine._pools.take(16) for _ in range(scenes.SLOTS - 1)]
    request = engine.submit(PROMPTS[1], max_new_tokens=8)
    engine.wait_for(request)
    (image,) = engine._store
    more = engine.submit([*request.ledger, 5], max_new_tokens=60)

    def fail(*args):
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(engine._lanes, "resume", fail)
        with pytest.raises(RuntimeError):
            engine.step()
    assert len(image.holding.target_pages) == engine._pools.pages_of(image.frontier)
    scenes.check(engine, *ballast)
    assert engine.wait_for(more).tokens == alone(more.prompt, 60)
    assert more.statistics.reused_tokens == image.frontier


@pytest.mark.parametrize("answer", [False, np.False_])
def test_a_callback_cancels_by_answering_false_of_either_kind(answer):
    engine = scenes.engine()
    request = engine.submit(PROMPTS[0], max_new_tokens=30, on_tokens=lambda *_: answer)
    engine.wait_for(request)
    assert (request.finish_reason, len(request.tokens)) == (FinishReason.CANCELLED, 1)


@pytest.mark.parametrize("way", ["restore", "fork"])
def test_changed_stops_of_a_copy_are_in_force(way):
    engine = scenes.engine()
    request = run(engine, engine.submit(PROMPTS[0], max_new_tokens=20), 1)
    image = engine.checkpoint(request)
    whole = alone(PROMPTS[0], 20)
    # The first token that has not come before.
    start = next(i for i in range(len(request.tokens), 20) if whole[i] not in whole[:i])
    changes = {"stop_sequences": [list(whole[start - 1 : start + 1])]}
    copy = (
        engine.restore(image, **changes) if way == "restore" else engine.fork(request, **changes)[0]
    )
    output = engine.wait_for(copy)
    assert output.finish_reason is FinishReason.STOP
    assert output.tokens == whole[: start + 1]
    string = scenes.Letters().decode(whole[start : start + 1])
    text = engine.wait_for(engine.restore(image, stop_strings=[string])).text
    assert text == scenes.Letters().decode(whole[:start])
    with pytest.raises(ValueError, match="stop_strings, stop_sequences: expected none"):
        engine.restore(image, stop_sequences=[list(image.origin.tokens[:1])])


@pytest.mark.parametrize("options", [
    {"count": 3, "wait": False},
    {"count": 2, "sampling": [SamplingParams(), SamplingParams(logit_bias={9999: 1.0})]},
])
def test_a_fork_that_cannot_be_made_whole_is_not_made(options):
    engine = scenes.engine(checkpoints=())
    request = run(engine, engine.submit(PROMPTS[0], max_new_tokens=12), 1)
    with pytest.raises((ValueError, RuntimeError)):
        engine.fork(request, **options)
    assert engine.wait_for(request).tokens == alone(PROMPTS[0], 12)
    assert engine.idle


def test_a_request_is_cancelled_although_the_callback_of_another_raises():
    engine, armed = scenes.engine(checkpoints=()), [False]

    def bad(number, tokens):
        if armed[0]:
            raise KeyError(number)

    first = engine.submit(PROMPTS[0], max_new_tokens=30)
    others = [engine.submit(PROMPTS[i], max_new_tokens=30, on_tokens=bad) for i in (1, 2)]
    run(engine, others[1], 2)
    armed[0] = True
    with pytest.raises(KeyError):
        while True:
            engine.step()
    with contextlib.suppress(KeyError):  # there may be more to tell the others
        engine.cancel(first)
    assert first.finish_reason is FinishReason.CANCELLED
    armed[0] = False
    assert engine.wait_for(others[0]).tokens == alone(PROMPTS[1], 30)


def test_generate_leaves_nothing_running_when_a_callback_raises():
    engine, calls = scenes.engine(checkpoints=()), []

    def bad(number, tokens):
        calls.append(number)
        if len(calls) > 3:
            raise KeyError(number)

    with pytest.raises(KeyError):
        engine.generate([PROMPTS[0]] * 3, max_new_tokens=30, on_tokens=bad)
    while engine.step():
        pass
    assert engine.idle


def test_images_and_requests_of_another_engine_are_refused():
    first, second = scenes.engine(), scenes.engine()
    request = run(first, first.submit(PROMPTS[0], max_new_tokens=12), 1)
    image = first.checkpoint(request)
    with pytest.raises(ValueError, match="image: expected one of this engine"):
        second.restore(image)
    with pytest.raises(ValueError, match="request: expected one of this engine"):
        second.cancel(request)
    assert first.wait_for(request).tokens == alone(PROMPTS[0], 12)
