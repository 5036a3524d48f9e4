"""Tiles of a product of a few rows with a large matrix, whose rows are the tile's large side."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.pallas.common import dot, load, places

MAX_TOKENS = 128


@dataclass(frozen=True)
class Tiles:
    """Tokens of a tile, stretch of the shared axis a step, warps, and steps loaded ahead."""

    tokens: int
    step: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, tokens: int, rows: int, dtype) -> "Tiles":
        """For so many tokens and tiles of so many matrix rows."""
        padded = max(16, pl.next_power_of_2(tokens))
        wide = jnp.dtype(dtype).itemsize > 2
        return cls(
            tokens=padded, step=32 if wide else 64,
            num_warps=8 if rows * padded > 128 * 64 else 4,
            num_stages=2 if wide else 5 if padded <= 32 else 4,
        )


def product(x, matrix, rows, tokens, tiles: Tiles, first_step=0, steps=None):
    """[len(rows), len(tokens)] fp32: the named matrix rows times the named rows of x.

    Numbers past the end read the last row: what they give means nothing. Without first_step and
    steps, the whole shared axis.
    """
    rows = jnp.minimum(rows, matrix.shape[0] - 1)
    tokens = jnp.minimum(tokens, x.shape[0] - 1)
    lane, width = jnp.arange(tiles.step, dtype=jnp.int32), x.shape[1]

    def add(index, total):
        column = (first_step + index) * tiles.step + lane
        left, right = matrix[places(rows, column)], x[places(tokens, column)]
        return total + dot(left, right.T)

    total = jnp.zeros((rows.shape[0], tokens.shape[0]), jnp.float32)
    total = lax.fori_loop(0, width // tiles.step if steps is None else steps, add, total)
    if steps is None and width % tiles.step:
        column = width // tiles.step * tiles.step + lane
        left, right = (
            load(ref.at[at], mask=at[1] < width, other=0.0)
            for ref, at in ((matrix, places(rows, column)), (x, places(tokens, column)))
        )
        total = total + dot(left, right.T)
    return total
