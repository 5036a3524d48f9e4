"""A progress line on standard error, redrawn on a terminal, and a report that keeps times."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from dflash_jax.training.results import write_text

WIDTH = 24
LOG_SECONDS = 10.0
REPORT = "report.json"


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


class Stopwatch:
    """Times named blocks and keeps report.json up to date, so that a stopped run leaves figures."""

    def __init__(self, seconds: dict, out: Path, report: dict, say: Callable[[str], None]):
        self._seconds, self._out, self._report, self._say = seconds, out, report, say
        self._start = time.monotonic()
        self._name = ""
        self._began = self._start

    def __call__(self, name: str) -> "Stopwatch":
        self._name = name
        return self

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *error) -> None:
        now = time.monotonic()
        self._seconds[self._name] = round(now - self._began, 1)
        self._say(f"{self._name}: {now - self._began:.1f}s, {now - self._start:.1f}s in all")
        self.write()

    def write(self) -> None:
        write_text(self._out / REPORT, json.dumps(self._report, indent=1) + "\n")
