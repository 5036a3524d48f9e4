"""What a request's tokens have said so far: stop sequences, stop strings, and text held back.

Immutable, so that a preview may look ahead and be dropped. Text is held back while its bytes end
inside a character, and while its end could still become a stop string.
"""

import dataclasses
from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """State of the search after some tokens.

    Fields:
      sequences: id sequences that stop.
      strings: strings that stop.
      decode: text of token ids, or None: then there is no text, and there are no strings.
      tail: the last ids, as many as a sequence may still reach back.
      recent: ids since the last two boundaries of text; decoding starts with the first of them,
        because a tokenizer may write an id differently at the start of a text.
      shown: how many of ``recent`` have given their text.
      held: text of them that could still become a stop string.
    """

    sequences: tuple[tuple[int, ...], ...] = ()
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    tail: tuple[int, ...] = ()
    recent: tuple[int, ...] = ()
    shown: int = 0
    held: str = ""

    def push(self, tokens: Sequence[int]) -> "Sight":
        """Looks at tokens, one after the other, up to the first that stops."""
        watch, text, stopped = self._read(tokens)
        if not stopped and not self._meets_a_sequence(tokens):  # mostly so: one look at all of them
            return Sight(watch=watch.silent(*tokens), text=text, used=len(tokens), stopped=False)
        watch, texts = self, []
        for index, token in enumerate(tokens):
            before = watch
            watch, text, stopped = before._read((token,))
            texts.append(text)
            watch = watch.silent(token)
            if stopped or before._meets_a_sequence((token,)):
                return Sight(watch=watch, text="".join(texts), used=index + 1, stopped=True)
        return Sight(watch=watch, text="".join(texts), used=len(tokens), stopped=False)

    def silent(self, *tokens: int) -> "Watch":
        """The watch after ids that count for sequences, but have no text or had it read already."""
        longest = max(map(len, self.sequences), default=0)
        if not longest:
            return self
        return dataclasses.replace(self, tail=(*self.tail, *tokens)[-longest:])

    def behind(
        self, other: "Watch", tokens: Sequence[int], shown: str
    ) -> tuple["Watch", str]:
        """This watch, which has seen nothing, from where another stands.

        Args:
          tokens, shown: what the other has seen, and the text it has let out.
        Returns:
          the watch, and the text without what this one holds back.
        Raises: ValueError if what this one looks for has come already.
        """
        text = shown + other.held
        if any(string in text for string in self.strings) or self._meets_a_sequence(tokens):
            raise ValueError("stop_strings, stop_sequences: expected none that has come already")
        kept = len(text) - self._undecided(text)
        watch = dataclasses.replace(
            self, recent=other.recent, shown=other.shown, held=text[kept:]
        )
        return watch.silent(*tokens), text[:kept]

    def finish(self) -> tuple["Watch", str]:
        """The watch with nothing left to tell, and the text it held back."""
        if self.decode is None:
            return self, ""
        text = self.held + self._piece(self.recent)
        return dataclasses.replace(self, recent=(), shown=0, held=""), text

    def _read(self, tokens: Sequence[int]) -> tuple["Watch", str, bool]:
        """After these tokens: the watch, the text that is certain, whether a string has come."""
        if self.decode is None:
            return self, "", False
        recent = (*self.recent, *tokens)
        piece = self._piece(recent)
        text = self.held + piece
        sure = text.rstrip(REPLACEMENT)  # what follows may still become a character
        found = [place for string in self.strings if (place := sure.find(string)) >= 0]
        if found:
            ended = dataclasses.replace(self, recent=(), shown=0, held="")
            return ended, text[: min(found)], True
        if not piece or piece.endswith(REPLACEMENT):
            return dataclasses.replace(self, recent=recent), "", False
        kept = len(text) - self._undecided(text)
        context = recent[self.shown :]
        watch = dataclasses.replace(
            self, recent=context, shown=len(context), held=text[kept:]
        )
        return watch, text[:kept], False

    def _piece(self, recent: Sequence[int]) -> str:
        before = self.decode(recent[: self.shown]) if self.shown else ""
        return self.decode(recent)[len(before) :] if len(recent) > self.shown else ""

    def _undecided(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(string) - 1 for string in self.strings), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self.strings):
                return length
        return 0

    def _meets_a_sequence(self, tokens: Sequence[int]) -> bool:
        """Whether one of the sequences ends within these tokens."""
        ids = (*self.tail, *tokens)
        return any(
            ids[end - len(sequence) : end] == sequence
            for sequence in self.sequences
            for end in range(max(len(self.tail) + 1, len(sequence)), len(ids) + 1)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sight:
    """What a look at new tokens showed.

    Fields:
      watch: the state after the tokens used.
      text: text that became certain.
      used: tokens up to the one that stops, else all.
      stopped: whether one stops.
    """

    watch: Watch
    text: str
    used: int
    stopped: bool
