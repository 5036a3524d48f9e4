"""How to cut a large matrix into pieces of work for a GPU's processors."""

from jax.experimental import pallas as pl

PROCESSORS = 132  # of an H200
_MOST_PARTS = 32


def cut(
    rows: int, width: int, tokens: int, *, step: int, slots: int, tiles: tuple[int, ...],
    split: bool = True,
) -> tuple[int, int]:
    """Rows of a tile, one of `tiles`, and parts of the shared axis, for [tokens, width] times
    [rows, width]^T.

    Pieces of equal size run on `slots` slots, so the last turn leaves some idle; a part costs a
    sum of its own, written and read once more. Both in elements of the matrix.
    """
    steps = width // step
    parts = [
        count for count in range(1, min(steps, _MOST_PARTS) + 1)
        if steps % count == 0 and (count == 1 or split and width % step == 0)
    ]

    def wasted(choice: tuple[int, int]) -> float:
        tile, count = choice
        pieces = pl.cdiv(rows, tile) * count
        idle = -pieces % slots * tile * (width / count)
        # Half of it: the others have the memory to themselves meanwhile. fp32 sums, 2-byte matrix.
        return 0.5 * idle + (count > 1) * 4 * count * rows * tokens

    return min(((tile, count) for tile in tiles for count in parts or [1]), key=wasted)
