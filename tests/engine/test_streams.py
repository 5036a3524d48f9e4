"""Streams of a request's pieces: complete, side by side, and left at any time."""

import asyncio
import contextlib
import gc

import pytest

from dflash_jax.engine.request import FinishReason
from tests.engine import scenes
from tests.engine.scenes import alone, controls, prompts


def submit(engine, n=4, **options):
    return engine.submit(
        prompts()[n], max_new_tokens=9 + 3 * n, sampling=controls(n), **options
    )


def assert_as_alone(request, n):
    expected = alone(prompts()[n], 9 + 3 * n, controls(n))
    assert tuple(request.tokens) == expected.tokens
    assert request.finish_reason is FinishReason.LENGTH


def test_streams_of_text_join_to_the_output_and_run_side_by_side():
    engine = scenes.engine()

    async def read(n):
        request = submit(engine, n)
        pieces = [piece async for piece in engine.astream(request)]
        assert [t for piece in pieces for t in piece.tokens] == request.tokens
        assert "".join(piece.text for piece in pieces) == request.output().text
        return request

    async def everything():
        return await asyncio.gather(*[read(n) for n in range(5)])

    for n, request in enumerate(asyncio.run(everything())):
        assert_as_alone(request, n)
    pieces = list(engine.stream(submit(engine, 2)))
    assert len(pieces) > 3
    letters = scenes.Letters()
    assert "".join(p.text for p in pieces) == letters.decode(alone(prompts()[2], 15).tokens)


def broken_off(stream):
    for _ in stream:
        break


def read_once_and_closed(stream):
    next(stream)
    stream.close()


def closed_twice(stream):
    stream.close()
    stream.close()


async def left_by_async_for(stream):
    async for _ in stream:
        break


async def closed_by_await(stream):
    async with contextlib.aclosing(stream):
        pass


async def cancelled_as_a_task(stream):
    async def read():
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    while not stream._request.tokens:
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [
    broken_off, read_once_and_closed, lambda stream: stream.close(), closed_twice,
    lambda stream: None, left_by_async_for, closed_by_await, cancelled_as_a_task,
], ids=["break", "next and close", "close at once", "close twice", "drop unread", "async break",
        "aclose at once", "task cancelled"])
def test_leaving_a_stream_cancels_its_request_and_nobody_else(leave):
    """Also one of which nothing has been read."""
    engine = scenes.engine(checkpoints=())
    other, request = submit(engine, 3), submit(engine)
    if asyncio.iscoroutinefunction(leave):
        asyncio.run(leave(engine.astream(request)))
    else:
        leave(engine.stream(request))
    assert request.finish_reason is FinishReason.CANCELLED
    scenes.finish(engine)
    assert_as_alone(other, 3)


def test_a_stream_that_has_come_to_its_end_stays_there():
    engine = scenes.engine()
    request = submit(engine)
    stream = engine.stream(request)
    count = len(list(stream))
    assert list(stream) == [] and len(list(engine.stream(request))) == count
    stream.close()
    assert_as_alone(request, 4)


def test_a_stream_let_go_in_the_middle_of_a_step_cancels_when_the_step_is_over(monkeypatch):
    """As the garbage collector may do at any allocation: here between decision and commit."""
    engine = scenes.engine(checkpoints=())
    other, request = submit(engine, 3), submit(engine, 5)
    circle = [engine.stream(request)]
    circle.append(circle)
    while not (request.tokens and other.tokens):
        engine.step()
    advance, said = engine._lanes.advance, []

    def collecting():
        circle.clear()
        gc.collect()
        said.append((request.finish_reason, len(request.tokens)))
        advance()

    monkeypatch.setattr(engine._lanes, "advance", collecting)
    engine.step()
    assert said[0][0] is None and len(request.tokens) > said[0][1]  # the round still counted
    assert request.finish_reason is FinishReason.CANCELLED
    scenes.finish(engine)
    assert_as_alone(other, 3)


def test_what_another_requests_callback_raises_does_not_end_a_stream():
    engine = scenes.engine()

    def bad(number, tokens):
        if len(other.tokens) > 3:
            raise KeyError("another's")

    other, request = submit(engine, 0, on_tokens=bad), submit(engine)
    with pytest.raises(KeyError):
        for _ in engine.stream(request):
            pass
    assert request.finish_reason is None
    other.on_tokens = None
    engine.wait_for(request)
    assert_as_alone(request, 4)


def test_a_stream_goes_on_after_what_another_request_raised():
    engine, raised = scenes.engine(), []

    def bad(number, tokens):
        if len(raised) < 3:
            raise KeyError("another's")

    submit(engine, 0, on_tokens=bad)
    request = submit(engine)
    stream, pieces = engine.stream(request), []
    while True:
        try:
            pieces.append(next(stream))
        except KeyError as error:
            raised.append(error)
        except StopIteration:
            break
    assert len(raised) == 3
    assert [token for piece in pieces for token in piece.tokens] == request.tokens
    assert_as_alone(request, 4)
