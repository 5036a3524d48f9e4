"""The attention kernels at the edges of their steps: those that every column sees whole go
unmasked, the others masked, and parts take turns at them.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.pallas import sliding_window_attention, softmax_attention
from dflash_jax.pallas.attention import Tiles
from tests.oracles import attention as oracle
from tests.tolerances import FP32, assert_close

FORM = pytest.mark.parametrize("form", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)])
PARTS = pytest.mark.parametrize("parts", [1, 2, 8])
STEP, HEADS, DIM, SCALE = 16, 2, 16, 0.25


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def block(rng, batch, width):
    """Queries, keys and values; live columns, all of the first row."""
    operands = (normal(rng, batch, width, heads, DIM) for heads in (HEADS, 1, 1))
    return *operands, np.resize([width, 1, 2, width - 1], batch).astype(np.int32)


@FORM
@PARTS
def test_paged_context_around_every_edge_of_steps_and_pages(parts, form):
    """Two steps a page; NaN from the frontier on."""
    frontier, page, columns = np.array([0, 1, 15, 16, 17, 31, 32, 33, 48, 64], np.int32), 32, 3
    rng, batch = np.random.default_rng(11), frontier.size
    query, key, value, live = block(rng, batch, 3)
    table = rng.permutation(batch * columns).reshape(batch, columns).astype(np.int32)
    pools = [normal(rng, 1, batch * columns, page, DIM) for _ in range(2)]
    for pool in pools:
        for b, length in enumerate(frontier):
            for p in range(length, columns * page):
                pool[:, table[b, p // page], p % page] = np.nan
    operands = query, key, value, *pools, table, frontier, live
    actual = softmax_attention.attend(
        *map(jnp.asarray, operands), "causal", scale=SCALE, interpret=form == "interpret",
        tiles=Tiles(rows=16, keys=STEP, parts=parts, num_warps=4),
    )
    expected = oracle.softmax_attention(*operands, block_mask="causal", scale=SCALE)
    assert_close(actual, expected, FP32)


@FORM
@PARTS
@pytest.mark.parametrize("window", [64, 51, 6])
def test_a_ring_in_part_filled_whole_and_wrapped(window, parts, form):
    """Four steps a ring; NaN where no column sees anything. Some steps only some columns see."""
    frontier = [0, 1, 15, 16, 17, 20, 21, 48, 63, 64, 65, 67, 68, 80, 207]
    rng, batch, capacity = np.random.default_rng(12), len(frontier), 64
    query, key, value, live = block(rng, batch, 5)
    slot = rng.permutation(batch + 1)[:batch].astype(np.int32)
    rings = [np.full((batch + 1, 1, capacity, DIM), np.nan, np.float32) for _ in range(2)]
    for ring in rings:
        for b, end in enumerate(frontier):
            for p in range(max(0, end - min(capacity, window - 1)), end):
                ring[slot[b], 0, p % capacity] = normal(rng, DIM)
    operands = query, key, value, *rings, slot, np.array(frontier, np.int32), live
    actual = sliding_window_attention.attend(
        *map(jnp.asarray, operands), "full", window=window, scale=SCALE,
        interpret=form == "interpret", tiles=Tiles(rows=16, keys=STEP, parts=parts, num_warps=4),
    )
    expected = oracle.sliding_window_attention(*operands, window=window, causal=False, scale=SCALE)
    assert_close(actual, expected, FP32)
