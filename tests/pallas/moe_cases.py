"""The kernels of a mixture of experts by shapes alone."""

import functools

import jax.numpy as jnp

from dflash_jax.ops import sparse_moe
from dflash_jax.ops.block_scaled_linear import BlockScale
from dflash_jax.pallas import sparse_moe_tiles
from dflash_jax.pallas.sparse_moe import MAX_TOKENS
from tests.pallas.case import BF16, F32, I32, KernelCase, shape


def route(tokens, experts, chosen):
    return KernelCase(
        name=f"route T={tokens} {chosen} of {experts}",
        fn=functools.partial(
            sparse_moe.route, experts_per_token=chosen, experts=experts, implementation="pallas"
        ),
        avals=(shape(tokens, experts + 1, dtype=F32),),
        kernels=("route",),
    )


def choice(tokens, experts, chosen, hidden, dtype=BF16):
    return KernelCase(
        name=f"choose_experts T={tokens} {chosen} of {experts} x {hidden} {dtype.__name__}",
        fn=functools.partial(
            sparse_moe.choose_experts, experts_per_token=chosen, experts=experts, shared=True,
            implementation="pallas",
        ),
        avals=(shape(tokens, hidden, dtype=dtype), shape(experts + 1, hidden, dtype=dtype)),
        kernels=("router", "route"),
    )


def experts(tokens, hidden, inner, count=256, k=8, dtype=BF16, block=0):
    few, stored = tokens <= MAX_TOKENS, jnp.float8_e4m3fn if block else dtype

    def stack(count):
        made, scales = [], []
        for rows, width in ((2 * inner, hidden), (hidden, inner)):
            made.append(shape(count, rows, width, dtype=stored))
            values = shape(count, rows // block, -(-width // block), dtype=F32) if block else None
            scales.append(BlockScale(values, block) if block else None)
        return sparse_moe.Matrices(
            gate_up=made[0], down=made[1], gate_up_scale=scales[0], down_scale=scales[1]
        )

    def call(x, routing, matrices, shared):
        if few:
            return sparse_moe.expert_parts(x, routing, matrices, shared, implementation="pallas")
        # Without the sum over a token's experts: XLA's fusion of that spills a register.
        return sparse_moe_tiles.expert_outputs(
            x, routing.experts, matrices.gate_up, matrices.down, scales=matrices.scale_values,
            columns=matrices.columns, interpret=False,
        )

    routing = sparse_moe.Routing(
        experts=shape(tokens, k, dtype=I32), weights=shape(tokens, k, dtype=F32),
        shared=shape(tokens, dtype=F32),
    )
    return KernelCase(
        name=f"sparse_moe T={tokens} {count} x {hidden} x {inner} {dtype.__name__} / {block}",
        fn=call, avals=(shape(tokens, hidden, dtype=dtype), routing, stack(count), stack(1)),
        kernels=("sparse_moe_gate_up", "sparse_moe_down") if few else (
            "sparse_moe_sort", "sparse_moe_tiles_gate_up", "sparse_moe_tiles_down"
        ),
    )
