"""Ops of the drafts at official sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.ops import dynamic_grouped_conv as conv
from dflash_jax.ops.context_kv_materialize import store_context
from dflash_jax.ops.norm import plain_rmsnorm
from dflash_jax.ops.rounding import round_to
from dflash_jax.ops.skinny_linear import skinny_parts
from dflash_jax.pallas.common import added
from scripts.ops.case import Case, normal
from tests.oracles import context_kv_materialize as context_oracle
from tests.oracles import dynamic_grouped_conv as conv_oracle
from tests.oracles import kv_write

FORMS = ("xla", "pallas")
LAYERS, KV_HEADS, DIM, RING, HIDDEN = 5, 8, 128, 2048, 5120
FEATURES = 5 * HIDDEN


def cases(full: bool) -> list[Case]:
    """All of them; `full` adds larger batches."""
    found = [context_rows(1, 8), context_product(1, 5), convolution(1, 8, 5120)]
    if full:
        found += [context_rows(8, 8), context_rows(1, 1024), context_product(8, 5)]
        found += [convolution(8, 8, 5120), convolution(1, 16, 2048)]
    return found


def context_operands(key, batch: int, columns: int, width: int):
    """Projection, norm weights, rings, slots, table, start and count of whole rows."""
    keys = jax.random.split(key, 2 * LAYERS + 1)
    ring = (batch, KV_HEADS, RING, DIM)
    rings = tuple(
        (normal(keys[2 * i], ring), normal(keys[2 * i + 1], ring, jnp.float16))
        for i in range(LAYERS)
    )
    return (
        normal(keys[-1], (batch, columns, width), jnp.float32),
        jnp.linspace(0.5, 1.5, LAYERS * DIM).reshape(LAYERS, DIM), rings,
        jnp.arange(batch, dtype=jnp.int32), jnp.zeros((batch, 1), jnp.int32),
        jnp.full((batch,), 3 * RING - 3, jnp.int32), jnp.full((batch,), columns, jnp.int32),
    )


OPTIONS = dict(paged=(False,) * LAYERS, eps=1e-6, theta=1e7, rounded=False)


def context_rows(batch: int, columns: int) -> Case:
    """Norm, rotation and storage of a 27B draft's context rows, projection at hand."""
    width = LAYERS * 2 * KV_HEADS * DIM

    def exact(projected, key_norm, rings, slot, table, start, count):
        keys, values = context_oracle.context_key_value(
            projected, key_norm, start[:, None] + np.arange(columns), kv_heads=KV_HEADS,
            eps=OPTIONS["eps"], theta=OPTIONS["theta"], rounded=OPTIONS["rounded"],
        )
        return [
            kv_write.write_ring(store.astype(np.float64), rows[layer], slot, start, count)
            for layer in range(LAYERS)
            for store, rows in zip(rings[layer], (keys, values), strict=True)
        ]

    return Case(
        name=f"store_context B={batch} n={columns}", bytes=batch * columns * width * (4 + 2),
        make=functools.partial(context_operands, batch=batch, columns=columns, width=width),
        exact=exact if columns <= 8 else None, tolerance=1e-3, state=2,
        forms={
            form: functools.partial(store_context, implementation=form, **OPTIONS)
            for form in FORMS
        },
    )


def context_product(batch: int, columns: int) -> Case:
    """Features to context of a 27B draft: both products, the norm between them, and storage."""
    rows = LAYERS * 2 * KV_HEADS * DIM

    def make(key):
        keys = jax.random.split(key, 3)
        small = context_operands(keys[0], batch, columns, FEATURES)
        return (
            small[0].astype(jnp.bfloat16), *small[1:], jnp.ones((HIDDEN,)),
            normal(keys[1], (HIDDEN, FEATURES), scale=FEATURES**-0.5),
            normal(keys[2], (rows, HIDDEN), scale=HIDDEN**-0.5),
        )

    def run(form):
        def call(features, key_norm, rings, slot, table, start, count, norm, first, second):
            product = added(skinny_parts(features, first, implementation=form))
            middle = plain_rmsnorm(round_to(product, jnp.bfloat16), norm, 1e-6)
            return store_context(
                skinny_parts(middle.astype(jnp.bfloat16), second, implementation=form), key_norm,
                rings, slot, table, start, count, implementation=form, **OPTIONS,
            )
        return call

    return Case(
        name=f"context materialise B={batch} n={columns}", make=make, state=2,
        bytes=2 * HIDDEN * (FEATURES + rows), forms={"xla": run("xla"), "pallas": run("pallas")},
    )


def convolution(batch: int, width: int, hidden: int) -> Case:
    """Both sides around one branch of a 27B or 35B DFlash2 layer, groups of 16 and two taps."""
    taps, group = 2, 16

    def make(key):
        keys = jax.random.split(key, 5)
        block = (batch, width, hidden)
        return (
            normal(keys[0], block), normal(keys[1], (hidden,), jnp.float32),
            normal(keys[2], (2, taps, hidden), jnp.float32),
            normal(keys[3], (2 * taps * hidden // group, hidden), scale=hidden**-0.5),
            normal(keys[4], block, jnp.float32),
        )

    def run(form):
        def call(x, norm_weight, base, projection, z):
            out = conv.prepare(x, norm_weight, base, projection, eps=1e-6, out_dtype=jnp.bfloat16,
                               implementation=form)
            done = conv.finish(x, z, base, out.finish_delta, implementation=form)
            return out.prepared, done
        return call

    def exact(*operands):
        x, norm_weight, base, projection, z = (v.astype(np.float64) for v in operands)
        normed = conv_oracle.normed(x, norm_weight, 1e-6)
        delta = (normed @ projection.T).reshape(batch, width, 2, taps, -1)
        prepared = conv_oracle.apply_taps(normed, base[0], delta[:, :, 0])
        return prepared, conv_oracle.finish(x, z, base, delta[:, :, 1])

    return Case(
        name=f"dynamic_grouped_conv B={batch} W={width} H={hidden}", make=make,
        bytes=2 * taps * hidden // group * hidden * 2,
        exact=exact if batch == 1 else None, forms={form: run(form) for form in FORMS},
    )
