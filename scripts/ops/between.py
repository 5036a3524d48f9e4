"""The small ops that stand between the products of a layer, at official sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.ops.norm import add_rmsnorm
from scripts.ops.case import Case, normal
from tests.oracles import norm as norm_oracle

FORMS = ("xla", "pallas")


def cases(full: bool) -> list[Case]:
    """All of them; `full` adds larger batches."""
    rows = (8, 64) if full else (8,)
    return [add_norm(count, hidden) for count in rows for hidden in (5120, 2048)]


def add_norm(rows: int, hidden: int) -> Case:
    """A branch joins the residual of a 27B or 35B layer, and the next norm."""
    def make(key):
        keys = jax.random.split(key, 3)
        return (
            *(normal(k, (1, rows, hidden)) for k in keys[:2]),
            jax.random.normal(keys[2], (hidden,), jnp.float32),
        )

    def exact(x, branch, weight):
        total = (x.astype(np.float32) + branch.astype(np.float32)).astype(x.dtype)
        wide = total.astype(np.float64)
        return wide, norm_oracle.offset_rmsnorm(wide, weight.astype(np.float64), 1e-6)

    return Case(
        name=f"add_rmsnorm {rows} x {hidden}", bytes=4 * rows * hidden * 2 + 4 * hidden, make=make,
        exact=exact, tolerance=2e-3,
        forms={form: functools.partial(
            add_rmsnorm, eps=1e-6, offset=True, implementation=form
        ) for form in FORMS},
    )
