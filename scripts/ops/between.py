"""The small ops that stand between the products of a layer, at official sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.ops.norm import add_rmsnorm
from dflash_jax.ops.norm_rope import norm_rope
from scripts.ops.case import Case, normal
from tests.oracles import norm as norm_oracle
from tests.oracles import rope as rope_oracle

FORMS = ("xla", "pallas")


def cases(full: bool) -> list[Case]:
    """All of them; `full` adds larger batches."""
    rows = (8, 64) if full else (8,)
    found = [add_norm(count, hidden) for count in rows for hidden in (5120, 2048)]
    for batch in (1, 8) if full else (1,):
        found += [target_heads(batch, 8, 24, 4), draft_heads(batch, 8, 32, 8)]
    return found


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


def target_heads(batch: int, width: int, query: int, kv: int, dim=256, rotary=64) -> Case:
    """Query, key, value and gate of a full layer: 1 + w norms, three axes, part of a head turns."""
    sections = {64: (11, 11, 10), 8: (2, 1, 1)}[rotary]
    options = dict(gated=True, offset=True, theta=1e7, mrope=(rotary, sections))

    def turn(x, positions):
        return rope_oracle.mrope_partial(x, positions, 1e7, rotary, sections)

    return _heads("target", batch, width, (query, kv), dim, jnp.bfloat16, turn, **options)


def draft_heads(batch: int, width: int, query: int, kv: int, dim=128) -> Case:
    """Query, key and value of a draft layer from an fp32 projection; a head turns whole."""
    def turn(x, positions):
        return rope_oracle.rope_1d(x, positions, 1e7)

    options = dict(gated=False, offset=False, theta=1e7)
    return _heads("draft", batch, width, (query, kv), dim, jnp.float32, turn, **options)


def _heads(name, batch, width, heads, dim, dtype, turn, *, gated, offset, **options):
    counts = [heads[0], heads[0] if gated else 0, heads[1], heads[1]]
    rows = sum(counts) * dim

    def make(key):
        keys = jax.random.split(key, 2)
        positions = 4096 + jnp.tile(jnp.arange(width, dtype=jnp.int32), (batch, 1))
        return (
            normal(keys[0], (batch, width, rows), dtype),
            *jax.random.normal(keys[1], (2, dim), jnp.float32),
            jnp.stack([positions] * 3, axis=-1) if gated else positions,
        )

    def exact(projected, query_norm, key_norm, positions):
        wide = projected.astype(jnp.bfloat16).astype(np.float64).reshape(batch, width, -1, dim)
        query, gate, key, value = np.split(wide, np.cumsum(counts)[:-1], axis=2)
        rule = norm_oracle.offset_rmsnorm if offset else norm_oracle.plain_rmsnorm
        turned = [turn(rule(x, weight.astype(np.float64), 1e-6), positions)
                  for x, weight in ((query, query_norm), (key, key_norm))]
        return [*turned, value, *([gate] if gated else [])]

    return Case(
        name=f"norm_rope {name} B={batch} W={width} {heads[0]}/{heads[1]} D={dim}",
        bytes=batch * width * rows * (jnp.dtype(dtype).itemsize + 2), make=make,
        exact=exact if batch == 1 else None, tolerance=2e-3,
        forms={form: functools.partial(
            norm_rope, heads=heads, gated=gated, offset=offset, eps=1e-6,
            dtypes=("bfloat16",) * 3, implementation=form, **options,
        ) for form in FORMS},
    )
