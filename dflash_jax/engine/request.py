"""What a caller asks for, how far it got, and what comes back. Plain Python, no arrays."""

import dataclasses
import enum
from collections.abc import Callable, Sequence

from dflash_jax.sampling.params import SamplingParams

OnTokens = Callable[[int, list[int]], bool | None]


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    EOS = "eos"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAULT = "fault"


@dataclasses.dataclass(kw_only=True)
class Statistics:
    """Counters of one request (contracts section 10), or of several added up.

    Fields:
      rounds: rounds with at least one verified proposal (P > 0).
      single_steps: rounds without one (P = 0): the last token of a budget, or no draft.
      drafted: proposals verified, the sum of P.
      accepted: proposals accepted, the sum of A.
      accepted_by_position: entry i counts rounds whose proposal at depth i + 1 was accepted.
      widths: rounds by the number of columns verified: P + 1 on a chain, up to W_t in a tree.
      requests: how many requests were added up.
      prompt_tokens, new_tokens: tokens read, tokens published.
      prefill_seconds: wall time from the start to the first token, compilation included.
      decode_seconds: wall time of the rounds, compilation left out.
    """

    rounds: int = 0
    single_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = dataclasses.field(default_factory=list)
    widths: dict[int, int] = dataclasses.field(default_factory=dict)
    requests: int = 1
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def count_round(self, proposals: int, accepted: int, columns: int | None = None) -> None:
        """Counts a round of P = ``proposals`` and A = ``accepted``; a chain has P + 1 columns."""
        columns = proposals + 1 if columns is None else columns
        self.widths[columns] = self.widths.get(columns, 0) + 1
        if proposals == 0:
            self.single_steps += 1
            return
        self.rounds += 1
        self.drafted += proposals
        self.accepted += accepted
        missing = proposals - len(self.accepted_by_position)
        self.accepted_by_position += [0] * max(missing, 0)
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    @property
    def acceptance(self) -> float:
        """Accepted share of the verified proposals, 0 without any."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Outputs licensed by an average speculative round, 1 + accepted / rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the rounds (all but each first one) over their wall time, 0 without any."""
        decoded = max(self.new_tokens - self.requests, 0)
        return decoded / self.decode_seconds if self.decode_seconds else 0.0


def total_statistics(statistics: Sequence[Statistics]) -> Statistics:
    """Adds counters of requests that shared their rounds.

    The times are those of the slowest request, so ``tokens_per_second`` is the batch's throughput.
    """
    width = max((len(item.accepted_by_position) for item in statistics), default=0)
    columns = [0] * width
    for item in statistics:
        for position, count in enumerate(item.accepted_by_position):
            columns[position] += count
    widths: dict[int, int] = {}
    for item in statistics:
        for width, count in item.widths.items():
            widths[width] = widths.get(width, 0) + count
    return Statistics(
        widths=widths,
        rounds=sum(item.rounds for item in statistics),
        single_steps=sum(item.single_steps for item in statistics),
        drafted=sum(item.drafted for item in statistics),
        accepted=sum(item.accepted for item in statistics),
        accepted_by_position=columns,
        requests=sum(item.requests for item in statistics),
        prompt_tokens=sum(item.prompt_tokens for item in statistics),
        new_tokens=sum(item.new_tokens for item in statistics),
        prefill_seconds=max((item.prefill_seconds for item in statistics), default=0.0),
        decode_seconds=max((item.decode_seconds for item in statistics), default=0.0),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What ``generate`` returns for one prompt.

    Fields:
      tokens: the new token ids, the EOS id included when one ended the request.
      finish_reason: why it ended.
      statistics: its counters.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    statistics: Statistics


@dataclasses.dataclass(kw_only=True)
class Request:
    """One request while it runs.

    Fields:
      row: place in the caller's list of prompts, and the first argument of ``on_tokens``.
      prompt: token ids to continue.
      max_new_tokens: outputs it may publish.
      eos_ids: ids that end it; the id itself is published.
      sampling: its controls; greedy by default.
      on_tokens: called with (row, new ids) after each commit; returning False cancels the row.
      tokens: outputs published so far.
      finish_reason: None while it runs.
      statistics: its counters.

    Invariant while it runs: 0 < remaining, and the device's frontier F is ``frontier``.
    """

    row: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = SamplingParams()
    on_tokens: OnTokens | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    statistics: Statistics = dataclasses.field(default_factory=Statistics)

    @property
    def remaining(self) -> int:
        """Outputs it may still publish."""
        return self.max_new_tokens - len(self.tokens)

    @property
    def frontier(self) -> int:
        """Tokens the target has processed: all but the anchor, once the first token is there."""
        return len(self.prompt) + max(len(self.tokens) - 1, 0)

    def end(self, reason: FinishReason) -> None:
        """Ends the request; the first reason stands."""
        if self.finish_reason is None:
            self.finish_reason = reason

    def output(self) -> Output:
        """The finished request as the caller sees it."""
        if self.finish_reason is None:
            raise RuntimeError(f"request {self.row} has not ended")
        return Output(
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason,
            statistics=self.statistics,
        )
