"""A branch, or a product's summands, join the residual and the sum is normed, in one launch.

Implements: ops/norm.py, `add_rmsnorm`.
Matches when: rows of at most 16384 entries.

A program takes a row. Everything it needs is asked for before the sum of squares, so that one
latency of the memory is exposed.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, added, gpu_call, load, shared, store

MAX_WIDTH = 16384
_ENTRIES_OF_WARP = 512  # 16 a thread


def supports(width: int) -> bool:
    """Whether the kernel takes rows of so many entries."""
    return 0 < width <= MAX_WIDTH


@shared("eps", "offset", "interpret")
def add_rmsnorm(x, branch, weight, *, eps: float, offset: bool, interpret: bool):
    """Args: as in the op. Returns: x + branch and its norm, in the shape and dtype of x."""
    width, size, parts = x.shape[-1], x.size, branch.size // x.size
    entries = pl.next_power_of_2(width)
    out = jax.ShapeDtypeStruct((size,), x.dtype)

    def kernel(x, branch, weight, total, normed):
        entry = jnp.arange(entries, dtype=jnp.int32)
        mask, place = entry < width, pl.program_id(0) * width + entry
        first, factor, *second = (
            load(ref.at[at], mask=mask, other=0.0).astype(jnp.float32)
            for ref, at in (
                (x, place), (weight, entry),
                *((branch, part * size + place) for part in range(parts)),
            )
        )
        second = added(second)
        # The norm reads the sum as the residual keeps it.
        rounded = (first + second.astype(x.dtype).astype(jnp.float32)).astype(total.dtype)
        store(total.at[place], rounded, mask=mask)
        wide = rounded.astype(jnp.float32)
        unit = wide * lax.rsqrt(jnp.sum(wide * wide) / width + eps)
        factor = 1.0 + factor if offset else factor
        store(normed.at[place], (unit * factor).astype(normed.dtype), mask=mask)

    total, normed = gpu_call(
        kernel,
        name="add_rmsnorm",
        out_shape=(out, out),
        grid=(size // width,),
        in_specs=[WHOLE] * 3,
        out_specs=(WHOLE,) * 2,
        interpret=interpret,
        num_warps=min(16, max(1, entries // _ENTRIES_OF_WARP)),
    )(x.reshape(-1), branch.reshape(-1), weight)
    return total.reshape(x.shape), normed.reshape(x.shape)
