"""A product of a few rows with a large matrix, streamed once through Pallas' Mosaic GPU lowering.

The one place that names that lowering. Matches when: 16-bit operands, at most 128 rows of x, a
multiple of 8 matrix rows and a shared axis that is a multiple of 64; a Hopper GPU.

Tiles of matrix rows are the large side of a warpgroup product, the rows of x the narrow one. One
block a processor walks over its tiles. Copies into a ring of shared buffers run `stages` steps
ahead of the products and never stop at the end of a tile, so that the memory stays busy while an
epilogue works on the sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plmg

MAX_TOKENS = 128
_PROCESSORS = 132  # of an H200
_SHARED = 208 * 1024  # bytes of buffers a processor: the rest is for the epilogue
_WIDE = 64  # elements of a row of a swizzled tile


@dataclass(frozen=True)
class Stream:
    """Matrix rows of a tile, stretch of the shared axis a step, buffers, blocks a processor."""

    rows: int
    step: int
    stages: int
    per_processor: int = 1
    splits: int = 1

    @classmethod
    def of(cls, rows: int, width: int, tokens: int, segments: int = 1) -> "Stream":
        """For [tokens, width] times [segments * rows, width]."""
        tile = 64 if segments > 1 else 128
        bytes_a_step = 2 * _WIDE * (segments * tile + padded_tokens(tokens))
        # Parts of the shared axis where there are too few tiles for the processors.
        splits, steps = 1, width // _WIDE
        while pl.cdiv(rows, tile) * splits < _PROCESSORS and steps % (2 * splits) == 0:
            splits *= 2
        return cls(rows=tile, step=_WIDE, stages=min(16, _SHARED // bytes_a_step), splits=splits)


def supports(tokens: int, matrix) -> bool:
    """Whether `stream` takes so many tokens and a matrix of this shape and dtype."""
    rows, width = matrix.shape
    fits = rows % 8 == 0 and width % _WIDE == 0 and jnp.dtype(matrix.dtype).itemsize == 2
    return fits and 0 < tokens <= MAX_TOKENS


def padded_tokens(tokens: int) -> int:
    """Columns that a product of so many tokens has."""
    return max(8, 8 * pl.cdiv(tokens, 8))


def stream(
    x, matrix, *, name: str, segments: Sequence[int], rows: int, epilogue: Callable, out_type,
    shape: Stream,
):
    """Runs epilogue(tile, split, sums, outs) for every tile of rows.

    Args:
      x: [T, H] bf16 or fp16. matrix: [_, H], the same dtype.
      segments: first matrix row of each range that is streamed side by side.
      rows: rows of a range; the last tile may hold rows past them.
      epilogue: sums[s] is [shape.rows, N] fp32, of matrix rows segments[s] + tile * shape.rows on;
        columns past T are zero. outs are the refs of out_type.
    """
    columns, width = padded_tokens(x.shape[0]), x.shape[1]
    x = jnp.pad(x, ((0, columns - x.shape[0]), (0, 0)))
    steps = width // shape.step // shape.splits
    items = pl.cdiv(rows, shape.rows) * shape.splits
    blocks = min(items, _PROCESSORS * shape.per_processor)
    transforms = (plmg.TilingTransform((8, _WIDE)), plmg.SwizzleTransform(2 * _WIDE))

    def buffers(*extent):
        return plmg.SMEM((shape.stages, *extent, shape.step), x.dtype, transforms=transforms)

    def body(x_ref, matrix_ref, *refs):
        *outs, matrix_tiles, x_tiles, arrived = refs
        block = lax.axis_index("block")
        mine = pl.cdiv(items - block, blocks)

        def fetch(index):
            item, step = block + index // steps * blocks, index % steps
            tile, split = item // shape.splits, item % shape.splits
            place = pl.ds((split * steps + step) * shape.step, shape.step)
            slot = index % shape.stages
            for number, first in enumerate(segments):
                source = matrix_ref.at[pl.ds(first + tile * shape.rows, shape.rows), place]
                plmg.copy_gmem_to_smem(source, matrix_tiles[number].at[slot], arrived.at[slot])
            plmg.copy_gmem_to_smem(x_ref.at[:, place], x_tiles.at[slot], arrived.at[slot])

        def product(index, accumulators):
            slot = index % shape.stages
            plmg.barrier_wait(arrived.at[slot])
            for tiles, sums in zip(matrix_tiles, accumulators, strict=True):
                plmg.wgmma(sums, tiles.at[slot], _transposed(x_tiles.at[slot]))
            # The products before these are done: their buffers are free.
            plmg.wgmma_wait(len(segments))
            following = index - 1 + shape.stages

            @pl.when((index > 0) & (following < mine * steps))
            def _():
                fetch(following)

        for index in range(shape.stages):
            pl.when(index < mine * steps)(lambda index=index: fetch(jnp.int32(index)))

        def walk(turn, _):
            def summed(*accumulators):
                lax.fori_loop(
                    0, steps, lambda step, _: product(turn * steps + step, accumulators), None
                )
                return [sums[...] for sums in accumulators]

            kinds = [plmg.ACC((shape.rows, columns), jnp.float32) for _ in segments]
            sums = pl.run_scoped(summed, *kinds)
            item = block + turn * blocks
            epilogue(item // shape.splits, item % shape.splits, sums, outs)

        lax.fori_loop(0, mine, walk, None)

    return plmg.kernel(
        body,
        out_type=out_type,
        scratch_types=(
            [buffers(shape.rows) for _ in segments], buffers(columns),
            plmg.Barrier(num_arrivals=len(segments) + 1, num_barriers=shape.stages),
        ),
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plmg.CompilerParams(
            lowering_semantics=plmg.LoweringSemantics.Warpgroup
        ),
    )(x, matrix)


def _transposed(ref):
    return ref.T if hasattr(ref, "T") else plmg.transpose_ref(ref, (1, 0))
