"""What is written while a command runs: text or ids as they arrive, marks, and the statistics."""

import sys
from collections.abc import Sequence
from itertools import takewhile

from dflash_jax.engine.request import Output, total_statistics
from dflash_jax.engine.text import TextStream, TextTokenizer

# Around text that came from accepted proposals; without colour the marks of `git diff --word-diff`.
COLOURED, PLAIN = ("\x1b[32m", "\x1b[0m"), ("{+", "+}")


class TextPrinter:
    """Writes the text of one row to standard output as it becomes complete.

    Args:
      marks: what to put before and after text from accepted proposals; None marks nothing.

    All tokens of a round but the last are accepted proposals; the last is the target's correction
    or bonus, and the very first token is its answer to the prompt. Only an end of text inside a
    round is an accepted proposal at its end, and that token has no text.
    """

    def __init__(self, tokenizer: TextTokenizer, marks: tuple[str, str] | None = None):
        self._stream = TextStream(tokenizer)
        self._marks = marks

    def show(self, row: int, tokens: list[int]) -> None:
        if self._marks is None:
            print(self._stream.push(tokens), end="", flush=True)
            return
        before, after = self._marks
        if accepted := self._stream.push(tokens[:-1]):
            print(f"{before}{accepted}{after}", end="")
        print(self._stream.push(tokens[-1:]), end="", flush=True)

    def finish(self) -> None:
        print(self._stream.finish(), flush=True)


class IdPrinter:
    """Writes token ids to standard output: one growing line, or ``row: ids`` lines of a batch."""

    def __init__(self, num_rows: int):
        self._alone = num_rows == 1
        self._separator = ""

    def show(self, row: int, tokens: list[int]) -> None:
        ids = " ".join(map(str, tokens))
        if self._alone:
            print(f"{self._separator}{ids}", end="", flush=True)
            self._separator = " "
        else:
            print(f"{row}: {ids}", flush=True)

    def finish(self) -> None:
        if self._alone:
            print(flush=True)


class RoundRecorder:
    """Keeps the number of tokens of every round, for the picture; entry 0 of a row is its prefill.

    Attributes:
      rounds: published tokens of each round, all rows behind one another in order of arrival.
    """

    def __init__(self):
        self.rounds: list[int] = []
        self._begun: set[int] = set()

    def show(self, row: int, tokens: list[int]) -> None:
        if row in self._begun:
            self.rounds.append(len(tokens))
        self._begun.add(row)


def marks_for(color: str | None) -> tuple[str, str]:
    """Marks of ``--color``: "always", "never", or "auto" and None: colour on a terminal."""
    coloured = color == "always" or (color != "never" and sys.stdout.isatty())
    return COLOURED if coloured else PLAIN


def report(outputs: Sequence[Output]) -> str:
    """Statistics of a run as text."""
    total = total_statistics([output.statistics for output in outputs])
    lines = [
        f"prefill: {total.prompt_tokens} tokens in {total.prefill_seconds:.3f} s, "
        "compilation included",
        f"rounds: {total.rounds}, and {total.single_steps} without proposals; "
        f"{total.tokens_per_round:.3f} tokens a round",
        f"accepted: {total.accepted} of {total.drafted} proposals ({total.acceptance:.1%}); "
        f"by position {' '.join(map(str, total.accepted_by_position)) or '-'}",
        "columns a round: "
        + (" ".join(f"{width}x{n}" for width, n in sorted(total.widths.items())) or "-"),
        f"decode: {total.new_tokens - total.requests} tokens in {total.decode_seconds:.3f} s, "
        f"{total.tokens_per_second:.2f} tokens/s",
        f"finished: {' '.join(output.finish_reason for output in outputs)}",
    ]
    return "\n".join(lines)


def comparison(outputs: Sequence[Output], plain: Sequence[Output], *, sampled: bool) -> str:
    """Speculative and plain decoding of the same prompts, side by side.

    Args:
      outputs, plain: the two runs, in the order of the prompts.
      sampled: the tokens were drawn, so that the two runs are two draws of one distribution.
    """
    ours, theirs = (
        total_statistics([output.statistics for output in run]) for run in (outputs, plain)
    )
    # A round without proposals is not one of those that "tokens a round" averages.
    steps = f"{ours.rounds}" + (f" + {ours.single_steps}" if ours.single_steps else "")
    gain = ours.tokens_per_second / theirs.tokens_per_second if theirs.tokens_per_second else 0.0
    shares = [f"{count / ours.rounds:.0%}" for count in ours.accepted_by_position]
    lines = [
        f"{'':<26}{'speculative':>12}{'plain':>12}",
        f"{'rounds':<26}{steps:>12}{theirs.single_steps:>12}",
        f"{'tokens a round':<26}{ours.tokens_per_round:>12.2f}{theirs.tokens_per_round:>12.2f}",
        f"{'tokens/s':<26}{ours.tokens_per_second:>12.1f}{theirs.tokens_per_second:>12.1f}"
        f"   {gain:.2f} x plain; prefill and compilation are left out",
        f"accepted by position: {' '.join(shares) or '-'} of {ours.rounds} rounds",
        f"same text: {_same(outputs, plain, sampled)}",
    ]
    return "\n".join(lines)


def _same(outputs: Sequence[Output], plain: Sequence[Output], sampled: bool) -> str:
    if sampled:
        return "not to be expected, two draws of the same distribution"
    for row, (one, other) in enumerate(zip(outputs, plain, strict=True)):
        if one.tokens != other.tokens:
            same = sum(1 for _ in takewhile(lambda two: two[0] == two[1],
                                            zip(one.tokens, other.tokens, strict=False)))
            return (f"no, row {row} differs after {same} tokens (a near tie may round otherwise; "
                    "float32 has the fewest)")
    return "yes"
