"""A product of a few rows with a large matrix, streamed once through Pallas' Mosaic GPU lowering.

The one place that names that lowering. Matches when: 16-bit operands, at most 128 rows of x, a
multiple of 8 matrix rows and a shared axis that is a multiple of 64; a Hopper GPU.

Tiles of matrix rows are the large side of a warpgroup product, the rows of x the narrow one. One
block a processor walks over its pieces: a tile, or a part of the shared axis of one. Copies into a
ring of shared buffers run `stages` steps ahead of the products and never stop at the end of a
piece, so that the memory stays busy while an epilogue works on the sums.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plmg

from dflash_jax.pallas.tiling import PROCESSORS, cut

MAX_TOKENS = 128
_SHARED = 208 * 1024  # bytes of buffers a processor: the rest is for the epilogue
_WIDE = 64  # elements of a row of a swizzled tile


@dataclass(frozen=True)
class Stream:
    """Matrix rows of a tile, parts of the shared axis, stretch of it a step, buffers, blocks a
    processor.
    """

    rows: int
    splits: int
    step: int
    stages: int
    per_processor: int = 1

    @classmethod
    def of(cls, rows: int, width: int, tokens: int, *, tile: int | None = None) -> "Stream":
        """For [tokens, width] times [rows, width]^T; with `tile`, tiles of so many rows, whole."""
        # Two blocks a processor and long steps measured best where the tiles of x are small.
        small = tokens <= 32 and width % (2 * _WIDE) == 0
        step, blocks = (2 * _WIDE, 2) if small else (_WIDE, 1)
        columns = padded_tokens(tokens)
        count, splits = (tile, 1) if tile else cut(
            rows, width, columns, step=step, slots=blocks * PROCESSORS, tiles=(128, 64)
        )
        stages = min(16, _SHARED // blocks // (2 * step * (count + columns)))
        return cls(rows=count, splits=splits, step=step, stages=stages, per_processor=blocks)


def supports(tokens: int, matrix) -> bool:
    """Whether `stream` takes so many tokens and a matrix of this shape and dtype."""
    rows, width = matrix.shape
    fits = rows % 8 == 0 and width % _WIDE == 0 and jnp.dtype(matrix.dtype).itemsize == 2
    return fits and 0 < tokens <= MAX_TOKENS


def padded_tokens(tokens: int) -> int:
    """Columns that a product of so many tokens has."""
    return max(8, 8 * pl.cdiv(tokens, 8))


def stream(x, matrix, *, name: str, rows: int, epilogue: Callable, out_type, shape: Stream):
    """Runs epilogue(tile, split, sums, outs) for every piece of the first `rows` matrix rows.

    Args:
      x: [T, H] bf16 or fp16. matrix: [_, H], the same dtype.
      epilogue: sums is [shape.rows, N] fp32, of matrix rows tile * shape.rows on, over part `split`
        of the shared axis; columns past T are zero, and the last tile may hold rows past `rows`.
        outs are the refs of out_type.
    """
    columns = padded_tokens(x.shape[0])
    steps = x.shape[1] // shape.step // shape.splits
    pieces = pl.cdiv(rows, shape.rows) * shape.splits
    blocks = min(pieces, PROCESSORS * shape.per_processor)
    transforms = (plmg.TilingTransform((8, _WIDE)), plmg.SwizzleTransform(2 * _WIDE))
    x = jnp.pad(x, ((0, columns - x.shape[0]), (0, 0)))

    def body(x_ref, matrix_ref, *refs):
        *outs, matrix_tiles, x_tiles, arrived = refs
        block = lax.axis_index("block")
        mine = pl.cdiv(pieces - block, blocks)

        def fetch(index):
            piece, slot = block + index // steps * blocks, index % shape.stages
            tile, split = piece // shape.splits, piece % shape.splits
            place = pl.ds((split * steps + index % steps) * shape.step, shape.step)
            source = matrix_ref.at[pl.ds(tile * shape.rows, shape.rows), place]
            plmg.copy_gmem_to_smem(source, matrix_tiles.at[slot], arrived.at[slot])
            plmg.copy_gmem_to_smem(x_ref.at[:, place], x_tiles.at[slot], arrived.at[slot])

        def multiply(index, sums):
            slot = index % shape.stages
            plmg.barrier_wait(arrived.at[slot])
            plmg.wgmma(sums, matrix_tiles.at[slot], _transposed(x_tiles.at[slot]))
            # The product before this one is done: its buffers are free.
            plmg.wgmma_wait(1)
            following = index - 1 + shape.stages

            @pl.when((index > 0) & (following < mine * steps))
            def _():
                fetch(following)

        for index in range(shape.stages):
            pl.when(index < mine * steps)(lambda index=index: fetch(jnp.int32(index)))

        def walk(turn, _):
            def summed(sums):
                lax.fori_loop(0, steps, lambda step, _: multiply(turn * steps + step, sums), None)
                return sums[...]

            sums = pl.run_scoped(summed, plmg.ACC((shape.rows, columns), jnp.float32))
            piece = block + turn * blocks
            epilogue(piece // shape.splits, piece % shape.splits, sums, outs)

        lax.fori_loop(0, mine, walk, None)

    return plmg.kernel(
        body,
        out_type=out_type,
        scratch_types=(
            *(
                plmg.SMEM((shape.stages, extent, shape.step), x.dtype, transforms=transforms)
                for extent in (shape.rows, columns)
            ),
            plmg.Barrier(num_arrivals=2, num_barriers=shape.stages),
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
