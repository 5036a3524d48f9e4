"""Idle time of a device is found in a trace and laid at the right part of the host's round."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from scripts import device_idle, kernel_times
from scripts.device_idle import PREFIX, REST, idle_by_round, read


def event(name, start, end, **stats):
    return SimpleNamespace(
        name=name, start_ns=1e6 * start, duration_ns=1e6 * (end - start), stats=stats.items()
    )


def plane(name, **lines):
    lines = [SimpleNamespace(name=line, events=events) for line, events in lines.items()]
    return SimpleNamespace(name=name, lines=lines)


def part(name, start, end):
    return event(PREFIX + name, start, end)


# Two rounds: the device works 0..10, 13..15 (its commit), 15.5..25 with a hole of 1, 29..30.
KERNELS = [(0, 6), (5, 10), (13, 15), (15.5, 20), (21, 25), (29, 30)]
HOST = [
    part("waiting", -1, 10), part("decision", 10, 12), part("commit", 12, 13.5),
    part("speculate", 14, 15.25), part("waiting", 16, 25), part("decision", 25, 28),
    part("commit", 28, 29), part("waiting", 29.5, 30),
]


@pytest.mark.parametrize("where", ["streams of a GPU", "operations on a CPU"])
def test_idle_time_is_laid_at_the_part_that_ran_meanwhile(where):
    other = event("a Python call", 10, 13)
    if where == "streams of a GPU":
        kernels = [event("kernel", *one) for one in KERNELS]
        planes = [
            plane("/device:GPU:0", Stream1=kernels[::2], Stream2=kernels[1::2],
                  Modules=[event("jit_round", 0, 30)]),
            plane("/host:CPU", python=[*HOST, other], worker=[event("x", 10, 13, hlo_op="x")]),
        ]
    else:
        kernels = [event("fusion", *one, hlo_op="fusion") for one in KERNELS]
        planes = [plane("/host:CPU", python=[*HOST, other], worker=kernels)]
    first, second = idle_by_round(read(planes), last="waiting")
    assert first == pytest.approx(
        {"waiting": 1, "decision": 2, "commit": 1, "speculate": 0.25, REST: 0.25}
    )
    assert second == pytest.approx(
        {"waiting": 0, "decision": 3, "commit": 1, "speculate": 0, REST: 0}
    )


def test_a_trace_of_this_device_has_both():
    work = jax.jit(lambda x: (x @ x).sum())
    x = jnp.ones((64, 64))
    work(x).block_until_ready()

    def rounds():
        for _ in range(3):
            with device_idle.span("waiting"):
                work(x).block_until_ready()
            with device_idle.span("decision"):
                sum(range(10_000))

    trace = device_idle.record(rounds)
    assert len(trace.busy) >= 3 and set(trace.parts) == {"waiting", "decision"}
    idle = idle_by_round(trace, last="waiting")
    assert len(idle) == 2 and all(one["decision"] > 0 for one in idle)


def test_kernels_of_a_round_are_summed_by_name():
    kernels = [
        event("gemm_fusion_dot_12", 0, 4), event("gemm_fusion_dot.3", 4, 6),
        event("loop_add_fusion", 7, 8),
    ]
    planes = [
        plane("/device:GPU:0", **{"Stream #13": kernels[:2], "Stream #14": kernels[2:],
                                  "XLA Ops": [event("gemm_fusion_dot_12", 0, 4)]}),
        plane("/host:CPU", python=[event("gemm_fusion_dot_12", 0, 9)]),
    ]
    found = kernel_times.read(planes, count=2)
    assert found.microseconds == pytest.approx({"gemm_fusion_dot": 3000, "loop_add_fusion": 500})
    assert found.launches == {"gemm_fusion_dot": 1, "loop_add_fusion": 0.5}
    assert found.span == pytest.approx(4000) and found.idle == pytest.approx(500)
    assert found.lines(1) == [
        "2 launches, busy 3.500 ms of 4.000 ms, 500 us idle",
        "    3000.0 us     1.0 x  gemm_fusion_dot",
    ]


def test_time_in_which_a_kernel_waits_for_those_before_it_is_not_its_own():
    kernels = [event("a", 0, 6), event("b", 1, 9), event("c", 10, 12)]
    found = kernel_times.read([plane("/device:GPU:0", **{"Stream #1": kernels})], count=1)
    assert found.microseconds == pytest.approx({"a": 6000, "b": 3000, "c": 2000})
    assert found.busy == pytest.approx(11000) and found.span == pytest.approx(12000)
    assert found.idle == pytest.approx(1000)


def test_a_trace_without_kernels_says_so():
    """Not 0 launches in 0 ms, which reads like a measurement."""
    found = kernel_times.read([plane("/host:CPU", worker=[event("x", 0, 1, hlo_op="x")])], count=1)
    assert found.lines() == ["no kernels in the trace: the profiler names those of a GPU alone"]
