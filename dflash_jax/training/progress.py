"""A progress line on standard error: redrawn on a terminal, one line now and then in a log."""

import sys
import time
from typing import TextIO

WIDTH = 24
LOG_SECONDS = 10.0


class Progress:
    """Shows how far a stage is."""

    def __init__(self, name: str, stream: TextIO | None = None):
        self._name = name
        self._stream = sys.stderr if stream is None else stream
        self._start = time.monotonic()
        self._shown = float("-inf")

    def show(self, done: int, total: int, **values: float) -> None:
        """Draws the bar; on a stream that is no terminal at most every ten seconds."""
        now, last = time.monotonic(), done >= total
        terminal = self._stream.isatty()
        if not terminal and not last and now - self._shown < LOG_SECONDS:
            return
        self._shown = now
        filled = WIDTH * done // max(total, 1)
        bar = "#" * filled + "." * (WIDTH - filled)
        numbers = " ".join(f"{name} {value:.4g}" for name, value in values.items())
        seconds = now - self._start
        line = f"{self._name} [{bar}] {done}/{total} {numbers} {seconds:.0f}s"
        end = "\n" if last or not terminal else ""
        self._stream.write(f"\r\x1b[K{line}{end}" if terminal else line + "\n")
        self._stream.flush()

    def say(self, message: str) -> None:
        """One line of its own."""
        self._stream.write(f"{self._name}: {message}\n")
        self._stream.flush()
