"""The experts of a few tokens, every active expert read once.

Implements: ops/sparse_moe.py, the parts of `expert_parts`.
Matches when: at most 128 tokens; hidden and inner are multiples of 16, and float8 blocks have
columns in multiples of 16, or one block a row.

A grid row belongs to one choice (token, rank). It works for its expert if no earlier choice names
the same one, and ends at once otherwise: no sort, no list of active experts. One more grid row is
the expert that all tokens share, if there is one. All tokens are the rows of its products; a row
counts where its token chose the expert. Two launches: gate and up with SwiGLU into [choices,
tokens, inner], then down, weighted, into the rows [rank, token] of the result. Float8 values become
x's dtype in registers, and the fp32 sum over each block is scaled.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import (
    WHOLE,
    broadcast,
    dot,
    gpu_call,
    load,
    places,
    shared,
    step_within,
    store,
    widened,
)

MAX_TOKENS = 128
# Matrix rows of a program, stretch of a step, warps, stages: of gate and up, and of down.
# As measured on an H200 with one token, with 8 (and taken up to 32) and with 64.
_ONE_TOKEN = ((32, 128, 4, 4), (32, 256, 4, 2))
_FEW_TOKENS = ((32, 256, 4, 3), (64, 256, 4, 2))
_MORE_TOKENS = ((64, 64, 4, 3), (128, 64, 4, 3))
_MORE_BLOCKS = ((64, 64, 4, 3), (128, 64, 8, 3))  # float8, more than 64: four warps would spill


@dataclass(frozen=True)
class Tiles:
    """Matrix rows of a program, the stretch of a product's sum that a step takes, and warps and
    stages of the two kernels."""

    inner: int
    hidden: int
    inner_step: int
    hidden_step: int
    num_warps: tuple[int, int]
    num_stages: tuple[int, int]

    @classmethod
    def of(cls, tokens: int, hidden: int, inner: int, columns=()) -> "Tiles":
        """For tokens of width `hidden`, experts of width `inner`, and the columns of a block of
        those matrices that have blocks."""
        few = _ONE_TOKEN if tokens == 1 else _FEW_TOKENS
        more = _MORE_BLOCKS if columns and tokens > 64 else _MORE_TOKENS
        gate_up, down = few if tokens <= 32 else more
        return cls(
            inner=step_within(inner, (), gate_up[0]), hidden=step_within(hidden, (), down[0]),
            inner_step=step_within(inner, columns, down[1]),
            hidden_step=step_within(hidden, columns, gate_up[1]),
            num_warps=(gate_up[2], down[2]), num_stages=(gate_up[3], down[3]),
        )


def supports(tokens: int, hidden: int, inner: int, columns=()) -> bool:
    """Whether the kernels, here and in sparse_moe_tiles.py, take these sizes; `columns` of a block
    where there are blocks."""
    return tokens > 0 and all(step_within(width, columns, 16) == 16 for width in (hidden, inner))


@shared("interpret", "columns", "tiles")
def expert_parts(
    x, experts, weights, gate_up, down, common=None, *, interpret: bool, scales=(None, None),
    columns=(0, 0), tiles=None,
):
    """What every chosen expert makes of its token, times its weight.

    Args:
      x: [T, H]. experts: [T, k] int32, distinct within a token. weights: [T, k] fp32.
      gate_up: [E, 2I, H]. down: [E, H, I].
      scales: of gate_up and of down, None or [E, out / rows, ceil(in / columns)] fp32.
      columns: of a block of each, read where there are scales. Static.
      common: of the expert of all tokens, (weights [T] fp32, gate_up, down, scales) like the above
        with E = 1; None without one.
    Returns:
      [k, T, H] fp32, and one more behind them for `common`; the SwiGLU product is rounded to x's
      dtype.
    """
    (tokens, hidden), k, inner = x.shape, experts.shape[1], down.shape[2]
    rows = max(16, pl.next_power_of_2(tokens))
    used = tuple(c for c, scale in zip(columns, scales, strict=True) if scale is not None)
    tiles = tiles or Tiles.of(tokens, hidden, inner, used)
    every, *further = common or (None,)
    stacks = [(gate_up, down, scales), *([further] if further else [])]
    choices = tokens * k

    def call(name, which, kernel, out, width, *operands):
        """`kernel` for each choice and `width` tiles of the rows of gate_up or down."""
        blocks, refs = [], []
        for *matrices, scale in stacks:
            shape, values = blocks_of(matrices[which], scale[which], columns[which])
            blocks.append(shape)
            refs += [matrices[which], *values]
        return gpu_call(
            kernel(tiles, (rows, tokens, k), blocks, interpret), name=name,
            out_shape=out, grid=(choices + len(stacks) - 1, width),
            in_specs=[WHOLE] * (len(operands) + len(refs)), out_specs=WHOLE, interpret=interpret,
            num_warps=tiles.num_warps[which], num_stages=tiles.num_stages[which],
        )(*operands, *refs)

    flat = experts.reshape(-1)
    mixed = call(
        "sparse_moe_gate_up", 0, _gate_up_kernel,
        jax.ShapeDtypeStruct((choices + len(stacks) - 1, rows, inner), x.dtype),
        inner // tiles.inner, x, flat,
    )
    parts = k + len(stacks) - 1
    made = call(
        "sparse_moe_down", 1, _down_kernel,
        jax.ShapeDtypeStruct((parts * tokens, hidden), jnp.float32), hidden // tiles.hidden,
        mixed, flat, weights.reshape(-1), *([every] if further else []),
    )
    return made.reshape(parts, tokens, hidden)


def blocks_of(matrices, scale, columns):
    """Rows and columns of a block and the operands that hold the scales; None and () if dense."""
    if scale is None:
        return None, ()
    return (matrices.shape[1] // scale.shape[1], columns), (scale,)


def product(left, matrices, scale, blocks, at, interpret):
    """left [m, step] times an expert's matrix rows, transposed: [m, rows] fp32.

    at: the expert, the first row, the number of rows, the first column.
    """
    expert, first, count, column = at
    right = matrices[expert, pl.ds(first, count), pl.ds(column, left.shape[1])]
    if blocks is None:
        return dot(left, right.T)
    row = (first + jnp.arange(count, dtype=jnp.int32)) // blocks[0]
    expert, column = (jnp.broadcast_to(i, row.shape) for i in (expert, column // blocks[1]))
    factor = load(scale[0].at[expert, row, column])
    return dot(left, widened(right, left.dtype, interpret=interpret).T) * factor[None, :]


def _gate_up_kernel(tiles: Tiles, extents, blocks, interpret):
    rows, _, _ = extents

    def kernel(x, experts, *matrices_and_out):
        *matrices, out = matrices_and_out
        choice, block = pl.program_id(0), pl.program_id(1)
        inner = out.shape[2]
        token = jnp.arange(rows, dtype=jnp.int32)
        columns = jnp.arange(tiles.hidden_step, dtype=jnp.int32)

        def work(source, slot, takes, _):
            gate_up, scale, shape = source
            wanted = jnp.broadcast_to(takes[:, None], (rows, tiles.hidden_step))

            def step(index, sums):
                first = index * tiles.hidden_step
                part = load(x.at[places(token, first + columns)], mask=wanted, other=0.0)
                starts = (start + block * tiles.inner for start in (0, inner))
                gate, up = (
                    product(
                        part, gate_up, scale, shape, (slot, start, tiles.inner, first), interpret
                    )
                    for start in starts
                )
                return sums[0] + gate, sums[1] + up

            empty = jnp.zeros((rows, tiles.inner), jnp.float32)
            steps = x.shape[1] // tiles.hidden_step
            gate, up = lax.fori_loop(0, steps, step, (empty, empty))
            mixed = gate * jax.nn.sigmoid(gate) * up
            at = places(token, block * tiles.inner + jnp.arange(tiles.inner, dtype=jnp.int32))
            mask = jnp.broadcast_to(takes[:, None], mixed.shape)
            store(out.at[broadcast(choice, *at)], mixed.astype(out.dtype), mask=mask)

        _once(experts, choice, extents, _sources(matrices, blocks), work)

    return kernel


def _down_kernel(tiles: Tiles, extents, blocks, interpret):
    rows, tokens, k = extents

    def kernel(mixed, experts, weights, *refs):
        *refs, out = refs
        every, matrices = (refs[0], refs[1:]) if len(blocks) > 1 else (None, refs)
        choice, block = pl.program_id(0), pl.program_id(1)
        token = jnp.arange(rows, dtype=jnp.int32)
        columns = jnp.arange(tiles.inner_step, dtype=jnp.int32)

        def work(source, slot, takes, named):
            down, scale, shape = source
            # Asked for before the product, so that nobody waits for them behind it.
            if named is None:
                given = load(every.at[token], mask=takes, other=0.0)
            else:
                given = load(weights.at[_choices(extents)[0]], mask=named, other=0.0)
            wanted = jnp.broadcast_to(takes[:, None], (rows, tiles.inner_step))

            def step(index, total):
                first = index * tiles.inner_step
                at = slot, block * tiles.hidden, tiles.hidden, first
                from_ = broadcast(choice, *places(token, first + columns))
                part = load(mixed.at[from_], mask=wanted, other=0.0)
                return total + product(part, down, scale, shape, at, interpret)

            steps = mixed.shape[2] // tiles.inner_step
            empty = jnp.zeros((rows, tiles.hidden), jnp.float32)
            total = lax.fori_loop(0, steps, step, empty)
            rank, weight = k, given
            if named is not None:
                order = jnp.arange(given.shape[1], dtype=jnp.int32)
                rank = jnp.sum(jnp.where(named, order[None, :], 0), axis=1)
                weight = jnp.sum(given, axis=1)
            column = block * tiles.hidden + jnp.arange(tiles.hidden, dtype=jnp.int32)
            mask = jnp.broadcast_to(takes[:, None], total.shape)
            # A token that did not choose it has no address: nothing is put back.
            at = places(jnp.where(takes, rank * tokens + token, out.shape[0]), column)
            store(out.at[at], weight[:, None] * total, mask=mask)

        _once(experts, choice, extents, _sources(matrices, blocks), work)

    return kernel


def _sources(refs, blocks):
    """Matrices, scale and extents of a block: of the choices, and of the expert of all tokens."""
    each = len(refs) // len(blocks)
    return [
        (refs[first * each], refs[first * each + 1 : (first + 1) * each], shape)
        for first, shape in enumerate(blocks)
    ]


def _choices(extents):
    """Of each token, in rows, and each rank: the number of its choice, and whether there is one."""
    rows, tokens, k = extents
    token = jnp.arange(rows, dtype=jnp.int32)[:, None]
    rank = jnp.arange(pl.next_power_of_2(k), dtype=jnp.int32)[None, :]
    return token * k + rank, (token < tokens) & (rank < k)


def _once(experts, choice, extents, sources, work):
    """`work(source, slot, takes, named)` if no choice before this one names the same expert; behind
    the last choice for the expert of all tokens.

    takes: [rows] whether a token takes the expert: nobody else's x is read. named: [rows, ranks]
    by which choice; None for the expert of all tokens.
    """
    (rows, tokens, _), count = extents, experts.shape[0]
    expert = experts[jnp.minimum(choice, count - 1)]
    number, known = _choices(extents)
    named = known & (load(experts.at[number], mask=known, other=-1) == expert)
    takes = jnp.sum(named.astype(jnp.int32), axis=1) > 0
    # A token alone names an expert once.
    earlier = jnp.sum((named & (number < choice)).astype(jnp.int32)) if tokens > 1 else 0
    pl.when((choice < count) & (earlier == 0))(lambda: work(sources[0], expert, takes, named))
    if len(sources) > 1:
        everyone = jnp.arange(rows, dtype=jnp.int32) < tokens
        pl.when(choice == count)(lambda: work(sources[1], 0, everyone, None))
