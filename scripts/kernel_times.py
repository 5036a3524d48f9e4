"""Where a device's time goes: kernels by name, from a profiler trace."""

import collections
import dataclasses
import re
from collections.abc import Callable

import numpy as np

from scripts.device_idle import profile, union


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Of one unit of work, a round.

    Fields:
      microseconds: time in kernels of a name, numbers at its end left out.
      launches: how many of them.
      span: microseconds from the first kernel's start to the last one's end.
      idle: microseconds of the span in which no kernel ran; several may run at once.
    """

    microseconds: dict[str, float]
    launches: dict[str, float]
    span: float
    idle: float

    @property
    def busy(self) -> float:
        return sum(self.microseconds.values())

    def lines(self, most: int = 24) -> list[str]:
        """A table, the costliest names first."""
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
    time, launches, runs = collections.Counter(), collections.Counter(), []
    for plane in planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                name = re.sub(r"[._]?\d+$", "", event.name)
                time[name] += event.duration_ns / 1e3 / count
                launches[name] += 1 / count
                runs.append((event.start_ns, event.start_ns + event.duration_ns))
    busy = union(runs)
    span = (busy[-1, 1] - busy[0, 0]) / 1e3 / count if runs else 0.0
    idle = span - float(np.sum(busy[:, 1] - busy[:, 0])) / 1e3 / count
    return Kernels(microseconds=dict(time), launches=dict(launches), span=span, idle=idle)
