"""Random operations on an engine against a model that recomputes everything from tokens.

The model knows, for every request, the text that `generate` gives its prompt, controls and budget
by itself. After every operation each request's tokens are a prefix of that text (all of it at the
end of its budget), device numbers agree with the ids, and pages, slots and free lists add up; at
the end nothing is held.
"""

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dflash_jax.engine import schedule
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.pages import CapacityError
from dflash_jax.engine.request import FinishReason, Request
from dflash_jax.state.decode import check_invariants
from tests.engine import scenes
from tests.engine.scenes import GREEDY, alone, prompts, sampled

CONTROLS = (GREEDY, sampled(1), GREEDY, sampled(2))
BUDGETS = (1, 4, 12, 25)
PLACES = (
    "preview", "account", "publish", "commit", "advance", "copy", "to_host", "from_host", "prefill",
)


class Planted(Exception):
    """What an operation makes fail."""


@dataclasses.dataclass
class Known:
    """A request and everything it will ever say."""

    request: Request
    whole: tuple[int, ...]

    @property
    def live(self) -> bool:
        return self.request.finish_reason is None


class Machine(RuleBasedStateMachine):
    """Rules are the operations; every index is taken modulo what there is."""

    pair = ("dflash", scenes.BATCH, scenes.SLOTS)
    operations = 0

    @initialize(
        spare=st.integers(0, 16), host=st.sampled_from([None, 0, 40_000]),
        checkpoints=st.sampled_from([(), ("turn",), ("prompt", "turn")]),
    )
    def begin(self, spare, host, checkpoints):
        models, params = scenes.pair(*self.pair)
        self.engine = Engine(
            models, params, tokenizer=scenes.Letters(), checkpoints=checkpoints, host_bytes=host
        )
        pools = self.engine._pools
        # Between 8 pages, which one request at most needs, and all of them.
        free = min(8 + spare * self.pair[1] // 3, pools.target.num_free)
        self.ballast = pools.take(pools.page_size * (pools.target.num_free - free))
        self.known: list[Known] = []
        self.kept = []  # images, with what their request will say

    # -- operations ----------------------------------------------------------------------------

    def submit_ids(self, prompt, budget, control):
        if len(prompt) + budget > 120:
            return
        sampling = CONTROLS[control]
        request = self.engine.submit(prompt, max_new_tokens=budget, sampling=sampling)
        self.known.append(Known(request, alone(prompt, budget, sampling, *self.pair).tokens))

    @rule(n=st.integers(0, 7), budget=st.sampled_from(BUDGETS), control=st.integers(0, 3))
    def submit(self, n, budget, control):
        self.submit_ids(prompts()[n], budget, control)

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            running = bool(self.engine._schedule.rows)
            assert self.engine.step() or not running

    @precondition(lambda self: self.known)
    @rule(i=st.integers(0, 99))
    def cancel(self, i):
        self.engine.cancel(self.known[i % len(self.known)].request)

    def running(self, i):
        rows = list(self.engine._schedule.rows.values())
        request = rows[i % len(rows)].request
        return next(known for known in self.known if known.request is request)

    @precondition(lambda self: self.engine._schedule.rows)
    @rule(i=st.integers(0, 99), count=st.integers(1, 3))
    def fork(self, i, count):
        parent = self.running(i)
        try:
            children = self.engine.fork(parent.request, count)
        except CapacityError:
            return
        self.known += [Known(child, parent.whole) for child in children]

    @precondition(lambda self: self.engine._schedule.rows and len(self.kept) < 5)
    @rule(i=st.integers(0, 99))
    def checkpoint(self, i):
        known = self.running(i)
        try:
            self.kept.append((self.engine.checkpoint(known.request), known.whole))
        except CapacityError:
            return

    @precondition(lambda self: self.kept)
    @rule(i=st.integers(0, 99))
    def drop(self, i):
        self.engine.drop(self.kept.pop(i % len(self.kept))[0])

    @precondition(lambda self: self.kept)
    @rule(i=st.integers(0, 99), drop_device=st.booleans())
    def replicate(self, i, drop_device):
        try:
            self.engine.replicate(self.kept[i % len(self.kept)][0], drop_device=drop_device)
        except CapacityError:
            return

    @precondition(lambda self: self.kept)
    @rule(i=st.integers(0, 99))
    def restore(self, i):
        image, whole = self.kept[i % len(self.kept)]
        self.known.append(Known(self.engine.restore(image), whole))

    @precondition(lambda self: self.known)
    @rule(
        i=st.integers(0, 99), more=st.lists(st.integers(0, 249), max_size=20),
        budget=st.sampled_from(BUDGETS), control=st.integers(0, 3),
    )
    def extend(self, i, more, budget, control):
        self.submit_ids((*self.known[i % len(self.known)].request.ledger, *more), budget, control)

    @precondition(lambda self: self.engine._schedule.rows)
    @rule(i=st.integers(0, 99), ids=st.lists(st.integers(0, 249), min_size=1, max_size=20))
    def force(self, i, ids):
        known = self.running(i)
        request = known.request
        if request.sampling is not GREEDY or not request.tokens:
            return
        # After a step that raised, the tokens it had decided are entered before the forced ones.
        entered = len(request.tokens)
        most = entered if self.engine._schedule.settled else len(known.whole)
        try:
            self.engine.force(request, ids)
        except ValueError:
            assert most > entered and tuple(request.tokens) == known.whole
            return
        said, budget = tuple(request.tokens), request.max_new_tokens
        assert said in [(*known.whole[:n], *ids)[:budget] for n in range(entered, most + 1)]
        left = budget - len(said)
        rest = alone((*request.prompt, *said), left, GREEDY, *self.pair).tokens if left else ()
        known.whole = (*said, *rest)

    @rule(place=st.sampled_from(PLACES), at=st.integers(0, 3))
    def fail(self, place, at):
        """Steps while one call of a function raises."""
        owner = schedule if hasattr(schedule, place) else self.engine._lanes
        original, calls = getattr(owner, place), []

        def planted(*args, **kwargs):
            calls.append(1)
            if len(calls) == at + 1:
                raise Planted
            return original(*args, **kwargs)

        setattr(owner, place, planted)
        try:
            self.engine.step()
        except Planted:
            pass
        finally:
            setattr(owner, place, original)

    # -- what holds after each ------------------------------------------------------------------

    @invariant()
    def everything_agrees(self):
        if not hasattr(self, "engine"):
            return
        type(self).operations += 1
        engine, pools = self.engine, self.engine._pools
        scenes.check(engine, self.ballast)
        if not engine._schedule.settled:
            return  # after a planted failure the next operation has something to enter first
        for known in self.known:
            self.check_text(known)
        rows = engine._schedule.rows
        decoding = {n: row.request.ledger for n, row in rows.items() if row.decoding}
        check_invariants(engine._lanes.state, decoding, engine.models.run)
        for row in rows.values():
            positions = len(row.request.prompt) + row.request.max_new_tokens - 1
            assert len(row.holding.target_pages) >= pools.pages_of(positions)
        for image in engine._store:
            if image.holding is not None:
                assert len(image.holding.target_pages) == pools.pages_of(image.frontier)
        images = [image for image in engine._store if image.holding is not None]
        taken = len(rows) + len(images) + 1
        assert pools.num_free_slots == engine.models.run.slots - taken

    def check_text(self, known):
        said, reason = tuple(known.request.tokens), known.request.finish_reason
        assert said == known.whole[: len(said)]
        assert known.request.text == scenes.Letters().decode(said)
        assert reason in (None, FinishReason.LENGTH, FinishReason.CANCELLED)
        assert (reason is FinishReason.LENGTH) == (said == known.whole)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for image, _ in self.kept:
            self.engine.drop(image)
        while not self.engine.idle:
            assert self.engine.step()
            self.everything_agrees()
        for image in self.engine._store:
            self.engine.drop(image)
        self.engine._pools.give(self.ballast)
        pools, run = self.engine._pools, self.engine.models.run
        pools.check([])
        assert pools.target.num_free == pools.draft.num_free == run.pages
        assert pools.num_free_slots == run.slots


def explore(machine, examples, steps):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True,
            database=None, suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),  # making a failure smaller takes minutes
        ),
    )
    return machine.operations


def test_a_thousand_random_operations_agree_with_the_naive_model():
    assert explore(type("Short", (Machine,), {}), examples=40, steps=40) > 1000


@pytest.mark.slow
def test_thousands_of_random_operations_over_eight_rows_agree_with_the_naive_model():
    long = type("Long", (Machine,), {"pair": ("dflash", 8, 12)})
    assert explore(long, examples=120, steps=60) > 5000
