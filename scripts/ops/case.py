"""One op at one size: how to make operands, run it in each form, and judge the result."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

# Operands are rotated until they hold more than the second-level cache does, four times over.
ROTATED_BYTES = 240e6
MOST_COPIES = 24
REPEATS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Fields:
      name: op and size.
      bytes: that one call must move: weights, context and state once.
      make: key -> operands of one call.
      forms: name -> function of the operands; `None` operands are not passed on.
      exact: operands as NumPy arrays -> float64 result, or None where another case has shown it.
      tolerance: relative L2 error that the result may have.
    """

    name: str
    bytes: float
    make: Callable
    forms: Mapping[str, Callable]
    exact: Callable | None = None
    tolerance: float = 4e-3

    def check(self, form: str, key) -> float:
        """Relative L2 error of a form on random operands. Raises ValueError above the tolerance."""
        operands = self.make(key)
        actual = np.asarray(jax.jit(self.forms[form])(*operands), np.float64)
        expected = self.exact(*(np.asarray(x) for x in operands))
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        if not error <= self.tolerance:
            raise ValueError(f"{self.name}, {form}: relative error {error:.2e} > {self.tolerance}")
        return error

    def time(self, form: str, key) -> float:
        """Microseconds of a call, the median over programs of many calls on different operands."""
        one = self.make(key)
        held = max(self.bytes, sum(x.nbytes for x in jax.tree.leaves(one)), 1.0)
        copies = int(min(MOST_COPIES, max(3, ROTATED_BYTES // held)))
        sets = [one, *(self.make(k) for k in jax.random.split(key, copies - 1))]
        program = jax.jit(lambda sets: [self.forms[form](*operands) for operands in sets])
        jax.block_until_ready(program(sets))
        taken = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            jax.block_until_ready([program(sets) for _ in range(4)])
            taken.append((time.perf_counter() - began) / 4 / copies)
        return statistics.median(taken) * 1e6
