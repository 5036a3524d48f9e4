"""The ops at official sizes: Qwen3.5-27B and 35B-A3B, their drafts, and K = 7 or 15."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dflash_jax.ops import gated_delta_rule, sliding_window_attention, softmax_attention
from dflash_jax.ops import sparse_moe as moe
from dflash_jax.ops.block_scaled_linear import BlockScale, block_scaled_linear
from dflash_jax.ops.gated_delta_block import gated_delta_block
from dflash_jax.ops.vocab import top_k
from dflash_jax.sampling.distribution import target_distribution
from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from scripts.ops import between, draft, heads, products
from scripts.ops.case import Case, normal
from tests.oracles import attention as attention_oracle
from tests.oracles import gated_delta_rule as delta_oracle
from tests.oracles import sparse_moe as moe_oracle

PAGE, VOCABULARY, PUBLIC = 64, 248320, 248077
BOTH = ("xla", "pallas")


def cases(full: bool) -> list[Case]:
    """All of them; `full` adds larger batches and contexts."""
    rows = (1, 8) if full else (1,)
    found = []
    for batch in rows:
        found += [verify(batch, 8, chain=True), verify(batch, 16, chain=False)]
        found += [fold(batch, 8, 5), fold(batch, 8, 5, layers=6)]
        found += [prefill(batch, 1024, heads) for heads in ((48, 32) if full else (48,))]
        found += [delta_block(batch, width) for width in ((1, 8, 16) if full else (8,))]
        found += [paged(batch, 8, context) for context in ((4096, 32768) if full else (4096,))]
        found += [ring(batch, 8, 2048)]
    found += [select(7), *([select(120)] if full else [])]
    found += [paged(1, 1024, 4096)] if full else []
    found += [experts(tokens) for tokens in ((1, 8, 64, 1024, 4096) if full else (8,))]
    for tokens in (8, 64) if full else (8,):
        found += [blocks(tokens, out, inner) for out, inner in ((34816, 5120), (5120, 17408))]
    found += [law(1, 8), *([law(8, 16)] if full else [])]
    small = between.cases(full) + draft.cases(full)
    return found + small + heads.cases(full) + products.cases(full)


def _decay(key, shape):
    """g and beta of columns and heads."""
    gates = jax.random.normal(key, (2, *shape))
    return jnp.stack([-0.1 * jax.nn.softplus(gates[0]), jax.nn.sigmoid(gates[1])], axis=-1)


def verify(batch: int, width: int, *, chain: bool) -> Case:
    """GDN verification of one 27B layer; a tree hangs half of its columns on earlier ones."""
    key_heads, value_heads, dim = 16, 48, 128
    parent = np.arange(width) - 1
    if not chain:
        parent[width // 2 :] = np.arange(width - width // 2) // 2
    parent = np.tile(np.maximum(parent, 0), (batch, 1)).astype(np.int32)

    def make(key):
        keys = jax.random.split(key, 5)
        vectors = (normal(k, (batch, width, key_heads, dim)) for k in keys[:2])
        return (
            *gated_delta_rule.unit_vectors(*vectors),
            normal(keys[2], (batch, width, value_heads, dim)),
            _decay(keys[3], (batch, width, value_heads)),
            normal(keys[4], (batch, value_heads, dim, dim), jnp.float32, 0.1),
            jnp.arange(batch, dtype=jnp.int32), jnp.asarray(parent),
            jnp.full((batch,), width, jnp.int32),
        )

    def exact(query, key, value, decay, state, slot, parent, live):
        query, key = query * 1e3, key * 1e3  # the oracle normalises, and adds an epsilon then
        return np.stack([
            delta_oracle.tree(state[b], query[b], key[b], value[b], decay[b], parent[b], live[b])
            for b in range(batch)
        ])

    def form(name):
        def run(*args):
            return gated_delta_rule.gated_delta_verify(*args, chain=chain, implementation=name)[0]
        return run

    state = batch * value_heads * dim * dim * 4
    return Case(
        name=f"gated_delta_verify {'chain' if chain else 'tree'} B={batch} W={width}",
        bytes=state, make=make, exact=exact if batch == 1 else None, tolerance=2e-5,
        forms={name: form(name) for name in BOTH},
    )


def fold(batch: int, width: int, count: int, layers: int = 1) -> Case:
    """GDN commit of 27B layers, in place: so many records of a block."""
    key_heads, value_heads, dim = 16, 48, 128
    channels = (2 * key_heads + value_heads) * dim

    def layer(key):
        keys = jax.random.split(key, 6)
        records = (
            normal(keys[0], (batch, width, key_heads, dim), jnp.float32, dim**-0.5),
            normal(keys[1], (batch, width, value_heads, dim), jnp.float32),
            _decay(keys[2], (batch, width, value_heads)),
            normal(keys[4], (batch, width, channels)),
        )
        state = normal(keys[3], (batch, value_heads, dim, dim), jnp.float32, 0.1)
        return records, (state, normal(keys[5], (batch, 3, channels)))

    def make(key):
        records, pools = zip(*(layer(k) for k in jax.random.split(key, layers)), strict=True)
        slot = jnp.arange(batch, dtype=jnp.int32)
        path = jnp.tile(jnp.arange(width, dtype=jnp.int32), (batch, 1))
        return records, pools, path, slot, slot, jnp.full((batch,), count, jnp.int32)

    def exact(records, pools, path, read, write, kept):
        found = []
        for (key, delta, decay, inputs), pair in zip(records, pools, strict=True):
            state, conv = (x.astype(np.float64) for x in pair)
            states = [
                _increased(state[b], key[b], delta[b], decay[b], kept[b]) for b in range(batch)
            ]
            histories = [
                np.concatenate([conv[b], inputs[b, : kept[b]].astype(np.float64)])[-3:]
                for b in range(batch)
            ]
            found.append((np.stack(states), np.stack(histories)))
        return found

    def form(name):
        def run(records, pools, *rest):
            joined = tuple((*one, *pair) for one, pair in zip(records, pools, strict=True))
            return gated_delta_rule.gated_delta_folds(joined, *rest, implementation=name)
        return run

    several = f" layers={layers}" if layers > 1 else ""
    return Case(
        name=f"gated_delta_fold B={batch} W={width} N={count}{several}",
        bytes=2 * layers * batch * value_heads * dim * dim * 4, make=make, state=1,
        exact=exact if batch == 1 else None, tolerance=2e-5,
        forms={name: form(name) for name in BOTH},
    )


def _increased(state, key, delta, decay, count):
    """One row's float64 states after `count` increments."""
    for column in range(count):
        k = np.repeat(key[column], len(state) // key.shape[1], axis=0)
        alpha = np.exp(decay[column, :, 0].astype(np.float64))
        state = alpha[:, None, None] * state + delta[column][:, :, None] * k[:, None, :]
    return state


def prefill(batch: int, tokens: int, value_heads: int) -> Case:
    """A prompt's chunk through the recurrence of one layer: 48 value heads in the 27B, 32 in the
    35B."""
    key_heads, dim = 16, 128

    def make(key):
        keys = jax.random.split(key, 5)
        return (
            *(normal(k, (batch, tokens, key_heads, dim)) for k in keys[:2]),
            normal(keys[2], (batch, tokens, value_heads, dim)),
            _decay(keys[3], (batch, tokens, value_heads)),
            normal(keys[4], (batch, value_heads, dim, dim), jnp.float32, 0.1),
            jnp.full((batch,), tokens, jnp.int32),
        )

    def exact(query, key, value, decay, state, live):
        rows = [
            delta_oracle.sequence(state[b], query[b], key[b], value[b], decay[b], live[b])
            for b in range(batch)
        ]
        return tuple(np.stack(x) for x in zip(*rows, strict=True))

    per_column = 2 * key_heads * dim * 2 + value_heads * (dim * (2 + 4) + 8)
    return Case(
        name=f"gated_delta_prefill B={batch} T={tokens} {value_heads} heads", make=make,
        bytes=batch * (tokens * per_column + 2 * value_heads * dim * dim * 4),
        exact=exact if batch == 1 else None, tolerance=2e-5,
        forms={form: functools.partial(
            gated_delta_rule.gated_delta_prefill, implementation=form
        ) for form in BOTH},
    )


def delta_block(batch: int, width: int) -> Case:
    """A GDN layer of the 27B between its projections."""
    key_heads, value_heads, dim, taps = 16, 48, 128, 4
    channels = (2 * key_heads + value_heads) * dim

    def make(key):
        keys = jax.random.split(key, 8)
        return (
            normal(keys[0], (batch, width, channels + value_heads * (dim + 2)), jnp.float32),
            normal(keys[1], (batch, taps - 1, channels)),
            normal(keys[2], (channels, taps), jnp.float32, 0.5),
            *(normal(k, (value_heads,), jnp.float32) for k in keys[3:5]),
            normal(keys[5], (dim,), jnp.float32),
            normal(keys[6], (batch, value_heads, dim, dim), jnp.float32, 0.1),
            jnp.arange(batch, dtype=jnp.int32),
            jnp.tile(jnp.maximum(jnp.arange(width, dtype=jnp.int32) - 1, 0), (batch, 1)),
            jnp.full((batch,), width, jnp.int32),
        )

    def form(name):
        def run(projected, *rest):
            return gated_delta_block(
                projected, None, *rest, key_heads=key_heads, eps=1e-6, chain=True,
                implementation=name,
            )
        return run

    return Case(
        name=f"gated_delta_block B={batch} W={width}",
        bytes=batch * value_heads * dim * dim * 4, make=make,
        forms={name: form(name) for name in BOTH},
    )


def paged(batch: int, width: int, context: int) -> Case:
    """Attention of one full 27B layer."""
    heads, kv_heads, dim = 24, 4, 256
    pages = context // PAGE

    def make(key):
        keys = jax.random.split(key, 6)
        pool = (kv_heads, batch * pages, PAGE, dim)
        table = jax.random.permutation(keys[5], batch * pages).reshape(batch, pages)
        return (
            normal(keys[0], (batch, width, heads, dim)),
            *(normal(k, (batch, width, kv_heads, dim)) for k in keys[1:3]),
            *(normal(k, pool) for k in keys[3:5]), table.astype(jnp.int32),
            jnp.full((batch,), context, jnp.int32), jnp.full((batch,), width, jnp.int32),
        )

    options = dict(block_mask="causal", scale=dim**-0.5)
    return Case(
        name=f"softmax_attention B={batch} W={width} context {context}",
        bytes=batch * context * kv_heads * dim * 2 * 2, make=make,
        exact=functools.partial(attention_oracle.softmax_attention, **options)
        if batch == 1 and width <= 16 and context <= 4096 else None,
        forms={form: functools.partial(
            softmax_attention.softmax_attention, implementation=form, **options
        ) for form in BOTH},
    )


def ring(batch: int, width: int, capacity: int) -> Case:
    """Attention of one local draft layer."""
    heads, kv_heads, dim = 32, 8, 128

    def make(key):
        keys = jax.random.split(key, 5)
        store = (batch, kv_heads, capacity, dim)
        return (
            normal(keys[0], (batch, width, heads, dim)),
            *(normal(k, (batch, width, kv_heads, dim)) for k in keys[1:3]),
            normal(keys[3], store), normal(keys[4], store, jnp.float16),
            jnp.arange(batch, dtype=jnp.int32), jnp.full((batch,), 2 * capacity + 77, jnp.int32),
            jnp.full((batch,), width, jnp.int32),
        )

    options = dict(window=capacity, causal=False, scale=dim**-0.5)
    return Case(
        name=f"sliding_window_attention B={batch} W={width} ring {capacity}",
        bytes=batch * capacity * kv_heads * dim * 2 * 2, make=make,
        exact=functools.partial(attention_oracle.sliding_window_attention, **options)
        if batch == 1 else None,
        forms={form: functools.partial(
            sliding_window_attention.sliding_window_attention, implementation=form, **options
        ) for form in BOTH},
    )


def select(rows: int) -> Case:
    """The 16 best of full vocabulary rows, scores at hand."""
    def make(key):
        return (normal(key, (rows, VOCABULARY), jnp.float32),)

    def best(form):
        return lambda scores: top_k(scores, k=16, eligible=PUBLIC, implementation=form)[0]

    def exact(scores):
        return -np.sort(-scores[:, :PUBLIC].astype(np.float64), axis=1)[:, :16]

    return Case(
        name=f"top_k 16 of {rows} x {VOCABULARY}", make=make, exact=exact,
        bytes=rows * VOCABULARY * 4, tolerance=1e-7,
        forms={form: best(form) for form in BOTH}
        | {"lax.top_k": lambda scores: lax.top_k(scores[:, :PUBLIC], 16)[0]},
    )


def experts_by(form: str):
    """`expert_parts` in one form, of arrays."""
    def call(x, chosen, weights, gate_up, down):
        routing = moe.Routing(experts=chosen, weights=weights)
        matrices = moe.Matrices(gate_up=gate_up, down=down)
        return moe.expert_parts(x, routing, matrices, implementation=form)
    return call


def experts(tokens: int, sizes=(256, 8, 2048, 512)) -> Case:
    """The experts of one layer, the 35B's, under random routing: how many, how many a token takes,
    and their widths."""
    count, k, hidden, inner = sizes
    unique = count * (1 - (1 - k / count) ** tokens)

    def make(key):
        keys = jax.random.split(key, 4)
        routing = moe.route(jax.random.normal(keys[1], (tokens, count)), k)
        return (
            normal(keys[0], (tokens, hidden)), routing.experts, routing.weights,
            normal(keys[2], (count, 2 * inner, hidden), scale=0.02),
            normal(keys[3], (count, hidden, inner), scale=0.04),
        )

    def ragged(x, chosen, weights, gate_up, down):
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=count).astype(jnp.int32)
        rows = x[order // k]
        gate, up = jnp.split(lax.ragged_dot(rows, gate_up.swapaxes(1, 2), sizes), 2, axis=-1)
        made = lax.ragged_dot(jax.nn.silu(gate) * up, down.swapaxes(1, 2), sizes)
        scaled = made * weights.reshape(-1)[order, None]
        return jnp.zeros((1, tokens, hidden)).at[0, order // k].add(scaled)

    def exact(x, chosen, weights, gate_up, down):
        used = np.unique(chosen)
        place = np.searchsorted(used, chosen)
        wide = [a.astype(np.float64) for a in (x, weights, gate_up[used], down[used])]
        return moe_oracle.expert_mlp(wide[0], place, *wide[1:])

    return Case(
        name=f"expert_parts T={tokens}", bytes=unique * 3 * hidden * inner * 2, make=make,
        result=lambda parts: jnp.sum(parts, axis=0),  # the norm behind them adds them
        tolerance=5e-3,  # a peer rounds its sums to bf16 between the products
        exact=exact if tokens <= 8 else None,
        forms={form: experts_by(form) for form in BOTH} | {"ragged_dot": ragged},
    )


def blocks(tokens: int, out: int, inner: int, block: int = 128) -> Case:
    """A product with a block-scaled float8 matrix."""
    def make(key):
        keys = jax.random.split(key, 3)
        values = jnp.clip(100 * jax.random.normal(keys[1], (out, inner)), -448, 448)
        scale = jnp.exp(jax.random.normal(keys[2], (out // block, inner // block)) / 4) / 7000
        return normal(keys[0], (tokens, inner)), values.astype(jnp.float8_e4m3fn), scale

    def run(form):
        def call(x, values, scale):
            stored = BlockScale(scale, block)
            return block_scaled_linear(x, values, stored, jnp.float32, implementation=form)
        return call

    def exact(x, values, scale):
        wide = np.repeat(np.repeat(scale.astype(np.float64), block, 0), block, 1)
        return x.astype(np.float64) @ (values.astype(np.float64) * wide).T

    return Case(
        name=f"block_scaled_linear T={tokens} {out} x {inner}", bytes=out * inner, make=make,
        exact=exact if tokens <= 8 else None, forms={form: run(form) for form in BOTH},
    )


def law(batch: int, width: int) -> Case:
    """The processed distribution under top-k and top-p; a full sort is the peer."""
    sampling = SamplingArrays.of(
        [SamplingParams(temperature=0.7, top_k=20, top_p=0.95)] * batch, PUBLIC
    )

    def make(key):
        return (normal(key, (batch, width, PUBLIC), jnp.float32, 3.0),)

    return Case(
        name=f"target_distribution B={batch} W={width}", make=make,
        bytes=2 * batch * width * PUBLIC * 4,
        forms={
            "xla": lambda logits: target_distribution(logits, sampling).weights,
            "lax.sort": lambda logits: lax.sort(logits),
        },
    )
