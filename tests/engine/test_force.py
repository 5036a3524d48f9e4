"""Forced tokens: published, counted, charged, processed; what follows is what their prompt says."""

import dataclasses

import numpy as np
import pytest

from dflash_jax.engine.request import Embeddings, FinishReason
from tests.engine import scenes
from tests.engine.scenes import GREEDY, alone, prompts, sampled

BUDGET = 36


def running(engine, tokens, sampling=GREEDY, **options):
    """A request that has published at least so many tokens."""
    request = engine.submit(
        prompts()[1], max_new_tokens=BUDGET, sampling=sampling, **options
    )
    while len(request.tokens) < tokens:
        engine.step()
    return request


@pytest.mark.parametrize("count", [1, 2, 17])
def test_the_text_goes_on_from_the_forced_tokens_and_others_do_not_notice(count):
    """17 is longer than a chunk."""
    engine = scenes.engine()
    other = engine.submit(prompts()[6], max_new_tokens=30, sampling=sampled(1))
    request = running(engine, 5)
    said, ids = list(request.tokens), list(range(40, 40 + count))
    engine.force(request, ids)
    assert request.tokens == said + ids
    state, row = engine._lanes.state.sequence, engine._schedule.row_of(request)
    assert state.frontier[row.lane] == state.context_frontier[row.lane] == request.frontier
    assert state.anchor[row.lane] == ids[-1]
    assert state.remaining[row.lane] == request.remaining == BUDGET - len(said) - count
    counts = np.bincount(request.tokens, minlength=state.counts.shape[1])
    assert np.array_equal(state.counts[row.lane], counts)
    scenes.finish(engine)
    expected = alone((*prompts()[1], *said, *ids), BUDGET - len(said) - count)
    assert tuple(request.tokens[len(said) + count :]) == expected.tokens
    assert request.statistics.forced_tokens == count
    assert request.text == scenes.Letters().decode(request.tokens)
    assert tuple(other.tokens) == alone(prompts()[6], 30, sampled(1)).tokens


def test_forcing_right_after_the_first_token_and_twice():
    engine = scenes.engine()
    request = running(engine, 1)
    said = list(request.tokens)
    engine.force(request, [50, 51])
    engine.force(request, [52])
    scenes.finish(engine)
    forced = [*said, 50, 51, 52]
    expected = alone((*prompts()[1], *forced), BUDGET - len(forced))
    assert request.tokens == [*forced, *expected.tokens]


def test_forced_tokens_behind_a_picture_keep_its_rotation():
    """As a prompt that holds them at positions that go on from the picture's."""
    line = np.repeat(9 * np.arange(30, dtype=np.int32)[:, None], 3, axis=1)
    rows, index = np.ones((1, 64), np.float32), np.array([7])
    given = Embeddings(rows=rows, index=index, positions=line, rope_delta=9 * 30 - 30)
    engine = scenes.engine()
    request = running(engine, 5, embeddings=given)
    said, ids = list(request.tokens), list(range(40, 60))
    engine.force(request, ids)
    scenes.finish(engine)
    prompt = [*prompts()[1], *said, *ids]
    behind = np.repeat(np.arange(30, len(prompt), dtype=np.int32)[:, None], 3, axis=1)
    longer = dataclasses.replace(
        given, positions=np.concatenate([line, behind + np.int32(given.rope_delta)])
    )
    expected = engine.submit(
        prompt, max_new_tokens=BUDGET - len(said) - 20, embeddings=longer
    )
    scenes.finish(engine)
    assert request.tokens == [*said, *ids, *expected.tokens]


def test_the_same_seed_and_forced_tokens_say_the_same_again():
    texts = []
    for others in (0, 2):
        engine = scenes.engine()
        for n in range(others):
            engine.submit(prompts()[n], max_new_tokens=40)
        request = running(engine, 5, sampled(5))
        engine.force(request, [9] * (8 - len(request.tokens)) + [7])
        scenes.finish(engine)
        texts.append(tuple(request.tokens))
    assert texts[0] == texts[1]


def test_an_eos_a_stop_and_the_budget_among_forced_tokens_end_the_request_there():
    engine = scenes.engine()
    for options, ids, kept, reason in (
        ({"eos_ids": [60]}, [1, 60, 2], 2, FinishReason.EOS),
        ({"stop_sequences": [[1, 2]]}, [1, 2, 3], 2, FinishReason.STOP),
        ({}, [3] * 50, None, FinishReason.LENGTH),
    ):
        request = running(engine, 4, **options)
        said = list(request.tokens)
        engine.force(request, ids)
        kept = BUDGET - len(said) if kept is None else kept
        assert request.tokens == said + ids[:kept]
        assert request.finish_reason is reason
        scenes.check(engine)
        follow = engine.submit((*prompts()[1], *request.tokens, 8), max_new_tokens=3)
        scenes.finish(engine)
        assert follow.statistics.reused_tokens == request.frontier
        assert tuple(follow.tokens) == alone(follow.prompt, 3).tokens


def test_faults_of_the_caller_and_of_the_device(monkeypatch):
    engine = scenes.engine()
    waiting = engine.submit(prompts()[1], max_new_tokens=4)
    with pytest.raises(ValueError, match="request: expected one that runs, .* waits"):
        engine.force(waiting, [1])
    engine.step()
    with pytest.raises(ValueError, match="expected one that has published a token, got none"):
        engine.force(waiting, [1])
    scenes.finish(engine)
    with pytest.raises(ValueError, match="request: expected one that runs, .* has ended"):
        engine.force(waiting, [1])
    request, other = running(engine, 3), engine.submit(prompts()[2], max_new_tokens=9)
    for ids in ([], [250], "ab"):
        with pytest.raises(ValueError, match="ids: expected"):
            engine.force(request, ids)
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(engine._lanes, "resume", lambda *_: (_ for _ in ()).throw(OSError))
        engine.force(request, [1])
    scenes.finish(engine)
    assert request.finish_reason is FinishReason.FAULT
    assert tuple(other.tokens) == alone(prompts()[2], 9).tokens
