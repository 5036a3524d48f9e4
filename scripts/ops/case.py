"""One op at one size: how to make operands, run it in each form, and judge the result."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from scripts import kernel_times

# Operands are rotated until they hold more than the second-level cache does, four times over.
ROTATED_BYTES = 240e6
MOST_COPIES = 24
REPEATS = 12


def normal(key, shape, dtype=jnp.bfloat16, scale=1.0):
    """Random operands."""
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Fields:
      name: op and size.
      bytes: that one call must move: weights, context and state once.
      make: key -> operands of one call.
      forms: name -> function of the operands; `None` operands are not passed on.
      exact: operands as NumPy arrays -> float64 result, or None where another case has shown it.
      tolerance: relative L2 error that the result may have.
      state: which operand a form updates in place and returns, or None.
      result: makes the result of what a form leaves; not timed, since whoever reads that does it.
    """

    name: str
    bytes: float
    make: Callable
    forms: Mapping[str, Callable]
    exact: Callable | None = None
    tolerance: float = 4e-3
    state: int | None = None
    result: Callable = lambda left: left

    def check(self, form: str, key) -> float:
        """Relative L2 error of a form on random operands. Raises ValueError above the tolerance."""
        operands = self.make(key)
        expected = _joined(self.exact(*jax.tree.map(np.asarray, operands)))
        actual = _joined(self.result(jax.jit(self.forms[form])(*operands)))
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        if not error <= self.tolerance:
            raise ValueError(f"{self.name}, {form}: relative error {error:.2e} > {self.tolerance}")
        return error

    def time(self, form: str, key) -> tuple[float, float]:
        """Microseconds of a call, the median over programs of many calls on different operands; and
        of its kernels, from a profiler trace of two such programs. 0 if the trace shows none."""
        state, one = self._apart(self.make(key))
        held = max(self.bytes, sum(x.nbytes for x in jax.tree.leaves(one)), 1.0)
        copies = int(min(MOST_COPIES, max(3, ROTATED_BYTES // held)))
        sets = [one, *(self._apart(self.make(k))[1] for k in jax.random.split(key, copies - 1))]
        program = self._program(self.forms[form])
        state, _ = jax.block_until_ready(program(state, sets))
        taken = []

        def run(programs):
            nonlocal state
            results = []
            for _ in range(programs):
                state, result = program(state, sets)
                results.append(result)
            jax.block_until_ready((state, results))

        for _ in range(REPEATS):
            began = time.perf_counter()
            run(4)
            taken.append((time.perf_counter() - began) / 4 / copies)
        kernels = kernel_times.record(lambda: run(2), 2 * copies)
        return statistics.median(taken) * 1e6, kernels.busy

    def _apart(self, operands):
        """The state, or nothing, and the other operands."""
        if self.state is None:
            return (), operands
        return operands[self.state], (*operands[: self.state], *operands[self.state + 1 :])

    def _program(self, form: Callable):
        """Runs a form on every set; a state goes through all of them, in place."""
        def all_of_them(state, sets):
            results = []
            for operands in sets:
                if self.state is None:
                    results.append(form(*operands))
                else:
                    state = form(*operands[: self.state], state, *operands[self.state :])
            return state, results

        return jax.jit(all_of_them, donate_argnums=0)


def _joined(result):
    """All numbers of a result in one vector."""
    return np.concatenate([
        np.asarray(x).astype(np.float64).reshape(-1) for x in jax.tree.leaves(result)
    ])
