"""Which requests run: waiting ones enter lanes, prompts are read, rounds are decided and entered.

A step is admit -> prefill -> round. Inside a round: result -> preview -> commit -> account ->
publish, and the next round is started before the caller sees the tokens of this one, so that the
device works while the host talks: by the very call that commits, if the same rows go on. Where the
device sees by itself where its rows end, that call comes before the result: the device never waits
for the host, and a round behind a row's end has it idle. An exception at any place leaves host and
device in agreement: what the device has done is told by ``Lanes``, and whatever is not entered yet
is entered first by the next step.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Collection, Sequence

from dflash_jax.engine.device import RoundResult, may_run_ahead
from dflash_jax.engine.images import ImageStore, StateImage
from dflash_jax.engine.lanes import Lanes
from dflash_jax.engine.pages import CapacityError
from dflash_jax.engine.placement import Placement, Waiting, positions_of
from dflash_jax.engine.pools import Pools
from dflash_jax.engine.preview import preview
from dflash_jax.engine.publish import account, publish
from dflash_jax.engine.request import FinishReason, Request
from dflash_jax.engine.rows import KEPT, Entry, Flight, Pending, Row, decide
from dflash_jax.engine.width import Widths
from dflash_jax.steps import Models


class Scheduler:
    """The rows of one device and everything that moves them."""

    def __init__(
        self, models: Models, lanes: Lanes, pools: Pools, store: ImageStore, widths: Widths,
        checkpoints: Collection[str],
    ):
        self._models, self._lanes, self._pools, self._store = models, lanes, pools, store
        self._widths, self._checkpoints = widths, frozenset(checkpoints)
        self._placement = Placement(lanes, pools, store)
        self.rows: dict[int, Row] = {}
        self.waiting: collections.deque[Waiting] = collections.deque()
        self._stuck = False  # the first of the waiting requests did not fit when it was tried
        self._flight: Flight | None = None
        self._pending: Pending | None = None
        self._entered: collections.deque[Entry] = collections.deque()  # to be accounted for
        self._shown: collections.deque[Entry] = collections.deque()  # to be published

    # -- requests ------------------------------------------------------------------------------

    def row_of(self, request: Request) -> Row | None:
        """The row of a request that has one."""
        return next((row for row in self.rows.values() if row.request is request), None)

    def place_now(self, waiting: Waiting) -> None:
        """Gives a request a lane at once.

        Raises:
          CapacityError: others wait, or a lane, a slot or pages are missing.
        """
        if self.waiting:
            raise CapacityError(f"queue: need it empty, have {len(self.waiting)} waiting requests")
        lane = self._free_lane()
        if lane is None:
            raise CapacityError(f"lanes: need 1, have 0 of {self._models.run.batch}")
        if not self._place(waiting, lane):
            raise CapacityError(self.shortage(waiting))

    def shortage(self, waiting: Waiting) -> str:
        """What a request lacks, in words."""
        pages = self._pools.pages_of(positions_of(waiting.request))
        return self._pools.shortage(1, pages) or "lanes: need 1, have 0"

    def knows(self, request: Request) -> bool:
        """Whether a request runs or waits here."""
        waiting = (item.request for item in self.waiting)
        return self.row_of(request) is not None or any(own is request for own in waiting)

    def withdraw(self, request: Request) -> None:
        """Releases what an ended request has, or takes it from the queue.

        Outputs of it that have been committed but not entered are dropped, and nobody is called
        about it any more.
        """
        self._entered, self._shown = (
            collections.deque(e for e in queue if e.row.request is not request)
            for queue in (self._entered, self._shown)
        )
        if self._pending is not None:
            self._pending.drop(request)
        for waiting in tuple(self.waiting):
            if waiting.request is request:
                self.waiting.remove(waiting)
                if waiting.image is not None:
                    self._store.leave(waiting.image)
        self._sweep()

    def frontier(self, row: Row) -> int:
        """F of a row."""
        return row.request.frontier if row.decoding else self._lanes.frontier(row.lane)

    def capture(self, row: Row, **fields) -> StateImage:
        """An image of a row at its frontier, entered into the store; the row goes on unchanged.

        Raises:
          CapacityError: no slot or no page for the tail can be made free.
        """
        frontier = self.frontier(row)
        pages = self._pools.branch_pages(frontier, frontier)
        if not self._store.make_room(1, pages):
            raise CapacityError(self._pools.shortage(1, pages))
        self._catch_up(row)
        holding, tail = self._pools.branch(row.holding, frontier, frontier)
        try:
            self._lanes.copy(row.holding, holding, tail)
        except BaseException:
            self._pools.give(holding)
            raise
        image = StateImage.of(row.request, frontier, holding, **fields)
        self._store.add(image)
        return image

    def force(self, row: Row, ids: Sequence[int]) -> None:
        """Publishes tokens of the caller's choice, after they have run like a prompt.

        The anchor and all of them but the last are processed; the last is the new anchor. A round
        in flight no longer counts for the row. If the device fails midway, the row ends.
        """
        request = row.request
        decision = preview(request, ids, len(ids))
        run = [*request.ledger, *decision.tokens[:-1]]
        if self._flight is not None and row.lane in self._flight.rows:
            self._flight.rows[row.lane] = None
        try:
            self._catch_up(row)
            done = request.frontier
            while done < len(run):
                done = self._lanes.prefill(
                    row.lane, row.holding, run, done, request.embeddings
                )
            account(request, decision)
            request.statistics.forced_tokens += decision.committed
            if request.finish_reason is None:
                self._lanes.resume(row.lane, row.holding, request, request.frontier)
        except BaseException:
            request.end(FinishReason.FAULT)
            raise
        self._shown.append(Entry(row=row, decision=decision, round=None))
        self.settle()

    # -- a step --------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step; False when nothing could be done, which is so when nothing is left to do."""
        unsettled = not self.settled
        self.settle()
        admitted = self._admit()
        read = self._read_prompts()
        decided = self._round()
        return unsettled or admitted or read or decided

    @property
    def settled(self) -> bool:
        """The host knows everything the device has done, and so does the caller."""
        return self._pending is None and not self._entered and not self._shown

    def settle(self) -> None:
        """Enters everything whose commit has been issued, then shows it."""
        raised = self._take_over()
        while self._entered:
            self._account(self._entered[0])
            self._shown.append(self._entered.popleft())
        self._sweep()
        if self._nothing_to_admit():
            self._start_round()
        while self._shown:
            entry = self._shown.popleft()
            publish(entry.row.request, entry.decision)
        self._sweep()
        if raised is not None:
            raise raised

    def release_all(self, reason: FinishReason) -> None:
        """Ends every row after the device has lost its state; slots and pages are free again.

        Waiting requests stay, but for those whose image was lost.
        """
        self._flight, self._pending = None, None
        self._entered.clear()
        for waiting in tuple(self.waiting):
            if waiting.image is not None and waiting.image.dropped:
                waiting.request.end(reason)
                self.waiting.remove(waiting)
        for row in tuple(self.rows.values()):
            row.request.end(reason)
            del self.rows[row.lane]
            self._pools.give(row.holding)

    def _admit(self) -> bool:
        """Lanes for those who wait, in order; while nothing runs, whoever fits goes past the first:
        what it lacks may be in images that others behind it start from, and give back then."""
        progress, self._stuck = False, False
        while self.waiting and not self._stuck and (lane := self._free_lane()) is not None:
            for waiting in tuple(self.waiting)[: 1 if self.rows else None]:
                with self._answering(waiting):
                    self._stuck = not self._place(waiting, lane)
                if not self._stuck:
                    self.waiting.remove(waiting)
                    progress = True
                    break
        return progress

    def _read_prompts(self) -> bool:
        progress = False
        for row in tuple(self.rows.values()):
            if row.decoding or row.request.finish_reason is not None:
                continue
            progress = True
            with self._answering(row):
                self._read(row)
            if row.decoding or row.request.finish_reason is not None:
                self.settle()
        return progress

    def _read(self, row: Row) -> None:
        """Runs the next chunk of a prompt, and draws the first token behind the last one."""
        request, lane = row.request, row.lane
        done = self._lanes.frontier(lane)
        if done < len(request.prompt):
            done = self._lanes.prefill(
                lane, row.holding, request.prompt, done, request.embeddings
            )
        if done < len(request.prompt):
            return
        if "prompt" in self._checkpoints and request.embeddings is None and not row.failed:
            self._keep_prompt(row)
        token = self._lanes.first_token(lane, row.holding)
        if token is None:
            request.end(FinishReason.FAULT)
        else:
            entry = Entry(row=row, decision=preview(request, [token], 1), round=None)
            row.decoding = True
            self._entered.append(entry)
        now = time.perf_counter()
        request.statistics.prefill_seconds, row.since = now - row.since, now

    @contextlib.contextmanager
    def _answering(self, one: Row | Waiting):
        """For what is done for one request alone: if it raises twice in a row, the request ends.

        Whatever a tokenizer or the device raises there would else stop everybody, at every step.
        """
        try:
            yield
        except Exception:
            if one.failed:
                try:
                    one.request.end(FinishReason.FAULT)
                finally:
                    self.withdraw(one.request)
            one.failed = True
            raise
        one.failed = False

    def _keep_prompt(self, row: Row) -> None:
        """A checkpoint at the end of the prompt, if there is room for one."""
        known = self._store.exact(row.request.prompt)
        if known is not None:
            self._store.touch(known)
            return
        frontier = len(row.request.prompt)
        if self._store.make_room(1, self._pools.branch_pages(frontier, frontier)):
            self.capture(row)

    def _round(self) -> bool:
        self._start_round()
        if self._flight is None:
            return False
        flight, commits = self._flight, self._lanes.commits
        if self._may_run_ahead(flight):
            following = dataclasses.replace(flight)
            self._pending = Pending(entries=None, commits=commits, following=following)
            self._lanes.advance()
        else:
            entries, raised = self._decide(flight, self._lanes.result())
            following = dataclasses.replace(flight) if self._steady(flight, entries) else None
            self._pending = Pending(
                entries=entries, commits=commits, following=following, raised=raised
            )
            if following is None:
                self._lanes.commit({entry.row.lane: entry.decision.committed for entry in entries})
            else:
                self._lanes.advance()  # no decision has a reason: N = L of every row
        self.settle()
        return True

    def _take_over(self) -> Exception | None:
        """Queues what was decided of a round whose commit has been issued, by the host or by the
        device; returns what that raised for one of its rows."""
        pending = self._pending
        if pending is None:
            return None
        if self._lanes.commits > pending.commits:
            if pending.entries is None:
                result = self._lanes.last_result()
                pending.entries, pending.raised = self._decide(self._flight, result)
            if pending.following is not None:
                pending.following.since = self._flight.ended
            self._entered.extend(pending.entries)
            self._flight = pending.following
        self._pending = None
        return pending.raised

    def _decide(
        self, flight: Flight, result: RoundResult
    ) -> tuple[list[Entry], Exception | None]:
        """`decide` for the rows that are still there; the width policy learns from the round.

        Not from one that rows have left: the caller may have let it lie for any time.
        """
        entries, raised = decide(flight, self.rows, result)
        flight.ended = time.perf_counter()
        if len(entries) == len(flight.rows):
            tokens = sum(result.licensed[entry.row.lane] for entry in entries)
            seconds = flight.ended - flight.since
            self._widths.learn(len(entries), flight.nodes, tokens, seconds)
        return entries, raised

    def _start_round(self) -> None:
        """Starts a round of all rows that decode, unless one is in flight."""
        if self._flight is not None:
            return
        live = self._live()
        if live:
            nodes, since = self._widths.choose(len(live)), time.perf_counter()
            self._lanes.speculate({lane: row.holding.slot for lane, row in live.items()}, nodes)
            self._flight = Flight(rows=live, nodes=nodes, since=since)

    def _live(self) -> dict[int, Row]:
        rows = self.rows.items()
        return {n: row for n, row in rows if row.decoding and row.request.finish_reason is None}

    def _may_run_ahead(self, flight: Flight) -> bool:
        """The next round may start before the host has seen this one: the device knows what the
        host would decide, and this round uses up no row's budget."""
        width = self._models.run.block_width
        return self._goes_on(flight) and all(
            may_run_ahead(row.request, width) and not row.failed
            for row in flight.rows.values()
        )

    def _steady(self, flight: Flight, entries: Sequence[Entry]) -> bool:
        """The round after these decisions has the rows and the width of the one in flight."""
        return self._goes_on(flight) and all(entry.decision.reason is None for entry in entries)

    def _goes_on(self, flight: Flight) -> bool:
        return (
            self._nothing_to_admit()
            and self._live() == flight.rows
            and self._widths.choose(len(flight.rows)) == flight.nodes
        )

    def _nothing_to_admit(self) -> bool:
        reading = any(not row.decoding for row in self.rows.values())
        return not reading and (not self.waiting or self._stuck or self._free_lane() is None)

    def _account(self, entry: Entry) -> None:
        request, decision = entry.row.request, entry.decision
        account(request, decision)
        if decision.reason is FinishReason.FAULT:
            request.end(FinishReason.FAULT)
        elif entry.round is not None:
            request.statistics.count_round(*entry.round)
        request.statistics.decode_seconds = time.perf_counter() - entry.row.since

    # -- lanes ---------------------------------------------------------------------------------

    def _free_lane(self) -> int | None:
        lanes = range(self._models.run.batch)
        return next((lane for lane in lanes if lane not in self.rows), None)

    def _place(self, waiting: Waiting, lane: int) -> bool:
        """Gives a request a lane, a slot and all pages it can need; False if they cannot be had."""
        request = waiting.request
        placed = self._placement.place(waiting, lane)
        if placed is None:
            return False
        decoding = bool(request.tokens)
        self.rows[lane] = Row(
            request=request, lane=lane, holding=placed.holding, decoding=decoding
        )
        if not decoding:
            request.statistics.reused_tokens = placed.reused
        if waiting.image is not None:
            self._store.leave(waiting.image)
        return True

    def _sweep(self) -> None:
        """Rows whose request has ended leave their lanes."""
        for row in tuple(self.rows.values()):
            if row.request.finish_reason is not None:
                self._finish(row)

    def _finish(self, row: Row) -> None:
        request = row.request
        kept = request.finish_reason in KEPT and "turn" in self._checkpoints
        if not kept or request.embeddings is not None:
            del self.rows[row.lane]
            self._pools.give(row.holding)
            return
        self._catch_up(row)
        frontier = request.frontier
        known = self._store.exact(request.ledger[:frontier])
        del self.rows[row.lane]
        if known is not None:
            self._pools.give(row.holding)
            self._store.touch(known)
        else:
            holding = self._pools.shrink(row.holding, frontier)
            self._store.add(StateImage.of(request, frontier, holding))

    def _catch_up(self, row: Row) -> None:
        if self._models.draft is not None:
            self._lanes.materialize(row.lane, row.holding)
