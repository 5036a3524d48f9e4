"""What the scheduler keeps of requests that have a lane, and of the rounds they are in."""

import dataclasses
import time
from collections.abc import Mapping

from dflash_jax.engine.device import RoundResult
from dflash_jax.engine.pools import Holding
from dflash_jax.engine.preview import Decision, preview
from dflash_jax.engine.request import FinishReason, Request

KEPT = frozenset([FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH])


@dataclasses.dataclass(kw_only=True, eq=False)
class Row:
    """A request that has a lane.

    Fields:
      lane: its row in the batch.
      holding: its slot and pages, enough for everything it may still publish.
      decoding: the first token has been drawn.
      failed: what was last done for it alone raised; a second time in a row ends the request.
      since: when it got the lane, or drew the first token; seconds.
    """

    request: Request
    lane: int
    holding: Holding
    decoding: bool
    failed: bool = False
    since: float = dataclasses.field(default_factory=time.perf_counter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A decision whose commit has been issued. ``round`` is (P, A, columns), None without one."""

    row: Row
    decision: Decision
    round: tuple[int, int, int] | None


@dataclasses.dataclass(kw_only=True, eq=False)
class Flight:
    """A round that the device runs.

    Fields:
      rows: by lane; None for one for which the round no longer counts.
      nodes: its width.
      since: when it began; seconds.
      ended: when its result was there; None before.
    """

    rows: dict[int, Row | None]
    nodes: int
    since: float
    ended: float | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class Pending:
    """What the round in flight was decided to be: entered if its commit was issued, else void.

    Fields:
      entries: of its rows; None when the device decides, and the host has not looked yet.
      commits: how many had been issued before; more than those tell that this one was.
      following: the round that the same call started; None when it only committed.
      raised: what deciding for one of its rows raised, for the caller.
    """

    entries: list[Entry] | None
    commits: int
    following: Flight | None
    raised: Exception | None = None

    def drop(self, request: Request) -> None:
        """Forgets what it would tell a request."""
        if self.entries is not None:
            self.entries = [one for one in self.entries if one.row.request is not request]


def decide(
    flight: Flight, rows: Mapping[int, Row], result: RoundResult
) -> tuple[list[Entry], Exception | None]:
    """What a round means for each of its rows that is still among `rows`, by lane.

    Returns:
      the entries, and what was raised for a row that ends because its decision raised twice.
    Raises: what a decision raises the first time; all of them may be asked for again.
    """
    entries, raised = [], None
    for lane, row in flight.rows.items():
        if row is None or rows.get(lane) is not row:
            continue  # it has ended since the round began: N = 0
        request, licensed = row.request, result.licensed[lane]
        decision = Decision(tokens=(), reason=FinishReason.FAULT, text="", watch=request.watch)
        if not result.fault[lane]:
            try:
                decision = preview(request, result.outputs[lane], licensed)
                row.failed = False
            except Exception as error:
                if not row.failed:
                    row.failed = True
                    raise
                raised = error
        counts = (result.proposals[lane], licensed - 1, result.columns[lane])
        entries.append(Entry(row=row, decision=decision, round=counts))
    return entries, raised
