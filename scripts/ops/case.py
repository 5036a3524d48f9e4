"""One op at one size: how to make operands, run it in each form, and judge the result."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

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
    """

    name: str
    bytes: float
    make: Callable
    forms: Mapping[str, Callable]
    exact: Callable | None = None
    tolerance: float = 4e-3
    state: int | None = None

    def check(self, form: str, key) -> float:
        """Relative L2 error of a form on random operands. Raises ValueError above the tolerance."""
        operands = self.make(key)
        expected = _joined(self.exact(*jax.tree.map(np.asarray, operands)))
        actual = _joined(jax.jit(self.forms[form])(*operands))
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
        states, program = self._program(self.forms[form], sets)
        states = jax.block_until_ready(program(states))
        taken = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            results = []
            for _ in range(4):
                results.append(program(states))
                if self.state is not None:
                    states = results.pop()
            jax.block_until_ready((results, states))
            taken.append((time.perf_counter() - began) / 4 / copies)
        return statistics.median(taken) * 1e6

    def _program(self, form: Callable, sets):
        """The states of all operand sets, and the program that runs the form on each set once."""
        if self.state is None:
            run = jax.jit(lambda sets: [form(*operands) for operands in sets])
            return None, lambda states: run(sets)
        place = self.state
        states = [operands[place] for operands in sets]
        rest = [(*operands[:place], *operands[place + 1 :]) for operands in sets]

        def once(states, rest):
            return [
                form(*others[:place], state, *others[place:])
                for state, others in zip(states, rest, strict=True)
            ]

        run = jax.jit(once, donate_argnums=0)
        return states, lambda states: run(states, rest)


def _joined(result):
    """All numbers of a result in one vector."""
    return np.concatenate([
        np.asarray(x).astype(np.float64).reshape(-1) for x in jax.tree.leaves(result)
    ])
