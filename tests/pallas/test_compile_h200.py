"""Every kernel becomes H200 machine code without spilled registers, and no state is copied."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import gpu_call
from tests.pallas import h200
from tests.pallas.case import F32, shape
from tests.pallas.kernel_cases import CASES

BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@BY_NAME
def test_every_kernel_lowers(case):
    text = h200.lowered(case.fn, *case.avals)
    assert ("mosaic_gpu" in text) == case.mosaic
    assert all(name in text for name in case.kernels)


@h200.NEEDS_PLUGIN
@BY_NAME
def test_every_kernel_compiles_without_spills_or_copies(case, capfd, monkeypatch):
    # Mosaic GPU calls ptxas itself, and this makes it say what it found.
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    made = h200.compiled(case.fn, *case.avals, donate_argnums=case.state)
    launches = tuple(name for name in made.launches if name in case.kernels)
    assert launches == case.kernels
    if case.state:
        states = [case.avals[place] for place in case.state]
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))
        assert made.aliased == held and not made.copies
    if case.mosaic:
        spills = re.findall(r"(\d+) bytes spill stores", "".join(capfd.readouterr()))
        assert spills and set(spills) == {"0"}


def product(rows: int, step: int, num_warps: int):
    """A kernel whose registers and shared memory grow with its arguments."""
    def kernel(x, w, out):
        def add(index, total):
            place = pl.ds(index * step, step)
            return total + lax.dot_general(
                x[:, place], w[place, :], (((1,), (0,)), ((), ())), preferred_element_type=F32
            )

        out[...] = lax.fori_loop(0, 1024 // step, add, jnp.zeros(out.shape, F32))

    call = gpu_call(
        kernel, name="product", out_shape=shape(rows, 128, dtype=F32), grid=(1,),
        in_specs=[pl.BlockSpec()] * 2, out_specs=pl.BlockSpec(), interpret=False,
        num_warps=num_warps, num_stages=3,
    )
    return call, shape(rows, 1024), shape(1024, 128)


@h200.NEEDS_PLUGIN
@pytest.mark.parametrize(
    "sizes, message", [((128, 1024, 4), "Shared memory size limit"), ((128, 64, 1), "spilling")]
)
def test_what_an_h200_cannot_hold_is_an_error(sizes, message):
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        h200.compiled(*product(*sizes))
