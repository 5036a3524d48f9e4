"""How many columns the next round verifies: by a table, or learned from the rounds so far.

Whatever decides sees how many rows are live and what earlier rounds cost and gained. It never sees
a draw of the round that it sizes, so the law of the output does not depend on it.
Source: contracts 8.7.
"""

import dataclasses
from collections.abc import Sequence

from dflash_jax.engine.checks import listed

# The controller's choices beyond the chain: K + 5 and K + 9 columns, for at most this many rows.
EXTRA = (5, 9)
LARGEST = 32
MOST_ROWS = 4
PROBE = 4  # rounds in a row when a width is measured
PAUSE = 64  # rounds between two probes
MEMORY = 32  # rounds that the running means look back


class WidthTable:
    """Widths by the number of live rows: entry i for i + 1 rows, the last for more; 0 is a chain.

    The same requests and seeds give the same text again.
    """

    def __init__(self, nodes: Sequence[int]):
        if not nodes:
            raise ValueError("tree_nodes: expected at least one width, got none")
        self._nodes = tuple(nodes)

    @property
    def choices(self) -> tuple[int, ...]:
        """Every width that may come."""
        return tuple(dict.fromkeys(self._nodes))

    def choose(self, rows: int) -> int:
        """The width of the next round of that many live rows."""
        return self._nodes[min(max(rows, 1), len(self._nodes)) - 1]

    def learn(self, rows: int, nodes: int, tokens: int, seconds: float) -> None:
        """A table has nothing to learn."""


@dataclasses.dataclass
class _Estimate:
    """Running means of a width at a number of rows, the newest rounds weighing most."""

    rounds: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.rounds += 1
        share = 1.0 / min(self.rounds, MEMORY)
        self.tokens += share * (tokens - self.tokens)
        self.seconds += share * (seconds - self.seconds)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0


class WidthController:
    """Chain, K + 5 or K + 9: the width with the most tokens per second so far.

    Every width is measured for a few rounds at each number of rows, and from time to time one that
    is not the best again. Times differ from run to run, so text does not repeat by seed.
    """

    def __init__(self, draft_tokens: int):
        wide = [draft_tokens + extra for extra in EXTRA if draft_tokens + extra <= LARGEST]
        self._choices = (0, *wide)
        self._seen: dict[tuple[int, int], _Estimate] = {}
        self._last: tuple[int, int] | None = None  # (rows, width) of the last round
        self._burst = 0  # rounds that the last width is still kept for
        self._quiet = 0  # rounds since the last probe
        self._turn = 0
        self._plan: tuple[int, int] | None = None  # (rows, width) of the round to come

    @property
    def choices(self) -> tuple[int, ...]:
        """Every width that may come."""
        return self._choices

    def choose(self, rows: int) -> int:
        """The width of the next round of that many live rows."""
        if self._plan is None or self._plan[0] != rows:
            self._plan = (rows, self._planned(rows))
        return self._plan[1]

    def learn(self, rows: int, nodes: int, tokens: int, seconds: float) -> None:
        """What a round gave: outputs licensed to its rows, and its wall time.

        The first round of a width is left out: the time of the commit before it is another's. A
        round that was still running when the next one was planned leaves another width's plan.
        """
        same = self._last == (rows, nodes)
        self._last, self._quiet = (rows, nodes), self._quiet + 1
        if self._plan in (None, self._last):
            self._plan, self._burst = None, max(self._burst - 1, 0)
        if same:
            self._of(rows, nodes).add(tokens, seconds)

    def _planned(self, rows: int) -> int:
        if rows > MOST_ROWS or len(self._choices) == 1:
            return 0
        if self._burst and self._last is not None and self._last[0] == rows:
            return self._last[1]
        for width in self._choices:
            if self._of(rows, width).rounds < PROBE:
                self._burst = PROBE + 1
                return width
        best = max(self._choices, key=lambda width: self._of(rows, width).rate)
        if self._quiet < PAUSE:
            return best
        others = [width for width in self._choices if width != best]
        self._turn += 1
        self._quiet, self._burst = 0, PROBE + 1
        return others[self._turn % len(others)]

    def _of(self, rows: int, width: int) -> _Estimate:
        return self._seen.setdefault((rows, width), _Estimate())


Widths = WidthTable | WidthController


def widths_of(draft_tokens: int, run_nodes: int, asked: Sequence[int] | str | None) -> Widths:
    """The policy that a caller asks for: a table, "auto", or None for the run's own width.

    Raises: ValueError for anything else; whether each width fits the run is checked by its config.
    """
    if asked is None:
        return WidthTable((run_nodes,))
    if isinstance(asked, str):
        if asked != "auto":
            raise ValueError(f"tree_nodes: expected widths or 'auto', got {asked!r}")
        return WidthController(draft_tokens)
    return WidthTable(listed("tree_nodes", "widths, or 'auto'", asked))
