import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.uniform import Purpose, seed_words, uniform
from tests.oracles import uniform as oracle

# The check values of the contract: (seed, position, purpose, sub) and the 24 bits.
CHECKS = [
    ((0, 0, 0, 0), 10946269),
    ((0, 0, 1, 0), 16256144),
    ((42, 100, 1, 0), 8821229),
    ((42, 101, 2, 0), 11926426),
    ((42, 101, 3, 0), 6656219),
    ((42, 108, 4, 0), 8753046),
    ((42, 100, 5, 0), 3949222),
    ((42, 100, 5, 33), 281378),
    ((2**64 - 1, 262143, 5, 0), 9363271),
    ((1234567890123456789, 4096, 2, 3), 13377367),
]


def bits(value):
    scaled = np.asarray(value).astype(np.float64) * 2**24
    assert (scaled == np.round(scaled)).all()
    return scaled.astype(np.int64)


@pytest.mark.parametrize("key, expected", CHECKS)
def test_check_values_of_the_contract(key, expected):
    seed, position, purpose, sub = key
    out = uniform(jnp.asarray(seed_words(seed)), position, Purpose(purpose), sub)
    assert out.dtype == jnp.float32 and bits(out) == expected
    assert oracle.top_bits(*key) == expected


def test_purposes_have_the_numbers_of_the_table():
    names = ["PREFILL", "DECODE", "ACCEPT", "CORRECTION", "BONUS", "PROPOSAL"]
    assert [(p.name, p.value) for p in Purpose] == list(zip(names, range(6), strict=True))


def test_random_keys_equal_64_bit_integers():
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 200, dtype=np.uint64)
    positions, subs = (rng.integers(-(2**31), 2**31, 200).astype(np.int32) for _ in range(2))
    purposes = rng.integers(0, 2**32, 200, dtype=np.uint32)
    words = jnp.asarray(np.stack([seed_words(int(s)) for s in seeds]))
    out = jax.jit(uniform)(words, jnp.asarray(positions), jnp.asarray(purposes), jnp.asarray(subs))
    keys = zip(seeds, positions, purposes, subs, strict=True)
    assert bits(out).tolist() == [oracle.top_bits(*(int(part) for part in key)) for key in keys]


def test_keys_broadcast_and_the_row_never_enters():
    seed = jnp.asarray(np.stack([seed_words(5), seed_words(2**40 + 1), seed_words(5)]))
    positions = jnp.asarray([[10], [11], [10]], jnp.int32) + jnp.arange(4, dtype=jnp.int32)
    out = uniform(seed[:, None], positions, Purpose.ACCEPT, 0)
    assert out.shape == (3, 4)
    assert np.array_equal(out[0], out[2])
    assert bits(out)[1, 3] == oracle.top_bits(2**40 + 1, 14, 2, 0)


def test_draws_lie_in_the_unit_interval_and_fill_it():
    positions = jnp.arange(20000, dtype=jnp.int32)
    out = np.asarray(uniform(jnp.asarray(seed_words(3)), positions, Purpose.PROPOSAL, 0))
    assert out.min() >= 0 and out.max() < 1
    assert abs(out.mean() - 0.5) < 0.01 and abs(out.var() - 1 / 12) < 0.005


def test_j18_a_seed_keeps_all_64_bits():
    assert seed_words(2**64 - 2).tolist() == [2**32 - 2, 2**32 - 1]
    low, high = (jnp.asarray(seed_words(s)) for s in (7, 7 + 2**32))
    assert uniform(low, 0, Purpose.DECODE, 0) != uniform(high, 0, Purpose.DECODE, 0)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="seed"):
            seed_words(seed)


def test_wrong_dtypes_are_errors():
    seed = jnp.asarray(seed_words(1))
    with pytest.raises(ValueError, match="seed"):
        uniform(seed.astype(jnp.int32), 0, Purpose.DECODE, 0)
    with pytest.raises(ValueError, match="position"):
        uniform(seed, jnp.zeros(2), Purpose.DECODE, 0)
