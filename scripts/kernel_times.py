"""Where a device's time goes: kernels by name, from a profiler trace."""

import collections
import dataclasses
import re
from collections.abc import Callable

from scripts.device_idle import profile


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Of one unit of work, a round.

    Fields:
      microseconds: time in kernels of a name, numbers at its end left out: from when a kernel had
        started and all before it had ended, since one may start early and wait for them.
      launches: how many of them.
      span: microseconds from the first kernel's start to the last one's end.
      idle: microseconds of the span in which no kernel ran.
    """

    microseconds: dict[str, float]
    launches: dict[str, float]
    span: float
    idle: float

    @property
    def busy(self) -> float:
        return sum(self.microseconds.values())

    def lines(self, most: int = 24) -> list[str]:
        """A table, the costliest names first; of none, why."""
        if not self.launches:
            return ["no kernels in the trace: the profiler names those of a GPU alone"]
        names = sorted(self.microseconds, key=self.microseconds.get, reverse=True)
        rows = [
            f"{self.microseconds[name]:10.1f} us {self.launches[name]:7.1f} x  {name}"
            for name in names[:most]
        ]
        return [f"{sum(self.launches.values()):.0f} launches, busy {self.busy / 1e3:.3f} ms of "
                f"{self.span / 1e3:.3f} ms, {self.idle:.0f} us idle", *rows]


def record(work: Callable[[], None], count: int) -> Kernels:
    """Runs `work`, which holds `count` rounds and waits for them, under the profiler."""
    return read(profile(work).planes, count)


def read(planes, count: int) -> Kernels:
    """The kernels in the streams of device planes, as averages over `count` rounds."""
    launches, runs = collections.Counter(), []
    for plane in planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                name = re.sub(r"[._]?\d+$", "", event.name)
                launches[name] += 1 / count
                runs.append((event.start_ns, event.start_ns + event.duration_ns, name))
    time, end = collections.Counter(), min((start for start, _, _ in runs), default=0.0)
    first = end
    for start, stop, name in sorted(runs):
        time[name] += max(0.0, stop - max(start, end)) / 1e3 / count
        end = max(end, stop)
    span = (end - first) / 1e3 / count
    idle = span - sum(time.values())
    return Kernels(microseconds=dict(time), launches=dict(launches), span=span, idle=idle)
