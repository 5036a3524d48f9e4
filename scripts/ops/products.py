"""Products of few rows with the large matrices of a 27B layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.ops.norm import add_rmsnorm
from dflash_jax.ops.skinny_linear import skinny_linear, skinny_parts, skinny_swiglu
from scripts.ops.case import Case, normal

FORMS = ("xla", "pallas", "mosaic")


def cases(full: bool) -> list[Case]:
    """All of them; `full` adds the smaller matrices and more rows."""
    found = [mixed(8, 17408, 5120), added(8, 5120, 17408), normed(8, 5120, 17408)]
    if full:
        found += [normed(8, 5120, 6144), normed(64, 5120, 17408), normed(8, 2048, 4096)]
        found += [added(8, 16480, 5120), added(8, 5120, 6144), added(8, 96, 5120)]
        found += [mixed(64, 17408, 5120), added(64, 5120, 17408)]
    return found


def operands(key, tokens: int, rows: int, width: int):
    """Rows, and a matrix that keeps their size."""
    keys = jax.random.split(key)
    return normal(keys[0], (tokens, width)), normal(keys[1], (rows, width), scale=width**-0.5)


def wide_product(x, matrix):
    """Float64, block by block."""
    wide = x.astype(np.float64)
    blocks = np.array_split(matrix, 16)
    return np.concatenate([wide @ block.astype(np.float64).T for block in blocks], axis=1)


def added(tokens: int, rows: int, width: int) -> Case:
    """A projection and a residual."""
    def make(key):
        keys = jax.random.split(key)
        return *operands(keys[0], tokens, rows, width), normal(keys[1], (tokens, rows))

    def run(form):
        return lambda x, matrix, residual: skinny_linear(
            x, matrix, jnp.bfloat16, residual=residual, implementation=form
        )

    return Case(
        name=f"skinny_linear + residual {rows} x {width} T={tokens}", bytes=rows * width * 2,
        make=make, exact=lambda x, matrix, residual: residual + wide_product(x, matrix),
        forms={form: run(form) for form in FORMS},
    )


def normed(tokens: int, rows: int, width: int) -> Case:
    """The last product of a branch, in parts, and the norm behind it that adds them."""
    def make(key):
        keys = jax.random.split(key)
        around = normal(keys[1], (tokens, rows)), normal(keys[1], (rows,), "float32")
        return *operands(keys[0], tokens, rows, width), *around

    def run(form):
        def both(x, matrix, residual, weight):
            parts = skinny_parts(x, matrix, implementation=form)
            return add_rmsnorm(residual, parts, weight, 1e-6, offset=True, implementation=form)

        return both

    def exact(x, matrix, residual, weight):
        total = residual.astype(np.float64) + wide_product(x, matrix)
        scale = np.sqrt(np.mean(total * total, axis=1, keepdims=True) + 1e-6)
        return total, total / scale * (1.0 + weight)

    return Case(
        name=f"skinny_parts + add_rmsnorm {rows} x {width} T={tokens}", bytes=rows * width * 2,
        make=make, exact=exact, forms={form: run(form) for form in ("xla", "pallas")},
    )


def mixed(tokens: int, inner: int, width: int) -> Case:
    """Gate and up with SwiGLU."""
    def exact(x, matrix):
        gate, up = np.split(wide_product(x, matrix), 2, axis=1)
        return gate / (1.0 + np.exp(-gate)) * up

    return Case(
        name=f"skinny_swiglu {2 * inner} x {width} T={tokens}", bytes=2 * inner * width * 2,
        make=functools.partial(operands, tokens=tokens, rows=2 * inner, width=width), exact=exact,
        forms={
            form: functools.partial(skinny_swiglu, implementation=form) for form in FORMS
        },
    )
