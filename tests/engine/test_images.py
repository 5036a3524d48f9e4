"""Forks, checkpoints, replicas and restores go on as if nothing had happened.

Before every step the bytes of free slots and free pages are overwritten.
"""


import jax
import numpy as np
import pytest

from dflash_jax.engine.pages import CapacityError
from dflash_jax.engine.request import FinishReason
from tests.engine import scenes
from tests.engine.scenes import GREEDY, alone, check, prompts, sampled

BUDGET = 40
CONTROLS = [GREEDY, sampled(3)]
BOTH = pytest.mark.parametrize("sampling", CONTROLS, ids=["greedy", "sampled"])
DRAFTS = pytest.mark.parametrize("draft", ["dflash", "dflash2"])


def started(engine, steps, sampling=GREEDY, n=1, budget=BUDGET):
    """A request of 30 prompt tokens after that many steps."""
    request = engine.submit(prompts()[n], max_new_tokens=budget, sampling=sampling)
    for _ in range(steps):
        engine.step()
    return request


def finish(engine):
    values = iter([np.nan, 1e30] * 1000)
    while not engine.idle:
        scenes.poison_free(engine, next(values))
        assert engine.step()
        check(engine)


def assert_whole(request, sampling, draft="dflash", n=1, budget=BUDGET):
    expected = alone(prompts()[n], budget, sampling, draft)
    assert tuple(request.tokens) == expected.tokens
    assert request.text == scenes.Letters().decode(request.tokens)


@DRAFTS
@BOTH
def test_a_fork_after_every_round_says_what_the_original_says(draft, sampling):
    """Waiting children keep their images on the host when slots are short."""
    engine = scenes.engine(draft, checkpoints=(), host_bytes=None)
    parent, children, accepted = started(engine, 1, sampling), [], set()
    while parent.finish_reason is None:
        scenes.poison_free(engine, np.nan)
        before = len(parent.tokens)
        children += engine.fork(parent)
        engine.step()
        accepted.add(len(parent.tokens) - before)
        check(engine)
    finish(engine)
    assert len(children) > 3 and len(accepted) > 1
    for request in (parent, *children):
        assert_whole(request, sampling, draft)
    assert len(engine._store) == 0 and engine._pools.num_free_slots == scenes.SLOTS


def test_n_forks_with_their_own_seeds_each_say_what_their_seed_says():
    """From the end of the prompt on, a fork under a seed is a request under that seed."""
    engine = scenes.engine(checkpoints=())
    parent = started(engine, 1, sampled(3))
    assert parent.tokens == []
    seeds = [sampled(seed) for seed in range(4, 9)]
    children = engine.fork(parent, 5, sampling=seeds)
    finish(engine)
    for child, sampling in zip(children, seeds, strict=True):
        assert_whole(child, sampling)
    assert_whole(parent, sampled(3))
    assert len({tuple(child.tokens) for child in children}) > 1


@DRAFTS
@BOTH
@pytest.mark.parametrize("where", ["device", "host"])
def test_restoring_a_smaller_frontier_after_the_ring_has_wrapped(draft, sampling, where):
    """The ring of 12 is overwritten more than twice after the last checkpoint was taken."""
    engine = scenes.engine(draft, checkpoints=(), host_bytes=None)
    request, images = started(engine, 2, sampling), []
    while len(request.tokens) < 14:
        if len(images) < 4:
            images.append(engine.checkpoint(request))
            if where == "host":
                engine.replicate(images[-1], drop_device=True)
        engine.step()
        check(engine)
    finish(engine)
    assert_whole(request, sampling, draft)
    for image in reversed(images):
        again = engine.restore(image)
        finish(engine)
        assert_whole(again, sampling, draft)
        again = engine.restore(image)  # an image is never changed
        finish(engine)
        assert_whole(again, sampling, draft)
        engine.drop(image)
    check(engine)
    assert engine._pools.num_free_slots == scenes.SLOTS


@DRAFTS
@BOTH
def test_pending_features_are_absorbed_before_a_copy_so_that_proposals_are_the_same(
    draft, sampling
):
    """While another prompt is read no round runs ahead, so features wait when the image is made."""
    engine = scenes.engine(draft, checkpoints=())
    request = started(engine, 6, sampling)
    engine.submit(prompts()[5], max_new_tokens=2)
    engine.step()
    sequence = engine._lanes.state.sequence
    assert sequence.frontier[0] > sequence.context_frontier[0]
    before = (request.statistics.rounds, request.statistics.accepted)
    again = engine.restore(engine.checkpoint(request))
    finish(engine)
    for one in (request, again):
        assert_whole(one, sampling, draft)
    counted = request.statistics
    assert again.statistics.rounds == counted.rounds - before[0]
    assert again.statistics.accepted == counted.accepted - before[1]


@BOTH
def test_an_ended_turn_with_more_budget_goes_on(sampling):
    """The turn ends by EOS, so its last round was cut; greedy tokens are those of one request."""
    whole = alone(prompts()[1], BUDGET, sampling).tokens
    engine = scenes.engine()
    request = engine.submit(
        prompts()[1], max_new_tokens=BUDGET, sampling=sampling, eos_ids=[whole[9]]
    )
    engine.wait_for(request)
    assert request.finish_reason is FinishReason.EOS and len(request.tokens) <= 10
    turn = engine.find(request.ledger)
    assert turn.tokens == (*prompts()[1], *request.tokens[:-1])
    again = engine.restore(turn, eos_ids=frozenset())
    finish(engine)
    assert len(again.tokens) == BUDGET
    if sampling is GREEDY:
        assert tuple(again.tokens) == whole
    silent = len(request.tokens) - 1  # the EOS id had no text, and still has none
    said = [*again.tokens[:silent], *again.tokens[silent + 1 :]]
    assert again.text == scenes.Letters().decode(said)
    other = engine.restore(turn, eos_ids=frozenset(), stop_strings=["\N{SNOWMAN}"])
    finish(engine)
    assert other.text == again.text


@DRAFTS
def test_e2_a_prefix_hit_has_the_acceptance_of_a_cold_run_position_by_position(draft):
    """The end of a prompt, the end of a turn, and a prompt that goes on from either."""
    warm = scenes.engine(draft)
    for n, sampling in ((1, GREEDY), (5, sampled(1)), (7, sampled(2))):
        said = warm.generate([prompts()[n]], max_new_tokens=12, sampling=sampling)[0].tokens
        for more in ((), (5, 9), (*said[:-1],), (*said, 8), (*said, *range(20))):
            prompt = (*prompts()[n], *more)
            request = warm.submit(prompt, max_new_tokens=15, sampling=sampling)
            finish(warm)
            cold = alone(prompt, 15, sampling, draft)
            assert tuple(request.tokens) == cold.tokens
            assert request.statistics.reused_tokens >= len(prompts()[n])
            for name in ("rounds", "drafted", "accepted", "accepted_by_position", "widths"):
                assert getattr(request.statistics, name) == getattr(cold.statistics, name), name


def test_e4_the_whole_of_a_repeated_prompt_is_reused_and_the_longest_image_wins():
    engine = scenes.engine()
    said = engine.generate([prompts()[1]], max_new_tokens=12)[0].tokens
    again = engine.submit(prompts()[1], max_new_tokens=3)
    engine.wait_for(again)
    assert again.statistics.reused_tokens == len(prompts()[1])
    turn = engine.submit((*prompts()[1], *said, 7), max_new_tokens=3)
    engine.wait_for(turn)
    assert turn.statistics.reused_tokens == len(prompts()[1]) + len(said) - 1


def test_one_different_token_anywhere_in_a_prefix_is_no_hit():
    engine = scenes.engine()
    engine.generate([prompts()[1]], max_new_tokens=12)
    for place in (0, 13, 29):
        other = list(prompts()[1])
        other[place] = (other[place] + 1) % 200
        request = engine.submit((*other, 4), max_new_tokens=5)
        engine.wait_for(request)
        assert request.statistics.reused_tokens == 0
        assert tuple(request.tokens) == alone((*other, 4), 5).tokens
    off = engine.submit(prompts()[1], max_new_tokens=5, reuse=False)
    engine.wait_for(off)
    assert off.statistics.reused_tokens == 0


def test_a_request_that_has_read_nothing_yet_can_be_forked_kept_and_restored(tmp_path):
    engine = scenes.engine(host_bytes=None)
    request = engine.submit(prompts()[1], max_new_tokens=BUDGET, wait=False)
    image = engine.checkpoint(request)
    assert image.frontier == 0
    again = engine.fork(request, 2) + [engine.restore(image)]
    engine.replicate(image, drop_device=True)
    engine.save(image, tmp_path)
    again += [engine.restore(image), engine.restore(engine.load(tmp_path))]
    other = engine.submit(prompts()[0], max_new_tokens=3)
    finish(engine)
    for one in (request, *again):
        assert_whole(one, GREEDY)
    assert tuple(other.tokens) == alone(prompts()[0], 3).tokens


def test_with_no_slot_to_spare_the_next_turn_takes_the_image_over():
    engine = scenes.engine(checkpoints=("turn",))
    ballast = [engine._pools.take(16) for _ in range(scenes.SLOTS - 1)]
    prompt, turns = prompts()[1], 0
    for turn in range(4):
        request = engine.submit(prompt, max_new_tokens=8, sampling=sampled(turn))
        scenes.finish(engine, *ballast)
        assert tuple(request.tokens) == alone(prompt, 8, sampled(turn)).tokens
        assert request.statistics.reused_tokens == (len(prompt) - 4 if turn else 0)
        prompt = (*prompt, *request.tokens, 3, 1, 4)
        turns += 1
    assert len(engine._store) == 1


def test_images_make_room_for_requests_least_recently_used_first():
    engine = scenes.engine(checkpoints=("turn",))
    for n in (0, 2, 3, 7):
        engine.generate([prompts()[n]], max_new_tokens=4)
    first = engine._store.longest_prefix((*prompts()[0], *alone(prompts()[0], 4).tokens))
    engine.generate([first.tokens + (1,)], max_new_tokens=2)  # used again: 2 is the oldest now
    kept = [image.origin.prompt for image in engine._store]
    assert prompts()[0] in kept and len(kept) == 5
    ballast = engine._pools.take(16 * (engine._pools.target.num_free - 1))
    request = engine.submit(prompts()[4], max_new_tokens=30)  # two pages, and one is free
    scenes.finish(engine, ballast)
    assert tuple(request.tokens) == alone(prompts()[4], 30).tokens
    left = [image.origin.prompt for image in engine._store]
    assert prompts()[2] not in left and prompts()[0] in left


def test_nothing_is_given_up_for_a_request_that_would_not_fit_even_then():
    engine = scenes.engine()
    for n in (0, 2, 4):
        engine.generate([prompts()[n]], max_new_tokens=4)
    before = list(engine._store)
    assert len(before) == 6
    ballast = engine._pools.take(16 * engine._pools.target.num_free)
    request = engine.submit(prompts()[5], max_new_tokens=80)  # eight pages; images hold seven
    with pytest.raises(CapacityError, match="pages: need 8, have 0 of 24"):
        engine.wait_for(request)
    engine.cancel(request)
    with pytest.raises(CapacityError, match="pages: need 8, have 0 of 24"):
        engine.submit(prompts()[5], max_new_tokens=80, wait=False)
    assert list(engine._store) == before
    check(engine, ballast)


def test_budgets_in_bytes_hold_on_the_device_and_on_the_host():
    probe = scenes.engine()
    one_page = probe._lanes.slot_bytes + probe._lanes.page_bytes
    engine = scenes.engine(
        checkpoints=("turn",), device_bytes=2 * one_page, host_bytes=one_page
    )
    for n in (0, 2, 4, 7):  # every turn fits one page
        engine.generate([prompts()[n]], max_new_tokens=3)
        check(engine)
        assert engine._store.device_bytes <= 2 * one_page
        assert engine._store.host_bytes <= one_page
    assert [image.holding is None for image in engine._store] == [True, False, False]
    assert len(engine._store) == 3
    oldest = next(iter(engine._store))
    again = engine.submit((*oldest.tokens, 1), max_new_tokens=5)
    finish(engine)
    assert again.statistics.reused_tokens == oldest.frontier
    assert tuple(again.tokens) == alone((*oldest.tokens, 1), 5).tokens


@pytest.mark.parametrize("children", [1, 3])
def test_when_nothing_runs_forks_go_past_a_request_that_lacks_the_pages_of_their_image(children):
    """Nobody else would give them back: the image stays for as long as a fork of it waits."""
    engine = scenes.engine(checkpoints=())
    ballast = engine._pools.take(16 * (engine._pools.target.num_free - 9))
    running = [started(engine, 0), *(started(engine, 0, n=n, budget=4) for n in (0, 2))]
    while len(running[0].tokens) < 4:
        engine.step()
    first = engine.submit(prompts()[5], max_new_tokens=80)  # eight pages; the image holds three
    forks = engine.fork(running[0], children)
    for request in forks:
        engine.wait_for(request)
        assert_whole(request, GREEDY)
    scenes.finish(engine, ballast)
    assert_whole(first, GREEDY, n=5, budget=80)


@pytest.mark.parametrize("host_bytes", [0, None])
def test_no_budget_drops_the_image_of_a_fork_before_its_copies_have_it(host_bytes):
    engine = scenes.engine(checkpoints=(), device_bytes=0, host_bytes=host_bytes)
    request = started(engine, 3)
    children = engine.fork(request, 2)
    finish(engine)
    for one in (request, *children):
        assert_whole(one, GREEDY)
    assert len(engine._store) == 0


def test_a_kept_image_is_refused_room_on_the_host_only_when_it_cannot_have_it():
    engine = scenes.engine(checkpoints=(), host_bytes=10)
    request = started(engine, 3)
    image = engine.checkpoint(request)
    with pytest.raises(CapacityError, match=r"host bytes: need \d+, have 10 of 10"):
        engine.replicate(image)
    with pytest.raises(ValueError, match="image: expected one with a host replica"):
        engine._store.release_device(image)
    finish(engine)
    assert_whole(request, GREEDY)
    engine.drop(image)
    with pytest.raises(ValueError, match="has been dropped"):
        engine.restore(image)


def test_without_a_slot_a_checkpoint_is_refused_and_the_request_goes_on():
    engine = scenes.engine(checkpoints=())
    request = started(engine, 4)
    ballast = [engine._pools.take(0) for _ in range(scenes.SLOTS - 1)]
    with pytest.raises(CapacityError, match="slots: need 1, have 0 of 7"):
        engine.checkpoint(request)
    with pytest.raises(CapacityError, match="slots: need 1, have 0 of 7"):
        engine.fork(request)
    scenes.finish(engine, *ballast)
    assert_whole(request, GREEDY)


def test_a_copy_that_fails_midway_counts_for_nothing(monkeypatch):
    """During a host copy, during a restore, during a fork: whoever runs goes on."""

    class Planted(Exception):
        pass

    def fail(*_):
        raise Planted

    engine = scenes.engine(checkpoints=(), host_bytes=None)
    request = started(engine, 4, sampled(3))
    image = engine.checkpoint(request)
    with monkeypatch.context() as patch:
        patch.setattr("dflash_jax.engine.lanes.images.read_pages", fail)
        with pytest.raises(Planted):
            engine.replicate(image)
    assert image.replica is None and image.holding is not None
    for place in ("copy", "from_host"):
        if place == "from_host":
            engine.replicate(image, drop_device=True)
        again = engine.restore(image)
        with monkeypatch.context() as patch:
            patch.setattr(engine._lanes, place, fail)
            with pytest.raises(Planted):
                engine.step()
            check(engine)
        while again.finish_reason is None:
            engine.step()
        assert_whole(again, sampled(3))
    finish(engine)
    assert_whole(request, sampled(3))
    with monkeypatch.context() as patch:
        late = started(engine, 4)
        patch.setattr(engine._lanes, "copy", fail)
        with pytest.raises(Planted):
            engine.fork(late)
    finish(engine)
    assert_whole(late, GREEDY)


def test_replicas_outlive_a_device_that_loses_its_state():
    engine = scenes.engine(checkpoints=(), host_bytes=None)
    request = started(engine, 4)
    lost, safe = engine.checkpoint(request), engine.checkpoint(request)
    engine.replicate(safe)
    waiting = [engine.restore(image) for image in (lost, safe)]
    for leaf in jax.tree.leaves(engine._lanes.state):
        leaf.delete()
    with pytest.raises(RuntimeError):
        engine.step()
    assert [r.finish_reason for r in (request, *waiting)] == [FinishReason.FAULT] * 2 + [None]
    finish(engine)
    assert_whole(waiting[1], GREEDY)
