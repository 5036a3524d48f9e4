"""Heads of the full vocabulary, product and choice together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.ops.vocab import linear_argmax, linear_topk
from scripts.ops.case import Case, normal

VOCABULARY, PUBLIC = 248320, 248077


def cases(full: bool) -> list[Case]:
    """All of them; `full` adds the narrower head and larger batches."""
    found = [best(7, 5120), lowest(7, 5120)]
    if full:
        found += [best(7, 2048), lowest(15, 2048), best(56, 5120), best(120, 5120)]
    return found


def operands(key, tokens: int, width: int):
    """Hidden rows and a head."""
    keys = jax.random.split(key)
    return normal(keys[0], (tokens, width)), normal(keys[1], (VOCABULARY, width), scale=width**-0.5)


def exact_scores(hidden, head):
    """[T, public] float64, block by block: a wide copy of the head would not fit everywhere."""
    wide = hidden.astype(np.float64)
    blocks = np.array_split(head[:PUBLIC], 64)
    return np.concatenate([wide @ block.astype(np.float64).T for block in blocks], axis=1)


def best(tokens: int, width: int) -> Case:
    """The 16 best rows of a head."""
    def run(form):
        return lambda hidden, head: linear_topk(
            hidden, head, k=16, public_rows=PUBLIC, implementation=form
        ).scores

    return Case(
        name=f"linear_topk 16 of {VOCABULARY} x {width} T={tokens}",
        bytes=VOCABULARY * width * 2, tolerance=1e-5,
        make=functools.partial(operands, tokens=tokens, width=width),
        exact=lambda *x: -np.sort(-exact_scores(*x), axis=1)[:, :16],
        forms={form: run(form) for form in ("xla", "select", "pallas", "mosaic")},
    )


def lowest(tokens: int, width: int) -> Case:
    """The best row of a head, judged by the score that it has."""
    def run(form):
        def call(hidden, head):
            row = linear_argmax(
                hidden, head, public_rows=PUBLIC, logits_dtype="bfloat16", implementation=form
            )
            return jnp.sum(head[row].astype(jnp.float32) * hidden.astype(jnp.float32), axis=-1)
        return call

    return Case(
        name=f"linear_argmax of {VOCABULARY} x {width} T={tokens}", bytes=VOCABULARY * width * 2,
        make=functools.partial(operands, tokens=tokens, width=width),
        exact=lambda *x: exact_scores(*x).max(axis=1),
        forms={form: run(form) for form in ("xla", "pallas", "mosaic")},
    )
