"""Compares computed arrays with a kit's arrays; one printed line each.

What a golden array is used for is said by a `Check`: compared as floats, compared exactly, an
input of the computation. An array without any is a failure, so that nothing new in a kit passes
unseen.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .kit import Golden

# The kit's own tolerances: residual streams grow with depth, so they get the wider one.
RESIDUAL = 2e-3
OTHER = 1e-3
# Beside them, because an absolute bound says nothing about arrays of small values. The kit's
# reference and a float64 evaluation differ by far less, and 1e-2 must fail.
RELATIVE_L2 = 2e-4


@dataclasses.dataclass(frozen=True)
class Floats:
    """Compare within an absolute bound and a relative L2 bound."""

    value: np.ndarray
    absolute: float = OTHER
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Exact:
    """Compare integers; `where` (same leading shape) limits the comparison to some entries."""

    value: np.ndarray
    where: np.ndarray | None = None
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Input:
    """The array is an input of the computation."""


Check = Floats | Exact | Input
Checks = dict[str, list[Check]]


@dataclasses.dataclass(frozen=True)
class Line:
    """One result. `ok` is None for arrays that are not compared."""

    name: str
    error: str
    tolerance: str
    ok: bool | None

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FAIL", None: "-"}[self.ok]
        return f"{self.name:<64} {self.error:<44} {self.tolerance:<22} {verdict}"


def failure(name: str, message: str) -> Line:
    """A line for something that could not even be compared."""
    return Line(name, message, "", False)


def compare(golden: Golden, checks: Checks) -> list[Line]:
    """One line for every array of a golden file and every check of it."""
    lines = []
    for name, array in golden.arrays.items():
        if not checks.get(name):
            lines.append(failure(f"{golden.stem}/{name}", "unknown array: nothing checks it"))
        for check in checks.get(name, ()):
            lines.append(_line(f"{golden.stem}/{name}", array, check))
    return lines


def _line(name: str, array: np.ndarray, check: Check) -> Line:
    match check:
        case Input():
            return Line(name, "input", "", None)
        case Floats(value, absolute, label):
            return _floats(name + label, array, np.asarray(value), absolute)
        case Exact(value, where, label):
            return _exact(name + label, array, np.asarray(value), where)


def _floats(name: str, golden: np.ndarray, value: np.ndarray, absolute: float) -> Line:
    tolerance = f"{absolute:.0e} abs, {RELATIVE_L2:.0e} rel"
    if value.shape != golden.shape:
        return Line(name, f"shape {value.shape}, expected {golden.shape}", tolerance, False)
    if not golden.size:
        return Line(name, "empty", tolerance, True)
    error = value.astype(np.float64) - golden.astype(np.float64)
    worst, norm = np.abs(error).max(), np.linalg.norm(golden.astype(np.float64))
    relative = np.linalg.norm(error) / norm if norm else np.linalg.norm(error)
    # NaN compares false, so a value that is not finite fails.
    ok = bool(worst <= absolute and relative <= RELATIVE_L2)
    return Line(name, f"{worst:.2e} abs, {relative:.2e} rel", tolerance, ok)


def _exact(name: str, golden: np.ndarray, value: np.ndarray, where: np.ndarray | None) -> Line:
    if value.shape != golden.shape:
        return Line(name, f"shape {value.shape}, expected {golden.shape}", "exact", False)
    different = value != golden
    where = np.ones(golden.shape, bool) if where is None else where
    where = where.reshape(where.shape + (1,) * (golden.ndim - where.ndim))
    where = np.broadcast_to(where, golden.shape)
    if not where.any():
        return Line(name, f"0 of {golden.size} comparable", "exact", None)
    count = int((different & where).sum())
    return Line(name, f"{count} of {int(where.sum())} differ", "exact", count == 0)
