"""A callback may do anything to the engine but take a step, and nobody's text changes.

While a callback runs, the device already works on the next round.
"""

import pytest

from dflash_jax.engine.pages import CapacityError
from dflash_jax.engine.request import FinishReason
from tests.engine import scenes
from tests.engine.scenes import GREEDY, alone, prompts, sampled

BOTH = pytest.mark.parametrize("sampling", [GREEDY, sampled(3)], ids=["greedy", "sampled"])


def submit(engine, n, budget=30, sampling=GREEDY, **options):
    return engine.submit(prompts()[n], max_new_tokens=budget, sampling=sampling, **options)


def assert_whole(request, n, budget=30, sampling=GREEDY):
    assert tuple(request.tokens) == alone(prompts()[n], budget, sampling).tokens
    assert request.finish_reason is FinishReason.LENGTH


@BOTH
@pytest.mark.parametrize("turn", range(1, 5))
def test_a_callback_may_fork_keep_and_restore_itself_and_others(turn, sampling):
    engine, copies = scenes.engine(checkpoints=(), host_bytes=None), []

    def on_tokens(number, tokens):
        turns.append(number)
        if len(turns) == turn:
            for n, request in ((4, talker), (3, other)):
                copies.extend((n, copy) for copy in engine.fork(request, 2))
                image = engine.checkpoint(request)
                engine.replicate(image, drop_device=True)
                copies.append((n, engine.restore(image)))
                images.append(image)

    turns, images = [], []
    other = submit(engine, 3, sampling=sampling)
    while not other.tokens:
        engine.step()
    talker = submit(engine, 4, sampling=sampling, on_tokens=on_tokens)
    scenes.finish(engine)
    assert len(copies) == 6
    for n, request in ((4, talker), (3, other), *copies):
        assert_whole(request, n, sampling=sampling)
    for image in images:
        engine.drop(image)
    assert engine._pools.num_free_slots == scenes.SLOTS


@BOTH
def test_a_callback_may_submit_into_the_lane_that_another_has_just_left(sampling):
    """The lane's old round is still in flight: it counts for nobody."""
    engine, made = scenes.engine(checkpoints=()), []

    def on_tokens(number, tokens):
        if victim.tokens and not made:
            engine.cancel(victim)
            made.append(submit(engine, 2, 15, sampling, wait=False))
            with pytest.raises(CapacityError, match="lanes: need 1, have 0 of 3"):
                submit(engine, 2, 15, wait=False)

    other, victim = submit(engine, 3, sampling=sampling), submit(engine, 5)
    talker = submit(engine, 0, sampling=sampling, on_tokens=on_tokens)
    while not made:
        engine.step()
    assert engine._schedule._flight is not None
    scenes.finish(engine)
    assert victim.finish_reason is FinishReason.CANCELLED
    assert_whole(made[0], 2, 15, sampling)
    assert_whole(other, 3, sampling=sampling)
    assert_whole(talker, 0, sampling=sampling)


@pytest.mark.parametrize("who", ["itself", "another"])
def test_a_callback_may_force_tokens_on_itself_and_on_others(who):
    engine, said = scenes.engine(checkpoints=()), []

    def on_tokens(number, tokens):
        if len(talker.tokens) > 3 and not said:
            said.append(None)  # what is forced comes here too
            engine.force(target(), [40, 41, 42])
            said[0] = list(target().tokens)

    def target():
        return talker if who == "itself" else other

    other = submit(engine, 3)
    while not other.tokens:
        engine.step()
    talker = submit(engine, 4, on_tokens=on_tokens)
    scenes.finish(engine)
    (before,), n = said, 4 if who == "itself" else 3
    assert before[-3:] == [40, 41, 42]
    rest = alone((*prompts()[n], *before), 30 - len(before)).tokens
    assert tuple(target().tokens) == (*before, *rest)
    assert_whole(*((other, 3) if who == "itself" else (talker, 4)))


def test_a_callback_may_drop_the_image_that_a_request_waits_for():
    engine = scenes.engine(checkpoints=())
    request = submit(engine, 3)
    while not request.tokens:
        engine.step()
    image = engine.checkpoint(request)
    talker = submit(engine, 0, on_tokens=lambda *_: engine.drop(image))
    third = submit(engine, 2)
    waiting = engine.restore(image)
    scenes.finish(engine)
    assert (waiting.finish_reason, image.dropped) == (FinishReason.CANCELLED, True)
    for one, n in ((request, 3), (talker, 0), (third, 2)):
        assert_whole(one, n)
