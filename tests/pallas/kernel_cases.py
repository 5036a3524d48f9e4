"""Every kernel at official and at odd sizes, by shapes alone."""

import functools

import jax.numpy as jnp

from dflash_jax.ops import (
    block_scaled_linear,
    candidate_selector,
    context_kv_materialize,
    dynamic_grouped_conv,
    gated_delta_block,
    gated_delta_rule,
    kv_write,
    norm,
    norm_rope,
    skinny_linear,
    sliding_window_attention,
    softmax_attention,
    vocab,
)
from tests.pallas.case import BF16, F16, F32, I32, KernelCase, shape
from tests.pallas.moe_cases import choice, experts, route


def paged(batch, width, heads, kv_heads, dim, context, page=64, dtypes=(BF16, BF16)):
    pages = context // page
    block = shape(batch, width, kv_heads, dim, dtype=dtypes[0])
    return KernelCase(
        name=f"softmax_attention B={batch} W={width} {heads}/{kv_heads} D={dim} {dtypes[1]}",
        fn=functools.partial(
            softmax_attention.softmax_attention, block_mask="causal", scale=dim**-0.5,
            implementation="pallas",
        ),
        avals=(
            shape(batch, width, heads, dim, dtype=dtypes[0]), block, block,
            *(shape(kv_heads, batch * pages, page, dim, dtype=dtype) for dtype in dtypes),
            shape(batch, pages, dtype=I32), shape(batch, dtype=I32), shape(batch, dtype=I32),
        ),
        kernels=("softmax_attention", "softmax_attention_join") if width <= 32 else (
            "softmax_attention_chunk",
        ),
    )


def ring(batch, width, heads, kv_heads, dim, capacity, dtypes=(BF16, F16)):
    block = shape(batch, width, kv_heads, dim, dtype=dtypes[0])
    return KernelCase(
        name=f"sliding_window_attention B={batch} W={width} {heads}/{kv_heads} S={capacity}",
        fn=functools.partial(
            sliding_window_attention.sliding_window_attention, window=capacity, causal=False,
            scale=dim**-0.5, implementation="pallas",
        ),
        avals=(
            shape(batch, width, heads, dim, dtype=dtypes[0]), block, block,
            *(shape(batch + 1, kv_heads, capacity, dim, dtype=dtype) for dtype in dtypes),
            *[shape(batch, dtype=I32)] * 3,
        ),
        kernels=("sliding_window_attention", "sliding_window_attention_join"),
    )


def delta(batch, width, key_heads, value_heads, dim, *, chain):
    rows = shape(batch, dtype=I32)
    return KernelCase(
        name=f"gated_delta_verify B={batch} W={width} {value_heads} heads chain={chain}",
        fn=functools.partial(
            gated_delta_rule.gated_delta_verify, chain=chain, implementation="pallas"
        ),
        avals=(
            *[shape(batch, width, key_heads, dim, dtype=F32)] * 2,
            shape(batch, width, value_heads, dim), shape(batch, width, value_heads, 2, dtype=F32),
            shape(batch + 1, value_heads, dim, dim, dtype=F32), rows,
            shape(batch, width, dtype=I32), rows,
        ),
        kernels=("gated_delta_verify",) if chain else ("gated_delta_verify_tree",),
    )


def fold(batch, width, key_heads, value_heads, dim, layers=1):
    rows, channels = shape(batch, dtype=I32), (2 * key_heads + value_heads) * dim
    records = (
        shape(batch, width, key_heads, dim, dtype=F32),
        shape(batch, width, value_heads, dim, dtype=F32),
        shape(batch, width, value_heads, 2, dtype=F32), shape(batch, width, channels),
    )
    pools = (
        shape(batch + 1, value_heads, dim, dim, dtype=F32), shape(batch + 1, 3, channels)
    )

    def call(records, pools, *rows):
        every = tuple((*kept, *pool) for kept, pool in zip(records, pools, strict=True))
        return gated_delta_rule.gated_delta_folds(every, *rows, implementation="pallas")

    return KernelCase(
        name=f"gated_delta_fold B={batch} W={width} {value_heads} heads, {layers} layers", fn=call,
        avals=(
            (records,) * layers, (pools,) * layers, shape(batch, width, dtype=I32), rows, rows, rows
        ),
        kernels=("gated_delta_fold",), state=(1,),
    )


def kv_write_case(batch, columns, layers, kv_heads, dim):
    pool, row = shape(kv_heads, 70, 64, dim), shape(batch, columns, kv_heads, dim)
    rows = shape(batch, dtype=I32)
    return KernelCase(
        name=f"kv_write B={batch} W={columns} {layers} layers",
        fn=functools.partial(kv_write.write_layers, implementation="pallas"),
        avals=(
            ((pool, pool),) * layers, ((row, row),) * layers, shape(batch, columns, dtype=I32),
            shape(batch, 68, dtype=I32), rows, rows,
        ),
        kernels=("kv_write",), state=(0,),
    )


def delta_prefill(batch, tokens, key_heads, value_heads, key_dim, value_dim, dtype=BF16):
    keys = shape(batch, tokens, key_heads, key_dim, dtype=dtype)
    return KernelCase(
        name=f"gated_delta_prefill B={batch} T={tokens} {value_heads} of {key_dim} x {value_dim} "
             f"{dtype.__name__}",
        fn=functools.partial(gated_delta_rule.gated_delta_prefill, implementation="pallas"),
        avals=(
            keys, keys, shape(batch, tokens, value_heads, value_dim, dtype=dtype),
            shape(batch, tokens, value_heads, 2, dtype=F32),
            shape(batch, value_heads, value_dim, key_dim, dtype=F32), shape(batch, dtype=I32),
        ),
        kernels=("gated_delta_solve", "gated_delta_prefill"),
    )


def delta_block(batch, width, key_heads, value_heads, dim, *, own_gates, dtype=BF16):
    channels, wide = (2 * key_heads + value_heads) * dim, value_heads * dim
    gates = 2 * value_heads

    def call(projected, gates, *rest):
        return gated_delta_block.gated_delta_block(
            projected, None if own_gates else gates, *rest, key_heads=key_heads, eps=1e-6,
            chain=True, implementation="pallas",
        )

    rows = shape(batch, dtype=I32)
    return KernelCase(
        name=f"gated_delta_block B={batch} W={width} {value_heads} heads own={own_gates} "
             f"{dtype.__name__}",
        fn=call,
        avals=(
            shape(batch, width, channels + wide + own_gates * gates, dtype=F32),
            shape(batch, width, gates, dtype=F32), shape(batch + 1, 3, channels, dtype=dtype),
            shape(channels, 4, dtype=F32), *[shape(value_heads, dtype=F32)] * 2,
            shape(dim, dtype=F32), shape(batch + 1, value_heads, dim, dim, dtype=F32), rows,
            shape(batch, width, dtype=I32), rows,
        ),
        kernels=("gated_delta_inputs", "gated_delta_verify"),
    )


def block_scaled(tokens, rows, width, block=128):
    def call(x, matrix, values):
        scale = block_scaled_linear.BlockScale(values=values, columns=block)
        return block_scaled_linear.block_scaled_linear(
            x, matrix, scale, F32, implementation="pallas"
        )

    return KernelCase(
        name=f"block_scaled_linear T={tokens} {rows} x {width} / {block}", fn=call,
        avals=(
            shape(tokens, width), shape(rows, width, dtype=jnp.float8_e4m3fn),
            shape(rows // block, -(-width // block), dtype=F32),
        ),
        kernels=("block_scaled_linear",),
    )


def selector(batch, positions, candidates, rank, rows=248320, dtype=BF16):
    block = (batch, positions)
    return KernelCase(
        name=f"candidate_selector B={batch} K={positions} C={candidates} R={rank}",
        fn=functools.partial(candidate_selector.select, implementation="pallas"),
        avals=(
            shape(*block, candidates, dtype=F32), shape(*block, candidates, dtype=I32),
            shape(batch, dtype=I32), shape(*block, rank, dtype=dtype),
            *[shape(rows, rank, dtype=dtype)] * 2, shape(batch, dtype=F32),
            shape(*block, dtype=F32),
        ),
        kernels=("candidate_selector",),
    )


def context(
    batch, columns, paged, kv_heads=8, dim=128, window=2048, dtypes=(BF16, F16), parts=1
):
    layers, rows = len(paged), shape(batch, dtype=I32)
    places = {True: (kv_heads, 2048, 64, dim), False: (batch + 1, kv_heads, window, dim)}
    return KernelCase(
        name=f"context_kv_materialize B={batch} n={columns} {paged} D={dim}",
        fn=functools.partial(
            context_kv_materialize.store_context, paged=paged, eps=1e-6, theta=1e7, rounded=True,
            implementation="pallas",
        ),
        avals=(
            shape(parts, batch, columns, layers * 2 * kv_heads * dim, dtype=F32),
            shape(layers, dim, dtype=F32),
            tuple(tuple(shape(*places[kind], dtype=d) for d in dtypes) for kind in paged),
            rows, shape(batch, 256, dtype=I32), rows, rows,
        ),
        kernels=("context_kv_materialize",), state=(2,),
    )


def convolution(batch, width, hidden, group, taps, dtype=BF16):
    def both(x, norm_weight, base, projection, z):
        options = {"implementation": "pallas"}
        out = dynamic_grouped_conv.prepare(
            x, norm_weight, base, projection, eps=1e-6, out_dtype=x.dtype, **options
        )
        return out.prepared, dynamic_grouped_conv.finish(x, z, base, out.finish_delta, **options)

    return KernelCase(
        name=f"dynamic_grouped_conv B={batch} W={width} {hidden}/{group} taps={taps} "
             f"{dtype.__name__}",
        fn=both,
        avals=(
            shape(batch, width, hidden, dtype=dtype), shape(hidden, dtype=F32),
            shape(2, taps, hidden, dtype=F32),
            shape(2 * taps * hidden // group, hidden, dtype=dtype),
            shape(batch, width, hidden, dtype=F32),
        ),
        kernels=(
            "dynamic_grouped_conv_norm", "dynamic_grouped_conv_prepare",
            "dynamic_grouped_conv_finish",
        ),
    )


def add_norm(rows, width, dtype=BF16):
    return KernelCase(
        name=f"add_rmsnorm {rows} x {width} {dtype.__name__}",
        fn=functools.partial(norm.add_rmsnorm, eps=1e-6, offset=True, implementation="pallas"),
        avals=(*[shape(1, rows, width, dtype=dtype)] * 2, shape(width, dtype=F32)),
        kernels=("add_rmsnorm",),
    )


def heads(batch, width, query, kv, dim, *, mrope=None, dtype=BF16, dtypes=(BF16,) * 3):
    gated = mrope is not None
    rows = ((2 if gated else 1) * query + 2 * kv) * dim
    place = (batch, width, 3) if gated else (batch, width)
    return KernelCase(
        name=f"norm_rope B={batch} W={width} {query}/{kv} D={dim} {dtype.__name__}",
        fn=functools.partial(
            norm_rope.norm_rope, heads=(query, kv), gated=gated, eps=1e-6, offset=gated, theta=1e7,
            mrope=mrope, rounded=not gated, dtypes=dtypes, implementation="pallas",
        ),
        avals=(
            shape(batch, width, rows, dtype=dtype), *[shape(dim, dtype=F32)] * 2,
            shape(*place, dtype=I32),
        ),
        kernels=("norm_rope",),
    )


def head(op, tokens, rows, width, form, dtype=BF16):
    options = {"public_rows": rows - 243, "implementation": form}
    call, kernels = {
        "linear_topk": (functools.partial(vocab.linear_topk, k=16, **options), ("top_k",)),
        "linear_argmax": (
            functools.partial(vocab.linear_argmax, logits_dtype="bfloat16", **options),
            ("linear_argmax_join",),
        ),
    }[op]
    return KernelCase(
        name=f"{op} {form} T={tokens} {rows} x {width} {dtype.__name__}", fn=call,
        avals=(shape(tokens, width, dtype=dtype), shape(rows, width, dtype=dtype)),
        kernels=kernels if form == "mosaic" else (op, *kernels), mosaic=form == "mosaic",
    )


def top(rows, count, k=16):
    return KernelCase(
        name=f"top_k {k} of {rows} x {count}",
        fn=functools.partial(vocab.top_k, k=k, eligible=count - 7, implementation="pallas"),
        avals=(shape(rows, count, dtype=F32),), kernels=("top_k",),
    )


def skinny(op, tokens, rows, width, form, dtype=BF16):
    x, matrix = shape(tokens, width, dtype=dtype), shape(rows, width, dtype=dtype)
    if op == "skinny_swiglu":
        fn = functools.partial(skinny_linear.skinny_swiglu, implementation=form)
        avals = (x, matrix)
    else:
        def fn(x, matrix, residual):
            return skinny_linear.skinny_linear(
                x, matrix, dtype, residual=residual, implementation=form
            )

        avals = (x, matrix, shape(tokens, rows, dtype=dtype))
    return KernelCase(
        name=f"{op} {form} T={tokens} {rows} x {width} {dtype.__name__}", fn=fn, avals=avals,
        kernels=() if form == "mosaic" else (op,), mosaic=form == "mosaic",
    )


CASES = (
    paged(1, 8, 24, 4, 256, 4096), paged(8, 16, 24, 4, 256, 4096), paged(1, 1, 24, 4, 256, 4096),
    paged(1, 32, 16, 2, 256, 131072),
    paged(1, 8, 32, 8, 128, 4096, dtypes=(BF16, F16)), paged(3, 5, 6, 3, 16, 64, page=16),
    paged(2, 3, 4, 2, 32, 128, dtypes=(F32, F32)),
    paged(1, 1024, 16, 2, 256, 8192), paged(2, 4096, 24, 4, 256, 8192),
    paged(1, 33, 32, 8, 128, 4096, dtypes=(BF16, F16)), paged(3, 100, 6, 3, 16, 64, page=16),
    paged(2, 70, 4, 2, 64, 128, dtypes=(F32, F32)),
    ring(1, 8, 32, 8, 128, 2048), ring(8, 16, 32, 8, 128, 4096), ring(3, 1, 6, 3, 32, 48),
    ring(1, 4, 4, 2, 32, 16, dtypes=(F32, F32)),
    delta(1, 8, 16, 48, 128, chain=True), delta(8, 16, 16, 32, 128, chain=True),
    delta(1, 16, 16, 48, 128, chain=False), delta(2, 5, 1, 3, 16, chain=True),
    route(8, 256, 8), route(128, 60, 4), choice(8, 256, 8, 2048), choice(128, 512, 10, 4096),
    choice(3, 5, 2, 48, F32), choice(130, 60, 4, 200),
    kv_write_case(1, 8, 16, 4, 256), kv_write_case(8, 5, 2, 2, 128),
    fold(1, 8, 16, 48, 128, layers=6), fold(8, 16, 16, 32, 128, layers=2),
    fold(1, 16, 16, 32, 128), fold(2, 5, 1, 3, 16), fold(1, 5, 1, 3, 16),
    delta_prefill(1, 1024, 16, 48, 128, 128), delta_prefill(8, 1024, 16, 32, 128, 128),
    delta_prefill(3, 130, 1, 3, 16, 32), delta_prefill(2, 65, 2, 4, 128, 16, F32),
    delta_block(1, 8, 16, 48, 128, own_gates=True), delta_block(1, 5, 16, 48, 128, own_gates=True),
    delta_block(8, 16, 16, 32, 128, own_gates=False),
    delta_block(1, 1024, 16, 48, 128, own_gates=True),
    delta_block(3, 5, 1, 3, 16, own_gates=True, dtype=F32),
    block_scaled(8, 34816, 5120), block_scaled(64, 5120, 17408), block_scaled(1, 96, 160, 32),
    experts(1, 2048, 512), experts(8, 2048, 512), experts(64, 2048, 512), experts(128, 2048, 512),
    experts(5, 48, 80, count=9, k=3), experts(3, 32, 16, count=5, k=2, dtype=F32),
    experts(129, 2048, 512), experts(1024, 2048, 512), experts(2048, 2048, 512),
    experts(4096, 2048, 512), experts(1024, 2048, 512, block=128),
    experts(4096, 2048, 512, block=128), experts(8, 2048, 512, block=128),
    experts(128, 2048, 512, block=128),
    experts(131, 48, 80, count=9, k=3), experts(2048, 4096, 512, count=512, k=10),
    experts(300, 2048, 512, dtype=F32), experts(130, 32, 16, count=5, k=2, dtype=F32),
    selector(1, 7, 16, 256), selector(8, 15, 16, 256), selector(3, 1, 2, 4, rows=11, dtype=F32),
    top(7, 248320), top(120, 248320), top(1, 129), top(3, 1000, k=100),
    context(1, 8, (False,) * 5, parts=2), context(8, 16, (False,) * 5 + (True,), window=4096),
    context(1, 1024, (False, True)), context(3, 5, (True, False), 3, 2, 7, (F32, F32)),
    convolution(1, 8, 5120, 16, 2), convolution(8, 16, 2048, 16, 2),
    convolution(2, 32, 96, 6, 3), convolution(1, 1, 2048, 2048, 4),
    convolution(2, 33, 100, 1, 1, F32),
    add_norm(8, 5120), add_norm(256, 5120), add_norm(8, 2048), add_norm(16, 4096),
    add_norm(3, 224), add_norm(1, 1, F32), add_norm(2, 16384, F32),
    heads(1, 8, 24, 4, 256, mrope=(64, (11, 11, 10))),
    heads(8, 16, 16, 2, 256, mrope=(64, (11, 11, 10)), dtypes=(BF16, BF16, F16)),
    heads(1, 8, 32, 8, 128, dtype=F32), heads(8, 16, 32, 4, 128, dtype=F32),
    heads(2, 3, 4, 2, 44, mrope=(8, (2, 1, 1)), dtype=F32, dtypes=(F32,) * 3),
    head("linear_topk", 7, 248320, 5120, "pallas"),
    head("linear_topk", 120, 248320, 2048, "pallas"),
    head("linear_topk", 3, 1000, 200, "pallas", F32), head("linear_topk", 3, 999, 41, "pallas"),
    head("linear_argmax", 15, 248320, 5120, "pallas"),
    head("linear_argmax", 33, 777, 96, "pallas"),
    head("linear_topk", 7, 248320, 5120, "mosaic"),
    head("linear_topk", 120, 248320, 2048, "mosaic"),
    head("linear_topk", 3, 1000, 192, "mosaic", F16),
    head("linear_argmax", 15, 248320, 5120, "mosaic"),
    head("linear_argmax", 128, 776, 64, "mosaic"),
    skinny("skinny_linear", 8, 5120, 17408, "pallas"),
    skinny("skinny_linear", 64, 5120, 17408, "pallas"),
    skinny("skinny_linear", 1, 5120, 6144, "pallas"),
    skinny("skinny_linear", 64, 5120, 6144, "pallas"),
    skinny("skinny_linear", 8, 16480, 5120, "pallas"),
    skinny("skinny_linear", 120, 16480, 5120, "pallas"),
    skinny("skinny_linear", 5, 1001, 97, "pallas", F32),
    skinny("skinny_swiglu", 1, 34816, 5120, "pallas"),
    skinny("skinny_swiglu", 8, 34816, 5120, "pallas"),
    skinny("skinny_swiglu", 16, 12288, 2048, "pallas"),
    skinny("skinny_swiglu", 64, 34816, 5120, "pallas"),
    skinny("skinny_swiglu", 128, 34816, 5120, "pallas"),
    skinny("skinny_swiglu", 3, 94, 65, "pallas", F32),
    skinny("skinny_linear", 8, 5120, 17408, "mosaic"),
    skinny("skinny_linear", 128, 96, 64, "mosaic", F16),
    skinny("skinny_swiglu", 120, 34816, 5120, "mosaic"),
)
