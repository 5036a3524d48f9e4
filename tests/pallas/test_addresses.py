"""Stacks of experts whose entries a kernel's offsets do not reach are refused."""

import functools

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.ops import sparse_moe
from dflash_jax.pallas.common import addressable
from tests.pallas.case import F32
from tests.pallas.moe_cases import experts

FP8 = jnp.float8_e4m3fn


@pytest.mark.parametrize(
    "entries, dtype, reached",
    [
        (2**31, FP8, True), (2**31 + 1, FP8, False), (2**32, FP8, False), (2**32 + 1, FP8, True),
        (2**31, jnp.bfloat16, True), (2**31 + 1, jnp.bfloat16, True), (2**32, F32, True),
    ],
)
def test_signed_offsets_reach_all_but_single_bytes_of_two_to_four_gib(entries, dtype, reached):
    assert addressable(jax.ShapeDtypeStruct((entries,), dtype)) == reached


@pytest.mark.parametrize("tokens", [8, 129])
@pytest.mark.parametrize("count, refused", [(256, False), (257, True), (512, True), (1025, False)])
def test_a_kernel_takes_no_float8_experts_that_it_cannot_reach(
    count, refused, tokens, monkeypatch
):
    """By shapes alone; gate and up of 512 experts have 2^32 values. Auto takes XLA there."""
    x, routing, matrices, _ = experts(tokens, 4096, 1024, count, block=128).avals
    call = functools.partial(sparse_moe.expert_parts, implementation="interpret")
    if refused:
        with pytest.raises(NotImplementedError, match="sparse_moe: .* float8 stacks outside of"):
            jax.eval_shape(call, x, routing, matrices)
    else:
        assert jax.eval_shape(call, x, routing, matrices).shape[1:] == (tokens, 4096)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    chosen = functools.partial(sparse_moe.expert_parts, implementation="auto")
    program = str(jax.make_jaxpr(chosen)(x, routing, matrices))
    assert ("pallas_call" in program) != refused
