"""Copies into slots, pages and lanes that do not exist write nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.steps import images
from tests import cases
from tests.steps.harness import Session, assert_same_bytes

MODELS = cases.tiny_models("dense", "dflash", 3, 3)


def before():
    """A state without a zero."""
    return jax.tree.map(lambda x: jnp.ones_like(x), MODELS.zeros())


def twos(tree):
    return jax.tree.map(lambda x: jnp.full_like(x, 2), tree)


def ints(*values):
    return jnp.array(np.array(values, np.int32))


@pytest.mark.parametrize("slot", cases.outside(MODELS.run.slots))
def test_a_slot_out_of_range_takes_no_image(slot):
    image = twos(images.read_slot(before(), ints(0)[0]))
    assert_same_bytes(images.write_slot(before(), ints(slot)[0], image), before())


@pytest.mark.parametrize("page", cases.outside(MODELS.run.pages))
def test_pages_out_of_range_drop_beside_one_that_is_written(page):
    ids = ints(page, 1)
    group = twos(images.read_pages(before(), ids, ids))
    after = images.write_pages(before(), ids, ids, group)
    for pool in jax.tree.leaves((after.target.kv, after.context.pages)):
        changed = np.asarray(pool != 1).any(axis=(0, 2, 3))
        assert np.flatnonzero(changed).tolist() == [1]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_lanes_out_of_range_resume_nothing(which):
    admission = Session(MODELS, None).admission([0, 1, 2], [9, 9, 9], [40, 40, 40])
    ids, some = ints([3, 4], [5, 6], [7, 8]), ints(2, 2, 2)
    resumption = images.Resumption(
        frontier=some, anchor=some, prompt=ids, prompt_tokens=some, published=ids,
        published_tokens=some, **{
            field.name: getattr(admission, field.name) for field in dataclasses.fields(admission)
        },
    )
    rows = Session(MODELS, None).nobody(which)
    assert_same_bytes(images.resume(before(), rows, resumption), before())
