"""Claim 12: a step aliases the whole state and never copies a pool."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.decode import Rows
from dflash_jax.steps import (
    PrefillChunk,
    advance,
    commit,
    images,
    materialize,
    prefill_chunk,
    speculate,
)
from dflash_jax.steps.init import abstract_params
from tests import cases

# 64 lanes and one row: every pool is much larger than what one row reads.
LANES, CONTEXT = 64, 1024
# On a GPU larger than the 32 MiB that XLA gives a matrix product of its library to work in, too.
GPU_LANES = 1024


def numbers(shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def abstract_steps(target, draft, lanes=LANES):
    """The lowered steps of a pair with large pools by name, the abstract state and scratch."""
    models = cases.tiny_models(
        target, draft, 3, 1, lanes=lanes, slots=lanes, max_context=CONTEXT
    )
    state, params = jax.eval_shape(models.zeros), abstract_params(models)
    one = numbers((1,))
    rows = Rows(lane=one, read_slot=one, write_slot=one)
    greedy = jax.eval_shape(lambda: SamplingArrays.greedy(1))
    extent = jax.eval_shape(lambda s: models.extent(s.gather(jnp.zeros((1,), jnp.int32))),
                            state.sequence)
    round_inputs = (params, state, rows, greedy, extent)
    scratch = jax.eval_shape(lambda *a: speculate(models, *a), *round_inputs)[1]
    chunk = PrefillChunk(
        tokens=numbers((1, 16)), length=one, positions=numbers((1, 16, 3)),
        embeddings=numbers((1, 0, 64), jnp.float32), replaced=numbers((1, 0), jnp.bool_),
    )
    return state, scratch, {
        "advance": lambda: advance.lower(
            models, params, state, rows, greedy, scratch, one,
            numbers((1, models.run.block_width + 4)),
        ),
        "speculate": lambda: speculate.lower(models, *round_inputs),
        "commit": lambda: commit.lower(models, state, rows, scratch, one),
        "materialize": lambda: materialize.lower(models, params, state, rows),
        "prefill_chunk": lambda: prefill_chunk.lower(models, params, state, rows, chunk),
    }


def size(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def check(state, lower, name, donated=()):
    """Alias bytes are those of the state and of what else is donated, all of it is taken, and what
    the step needs besides is less than a quarter pool.
    """
    pool = min(size(leaf) for leaf in jax.tree.leaves(state.target.kv))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Some donated buffers")
        memory = lower().compile().memory_analysis()
    assert memory.alias_size_in_bytes == size((state, donated)), name
    assert memory.temp_size_in_bytes < pool / 4, name


@pytest.mark.parametrize("pair", [("dense", "dflash"), ("moe", "dflash2")], ids=str)
def test_j14_a_round_aliases_the_state_and_copies_no_pool(pair):
    state, _, steps = abstract_steps(*pair)
    for name in ("speculate", "commit", "materialize"):
        check(state, steps[name], name)


@pytest.mark.parametrize(
    "pair",
    [("dense", "dflash"), pytest.param(("moe", "dflash2"), marks=pytest.mark.slow)], ids=str,
)
def test_a_round_that_goes_on_from_another_leaves_every_array_where_it_was(pair):
    """State and scratch, also logits and q, which commit does not read."""
    state, scratch, steps = abstract_steps(*pair)
    summary = numbers((1, 3 + 1 + 4))
    check(state, steps["advance"], "advance", donated=(scratch, summary))


@pytest.mark.parametrize("pair", [("dense", "dflash"), ("moe", "dflash2")], ids=str)
def test_images_are_written_in_place_and_read_without_a_pool(pair):
    models = cases.tiny_models(*pair, 3, 1, lanes=LANES, slots=LANES, max_context=CONTEXT)
    state, one, ids = jax.eval_shape(models.zeros), numbers(()), numbers((images.PAGE_GROUP,))
    image = jax.eval_shape(images.read_slot, state, one)
    group = jax.eval_shape(images.read_pages, state, ids, ids)
    check(state, lambda: images.write_slot.lower(state, one, image), "write_slot")
    check(state, lambda: images.write_pages.lower(state, ids, ids, group), "write_pages")
    pool = min(size(leaf) for leaf in jax.tree.leaves(state.target.kv))
    for lowered in (
        images.read_slot.lower(state, one), images.read_pages.lower(state, ids, ids)
    ):
        assert lowered.compile().memory_analysis().temp_size_in_bytes < pool / 4


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [("dense", "dflash"), ("moe", "dflash2")], ids=str)
def test_j14_prefill_copies_no_pool(pair):
    """On a CPU XLA drops the barrier that orders reads before writes, and copies."""
    state, _, steps = abstract_steps(*pair, lanes=GPU_LANES)
    check(state, steps["prefill_chunk"], "prefill_chunk")
