"""The order of candidates, its prefixes, and draws, against plain sorts on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.order import inverse_cdf, shortest_prefix, sortable, within
from tests.oracles import sampling as oracle

SIZES = (1, 2, 7, 16, 17, 300)


def cut(values, weights, goal):
    """Which entries the library keeps."""
    keys = sortable(jnp.asarray(values, jnp.float32))
    weights = jnp.asarray(weights, jnp.float32)
    edge = jax.jit(shortest_prefix)(keys, weights, jnp.asarray(goal, jnp.float32))
    return np.asarray(within(keys, edge))


def test_keys_compare_like_values_and_signs_of_zero_are_equal():
    tiny, large = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    values = np.array([-np.inf, -large, -1.5, -tiny, 0.0, tiny, 1.5, large, np.inf], np.float32)
    keys = np.asarray(sortable(jnp.asarray(values)))
    assert keys.dtype == np.uint32 and (np.diff(keys.astype(np.int64)) > 0).all()
    zeros = sortable(jnp.asarray([0.0, -0.0], jnp.float32))
    assert zeros[0] == zeros[1]


@pytest.mark.parametrize("size", SIZES)
def test_every_count_keeps_the_first_of_the_sorted_order(size):
    rng = np.random.default_rng(size)
    # Few distinct values, so that most cuts fall among equals; some ids are forbidden.
    values = rng.integers(-2, 3, size).astype(np.float32) * np.float32(0.7)
    values[rng.random(size) < 0.2] = -np.inf
    order = oracle.ranked(values)
    for count in {1, 2, size // 2, size - 1, size} - {0}:
        if count > size:
            continue
        expected = np.isin(np.arange(size), order[:count])
        assert np.array_equal(cut(values, np.ones(size), count), expected), count


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.999])
def test_a_share_keeps_the_shortest_prefix_that_reaches_it(size, share):
    rng = np.random.default_rng([size, int(1000 * share)])
    values = np.round(rng.normal(scale=2, size=size), 1).astype(np.float32)
    weights = np.exp(values.astype(np.float64) - values.max())
    order = oracle.ranked(values)
    reached = np.cumsum(weights[order])
    goal = share * reached[-1]
    count = int(np.argmax(reached >= goal)) + 1
    assert np.abs(reached - goal).min() > 1e-6 * reached[-1], "choose another seed"
    expected = np.isin(np.arange(size), order[:count])
    assert np.array_equal(cut(values, weights, goal), expected)


def test_rows_of_a_batch_are_cut_apart():
    rng = np.random.default_rng(1)
    values = rng.normal(size=(3, 2, 40)).astype(np.float32)
    counts = np.array([[1, 40], [7, 2], [39, 20]])
    together = cut(values, np.ones_like(values), counts)
    assert np.array_equal(together.sum(-1), counts)
    for place in np.ndindex(counts.shape):
        alone = cut(values[place], np.ones(40), counts[place])
        assert np.array_equal(together[place], alone)


def draw(weights, u):
    ids, total = inverse_cdf(jnp.asarray(weights, jnp.float32), jnp.asarray(u, jnp.float32))
    return np.asarray(ids), np.asarray(total)


@pytest.mark.parametrize("size", [1, 9, 255, 256, 257, 700])
def test_draws_follow_the_cumulative_weights_in_id_order(size):
    rng = np.random.default_rng(size)
    # Whole numbers: every sum is exact, so every draw can be compared.
    weights = rng.integers(0, 4, size).astype(np.float64)
    weights[rng.integers(size)] = 3
    total = int(weights.sum())
    u = (np.arange(4 * total) + 0.5) / (4 * total)
    ids, mass = draw(np.broadcast_to(weights, (len(u), size)), u)
    assert (mass == total).all()
    assert ids.tolist() == [oracle.inverse_cdf(weights, float(np.float32(x))) for x in u]


@pytest.mark.parametrize("size", [5, 600])
def test_c8_no_draw_has_weight_zero(size):
    last = np.float32(1 - 2.0**-24)
    for place in {0, 2, size // 2, size - 1}:
        weights = np.zeros(size)
        weights[place] = 1e-6
        ids, _ = draw(np.stack([weights] * 3), [0.0, 0.5, last])
        assert ids.tolist() == [place] * 3


def test_rounding_never_draws_beyond_the_last_positive_weight():
    rng = np.random.default_rng(0)
    weights = rng.random((200, 1000)) ** 8
    weights[:, 900:] = 0.0
    weights[:, ::3] = 0.0
    for u in (0.0, float(np.float32(1 - 2.0**-24))):
        ids, _ = draw(weights, np.full(200, u))
        assert (np.take_along_axis(weights, ids[:, None], axis=1) > 0).all()


def test_the_total_says_when_nothing_can_be_drawn():
    assert draw(np.zeros(5), 0.5)[1] == 0
