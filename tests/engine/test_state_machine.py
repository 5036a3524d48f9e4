"""Random operations on an engine against a model that recomputes everything from tokens.

The model knows, for every request, the text that `generate` gives its prompt, controls and budget
by itself, up to its first EOS id. After every operation each request's tokens are a prefix of that
text (all of it at its end), device numbers agree with the ids, and pages, slots and free lists add
up; at the end nothing is held. Some requests have stops, so that the engine waits for the host in
some rounds and runs ahead of it in others.
"""

import contextlib
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

from dflash_jax.engine import lanes, rows, schedule
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.pages import CapacityError
from dflash_jax.engine.request import FinishReason, Request
from dflash_jax.state.decode import check_invariants
from tests.engine import scenes
from tests.engine.scenes import GREEDY, alone, prompts, sampled

CONTROLS = (GREEDY, sampled(1), GREEDY, sampled(2))
BUDGETS = (1, 4, 12, 25)
# By place: 0 no stops, 1 an EOS id that it says, 2 eight of them, 3 nine, 4 a stop sequence.
ENDS = (0, 1, 2, 3, 4)
DEVICE = (
    "speculate", "commit", "advance", "result", "last_result", "begin", "resume", "prefill",
    "first_token", "materialize", "copy", "to_host", "from_host",
)
PLACES = (
    (schedule, "preview"), (rows, "preview"), (schedule, "account"), (schedule, "publish"),
    (lanes, "read_later"), *((None, name) for name in DEVICE),
)


class Planted(Exception):
    """What an operation makes fail."""


class Interrupted(BaseException):
    """What nothing may take for a fault of a request."""


@dataclasses.dataclass
class Known:
    """A request and everything it will ever say."""

    request: Request
    whole: tuple[int, ...]

    @property
    def live(self) -> bool:
        return self.request.finish_reason is None

    @property
    def ends_with(self) -> FinishReason:
        is_eos = self.whole[-1] in self.request.eos_ids
        return FinishReason.EOS if is_eos else FinishReason.LENGTH


def up_to(tokens, eos_ids) -> tuple[int, ...]:
    """Tokens up to the first EOS id, it included."""
    ends = [n for n, token in enumerate(tokens, 1) if token in eos_ids]
    return tuple(tokens[: ends[0]] if ends else tokens)


def options_of(ends: int, at: int, text) -> dict:
    """The options for a way to end, at the id of that place if it is by an EOS id."""
    if ends == 4:
        return {"stop_sequences": [[250 - n for n in range(1, 9)]]}  # nobody says that
    never = [token for token in range(250) if token not in text]
    more = {0: 0, 1: 0, 2: 7, 3: 8}[ends]
    return {"eos_ids": [text[at % len(text)], *never[:more]] if ends else []}


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
        self.told: dict[int, Request] = {}  # those with a callback, by number
        self.kept = []  # images, with what their request will say
        self.raised = 0

    # -- operations ----------------------------------------------------------------------------

    def submit_ids(self, prompt, budget, control, ends, at, patience=99):
        if len(prompt) + budget > 120:
            return
        sampling = CONTROLS[control]
        text = alone(prompt, budget, sampling, *self.pair).tokens
        options = options_of(ends, at, text)
        request = self.engine.submit(
            prompt, max_new_tokens=budget, sampling=sampling,
            on_tokens=lambda number, _: len(self.told[number].tokens) < patience, **options,
        )
        self.told[request.row] = request
        self.known.append(Known(request, up_to(text, request.eos_ids)))

    @rule(
        n=st.integers(0, 7), budget=st.sampled_from(BUDGETS), control=st.integers(0, 3),
        ends=st.sampled_from(ENDS), at=st.integers(0, 24), patience=st.sampled_from([3, 99, 99]),
    )
    def submit(self, n, budget, control, ends, at, patience):
        self.submit_ids(prompts()[n], budget, control, ends, at, patience)

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            running = bool(self.engine._schedule.rows)
            assert self.engine.step() or not running

    @precondition(lambda self: self.known)
    @rule(i=st.integers(0, 99))
    def cancel(self, i):
        self.engine.cancel(self.known[i % len(self.known)].request)

    @contextlib.contextmanager
    def may_have_ended(self, known):
        """After a step that raised, a request may end by what is entered before anything else."""
        settled = self.engine._schedule.settled
        try:
            yield
        except ValueError:
            assert not settled and not known.live

    def running(self, i):
        rows = list(self.engine._schedule.rows.values())
        request = rows[i % len(rows)].request
        return next(known for known in self.known if known.request is request)

    @precondition(lambda self: self.engine._schedule.rows)
    @rule(i=st.integers(0, 99), count=st.integers(1, 3))
    def fork(self, i, count):
        parent = self.running(i)
        with contextlib.suppress(CapacityError), self.may_have_ended(parent):
            children = self.engine.fork(parent.request, count)
            self.known += [Known(child, parent.whole) for child in children]

    @precondition(lambda self: self.engine._schedule.rows and len(self.kept) < 5)
    @rule(i=st.integers(0, 99))
    def checkpoint(self, i):
        known = self.running(i)
        with contextlib.suppress(CapacityError), self.may_have_ended(known):
            self.kept.append((self.engine.checkpoint(known.request), known.whole))

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
        budget=st.sampled_from(BUDGETS), control=st.integers(0, 3), ends=st.sampled_from(ENDS),
        at=st.integers(0, 24),
    )
    def extend(self, i, more, budget, control, ends, at):
        before = self.known[i % len(self.known)].request.ledger
        self.submit_ids((*before, *more), budget, control, ends, at)

    @precondition(lambda self: self.engine._schedule.rows)
    @rule(i=st.integers(0, 99), ids=st.lists(st.integers(0, 249), min_size=1, max_size=20))
    def force(self, i, ids):
        known = self.running(i)
        request = known.request
        if request.sampling is not GREEDY or not request.tokens:
            return
        # After a step that raised, the tokens it had decided are entered before the forced ones.
        entered, eos_ids = len(request.tokens), request.eos_ids
        most = entered if self.engine._schedule.settled else len(known.whole)
        with self.may_have_ended(known):
            self.engine.force(request, ids)
            said, budget = tuple(request.tokens), request.max_new_tokens
            assert said in [
                (*known.whole[:n], *up_to(ids, eos_ids))[:budget]
                for n in range(entered, most + 1)
            ]
            left = 0 if said[-1] in eos_ids else budget - len(said)
            prompt = (*request.prompt, *said)
            rest = alone(prompt, left, GREEDY, *self.pair).tokens if left else ()
            known.whole = (*said, *up_to(rest, eos_ids))

    @rule(
        place=st.sampled_from(PLACES), at=st.integers(0, 3), behind=st.booleans(),
        kind=st.sampled_from([Planted, Interrupted]),
    )
    def fail(self, place, at, behind, kind):
        """Steps while one call of a function raises, of the device's perhaps once it is done."""
        owner, name = place
        behind = behind and owner is None
        owner = owner or self.engine._lanes
        original, calls = getattr(owner, name), []

        def planted(*args, **kwargs):
            calls.append(1)
            fails = len(calls) == at + 1
            if fails and not behind:
                raise kind
            result = original(*args, **kwargs)
            if fails:
                raise kind
            return result

        setattr(owner, name, planted)
        try:
            self.engine.step()
        except kind:
            self.raised += kind is Planted
        finally:
            setattr(owner, name, original)

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
        # Whatever raises ends a request at the second time, and nothing but that.
        ends = [known.request.finish_reason for known in self.known]
        assert 2 * ends.count(FinishReason.FAULT) <= self.raised
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
        shown = said[:-1] if reason is FinishReason.EOS else said
        assert known.request.text == scenes.Letters().decode(shown)
        if reason in (None, FinishReason.CANCELLED, FinishReason.FAULT):
            assert said != known.whole
        else:
            assert (said, reason) == (known.whole, known.ends_with)

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
