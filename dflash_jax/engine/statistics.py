"""Counters of requests. Plain Python."""

import dataclasses
from collections.abc import Sequence


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
      prompt_tokens, new_tokens: tokens of the prompt, tokens published.
      reused_tokens: those of the prompt that a state image supplied instead of a prefill.
      forced_tokens: those published that the caller imposed.
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
    reused_tokens: int = 0
    forced_tokens: int = 0
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
        reused_tokens=sum(item.reused_tokens for item in statistics),
        forced_tokens=sum(item.forced_tokens for item in statistics),
        prefill_seconds=max((item.prefill_seconds for item in statistics), default=0.0),
        decode_seconds=max((item.decode_seconds for item in statistics), default=0.0),
    )
