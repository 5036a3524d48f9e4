"""A call of a kernel by the shapes of its arguments."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

BF16, F16, F32, I32 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """name; fn and the shapes of its arguments; names of our kernels that it launches, in order;
    the arguments that are updated in place; whether the kernel is one of Mosaic GPU.
    """

    name: str
    fn: Callable
    avals: tuple
    kernels: tuple[str, ...]
    state: tuple[int, ...] = ()
    mosaic: bool = False


def shape(*extent, dtype=BF16):
    return jax.ShapeDtypeStruct(extent, dtype)
