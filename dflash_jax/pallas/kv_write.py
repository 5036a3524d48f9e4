"""The accepted K and V rows of all full-attention layers into their pages, one launch.

Implements: ops/kv_write.py, `write_layers`.
Matches when: heads are a power of two wide.
Assumes: pages that are written belong to one row each.

A program copies one head of one column of one layer.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import WHOLE, gpu_call, is_power_of_two, shared


def supports(head_dim: int) -> bool:
    """Whether the kernel copies heads of this width."""
    return is_power_of_two(head_dim)


@shared("interpret")
def write(pools, rows, path, table, start, count, *, interpret: bool):
    """Args: as in the op. Returns: the pools; donate them in the enclosing jit."""
    flat = [x for layer in pools for x in layer]
    given = [x for layer in rows for x in layer]
    batch, columns = path.shape
    heads, num_pages, page, _ = flat[0].shape
    small = (path, table, start, count)

    def kernel(path, table, start, count, *refs):
        given_refs, stores = refs[: len(given)], refs[len(given) + len(flat) :]
        line, head, layer = (pl.program_id(axis) for axis in range(3))
        row, column = line // columns, line % columns
        position, last = start[row] + column, table.shape[1] - 1
        block = position // page
        number = table[row, jnp.minimum(block, last)]
        record = jnp.clip(path[row, column], 0, given_refs[0].shape[1] - 1)
        mapped = (block <= last) & (number >= 0) & (number < num_pages)
        for index in range(len(pools)):
            @pl.when((column < count[row]) & mapped & (layer == index))
            def _(index=index):
                pair = slice(2 * index, 2 * index + 2)
                values = [ref[row, record, head, :] for ref in given_refs[pair]]
                for ref, value in zip(stores[pair], values, strict=True):
                    ref[head, number, position % page, :] = value

    written = gpu_call(
        kernel,
        name="kv_write",
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat),
        grid=(batch * columns, heads, len(pools)),
        in_specs=[WHOLE] * (len(small) + len(given) + len(flat)),
        out_specs=(WHOLE,) * len(flat),
        aliases={len(small) + len(given) + i: i for i in range(len(flat))},
        interpret=interpret,
        num_warps=1,
    )(*small, *given, *flat)
    return tuple(zip(written[::2], written[1::2], strict=True))
