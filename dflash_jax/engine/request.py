"""What a caller asks for, how far it got, and what comes back. Plain Python, no device arrays."""

import dataclasses
import enum
from collections.abc import Callable

import numpy as np

from dflash_jax.engine.statistics import Statistics, total_statistics
from dflash_jax.engine.watch import Watch
from dflash_jax.sampling.params import SamplingParams

__all__ = [
    "Embeddings", "FinishReason", "OnTokens", "Output", "Piece", "Request", "Statistics",
    "total_statistics",
]

OnTokens = Callable[[int, list[int]], bool | None]


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAULT = "fault"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What one commit let the caller see.

    Fields:
      tokens: the committed ids; none when only text that was held back came out.
      text: the text that is certain now; empty without a tokenizer.
    """

    tokens: tuple[int, ...]
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What a finished request returns.

    Fields:
      tokens: the new token ids, those that ended the request included.
      finish_reason: why it ended.
      statistics: its counters.
      text: text of the tokens, up to the stop string if one ended it; empty without a tokenizer.
      number: the request's number.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    statistics: Statistics
    text: str = ""
    number: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embeddings:
    """Rows that take the place of the embedding at some prompt positions, for example images.

    Fields:
      rows: [n, H], any float dtype.
      index: [n] int, places in the prompt, increasing.
      positions: [T, 3] int32, rotation positions (time, height, width) of the whole prompt.
      rope_delta: next rotation position minus token count at the prompt's end.
    """

    rows: np.ndarray
    index: np.ndarray
    positions: np.ndarray
    rope_delta: int

    @classmethod
    def at(cls, rows, index, prompt_tokens: int) -> "Embeddings":
        """Rows at places whose rotation positions are those of text."""
        line = np.arange(prompt_tokens, dtype=np.int32)
        return cls(
            rows=np.asarray(rows), index=np.asarray(index, np.int64),
            positions=np.repeat(line[:, None], 3, axis=1), rope_delta=0,
        )


@dataclasses.dataclass(kw_only=True, eq=False)
class Request:
    """One request while it runs.

    Fields:
      row: its number, and the first argument of ``on_tokens``. ``generate``: place in the caller's
        list of prompts, and row of the batch.
      prompt: token ids to continue.
      max_new_tokens: outputs it may publish.
      eos_ids: ids that end it; the id itself is published, and has no text.
      stop_sequences: id sequences that end it; their ids are published.
      stop_strings: strings that end it; the text ends before them, the ids do not.
      decode: text of ids; needed for ``stop_strings`` and for any text.
      sampling: its controls; greedy by default.
      embeddings: rows for some prompt positions, or None.
      on_tokens: called with (row, new ids) after each commit; returning False cancels the row.
      tokens: outputs published so far.
      pieces: what came out with each commit.
      watch: what has been seen of stops, and the text held back for them.
      finish_reason: None while it runs.
      statistics: its counters.

    Invariant while it runs: 0 < remaining, and the device's frontier F is ``frontier``.
    """

    row: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    stop_strings: tuple[str, ...] = ()
    decode: Callable[..., str] | None = None
    sampling: SamplingParams = SamplingParams()
    embeddings: Embeddings | None = None
    on_tokens: OnTokens | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    watch: Watch = dataclasses.field(init=False)
    finish_reason: FinishReason | None = None
    statistics: Statistics = dataclasses.field(default_factory=Statistics)

    def __post_init__(self):
        self.watch = Watch(
            sequences=self.stop_sequences, strings=self.stop_strings, decode=self.decode
        )

    @property
    def remaining(self) -> int:
        """Outputs it may still publish."""
        return self.max_new_tokens - len(self.tokens)

    @property
    def frontier(self) -> int:
        """Tokens the target has processed: all but the anchor, once the first token is there."""
        return len(self.prompt) + max(len(self.tokens) - 1, 0)

    @property
    def ledger(self) -> list[int]:
        """All its token ids: the prompt and what has been published."""
        return [*self.prompt, *self.tokens]

    @property
    def text(self) -> str:
        """The text shown so far."""
        return "".join(piece.text for piece in self.pieces)

    def continued(self, row: int, **changes) -> "Request":
        """A request of that number that goes on from where this one stands, with some changes.

        It has the same prompt, controls, stops and published tokens, its own counters, nobody to
        call, and no end. Nothing mutable is shared.
        """
        fields = {
            "row": row, "tokens": list(self.tokens), "pieces": list(self.pieces),
            "on_tokens": None, "finish_reason": None,
            "statistics": Statistics(
                prompt_tokens=len(self.prompt), new_tokens=len(self.tokens)
            ),
        }
        other = dataclasses.replace(self, **(fields | changes))
        if (other.stop_sequences, other.stop_strings) == (self.stop_sequences, self.stop_strings):
            other.watch = self.watch
        elif other.tokens:
            other.watch, text = other.watch.behind(self.watch, self.tokens, self.text)
            other.pieces = [Piece(tokens=tuple(other.tokens), text=text)]
        return other

    def end(self, reason: FinishReason) -> None:
        """Ends the request and lets out the text still held back; the first reason stands."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        self.watch, text = self.watch.finish()
        if text:
            self.pieces.append(Piece(tokens=(), text=text))

    def output(self) -> Output:
        """The finished request as the caller sees it."""
        if self.finish_reason is None:
            raise RuntimeError(f"request {self.row} has not ended")
        return Output(
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason,
            statistics=self.statistics,
            text=self.text,
            number=self.row,
        )
