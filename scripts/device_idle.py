"""When a device had nothing to run, and what the host was doing then, from a profiler trace."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

PREFIX = "host part: "
REST = "anything else"


def span(part: str) -> contextlib.AbstractContextManager:
    """Marks what the host does in a trace; costs next to nothing without one."""
    return jax.profiler.TraceAnnotation(PREFIX + part)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Intervals [n, 2] of nanoseconds on one clock, sorted by start.

    Fields:
      busy: in which the device ran something; they do not overlap.
      parts: of the host, by name.
    """

    busy: np.ndarray
    parts: dict[str, np.ndarray]


def record(work: Callable[[], None]) -> Trace:
    """Runs `work` under the profiler."""
    return read(profile(work).planes)


def profile(work: Callable[[], None]) -> jax.profiler.ProfileData:
    """What the profiler saw of `work`, which waits for the device."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # one event a Python call would slow the host down
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            work()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(file))


def read(planes) -> Trace:
    """The trace in profiler planes.

    A GPU's work is what its streams hold, copies included; a CPU's are the host's events that name
    an HLO operation.
    """
    planes = list(planes)
    busy, parts = [], {}
    for plane in planes:
        if plane.name.startswith("/device:"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    busy += [_interval(event) for event in line.events]
    for event in _host_events(planes):
        if event.name.startswith(PREFIX):
            parts.setdefault(event.name.removeprefix(PREFIX), []).append(_interval(event))
    if not busy:
        busy = [
            _interval(event) for event in _host_events(planes)
            if any(name == "hlo_op" for name, _ in event.stats)
        ]
    return Trace(busy=union(busy), parts={name: np.array(sorted(one))
                                           for name, one in parts.items()})


def idle_by_round(trace: Trace, last: str) -> list[dict[str, float]]:
    """Milliseconds in which the device was idle, by round and by the host's part at that time.

    Args:
      last: the part whose end ends a round. What lies before the first such end is left out.
    """
    gaps = np.stack([trace.busy[:-1, 1], trace.busy[1:, 0]], axis=1)
    ends = trace.parts[last][:, 1]
    rounds = []
    for start, end in zip(ends, ends[1:], strict=False):
        idle = {
            name: sum(_overlap(gaps, max(a, start), min(b, end)) for a, b in spans
                      if a < end and b > start)
            for name, spans in trace.parts.items()
        }
        idle[REST] = _overlap(gaps, start, end) - sum(idle.values())
        rounds.append({name: 1e-6 * time for name, time in idle.items()})
    return rounds


def _host_events(planes) -> Iterator:
    for plane in planes:
        if plane.name.startswith("/host:"):
            for line in plane.lines:
                yield from line.events


def _interval(event) -> tuple[float, float]:
    return event.start_ns, event.start_ns + event.duration_ns


def union(intervals) -> np.ndarray:
    """The same time without overlaps."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array(merged, float).reshape(-1, 2)


def _overlap(gaps: np.ndarray, start: float, end: float) -> float:
    return float(np.maximum(np.minimum(gaps[:, 1], end) - np.maximum(gaps[:, 0], start), 0).sum())
