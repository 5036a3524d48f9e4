"""What the scheduler keeps of requests that have a lane, and of the rounds they are in."""

import dataclasses
import time

from dflash_jax.engine.pools import Holding
from dflash_jax.engine.preview import Decision
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
    """

    rows: dict[int, Row | None]
    nodes: int
    since: float


@dataclasses.dataclass(kw_only=True, eq=False)
class Pending:
    """What the round in flight was decided to be: entered if its commit was issued, else void.

    Fields:
      entries: of its rows.
      commits: how many had been issued before; more than those tell that this one was.
      following: the round that the same call started; None when it only committed.
    """

    entries: list[Entry]
    commits: int
    following: Flight | None

    def drop(self, request: Request) -> None:
        """Forgets what it would tell a request."""
        self.entries = [one for one in self.entries if one.row.request is not request]
