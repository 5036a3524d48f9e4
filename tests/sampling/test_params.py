"""Requests that cannot be served are refused on the host, with the field's name."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.sampling.uniform import seed_words

V_PUB = 7
REFUSED = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 1e39),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", 1 << 31),
    ("top_k", True),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.0001),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.0),
    ("min_p", math.nan),
    ("presence_penalty", math.inf),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -math.inf),
    ("frequency_penalty", 1e39),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 1e-50),
    ("repetition_penalty", math.nan),
    ("seed", -1),
    ("seed", 1 << 64),
    ("seed", 1.0),
    ("logit_bias", {3: math.nan}),
    ("logit_bias", {3: math.inf}),
    ("logit_bias", {3: -1e39}),
    ("allowed_ids", ()),
    *[(name, value) for name in ("temperature", "top_p", "presence_penalty", "top_k", "seed")
      for value in ("1", None, [1.0], 1j)],
    ("logit_bias", 5),
    ("logit_bias", [(3, 1.0)]),
    ("logit_bias", {3: "1"}),
    ("logit_bias", {3: True}),
    ("allowed_ids", 5),
    ("allowed_ids", "ab"),
    ("allowed_ids", {3: 1}),
    ("allowed_ids", np.array(3)),
]
REFUSED_BY_VOCABULARY = [
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {V_PUB: 1.0}),
    ("logit_bias", {1.5: 1.0}),
    ("allowed_ids", (0, -1)),
    ("allowed_ids", (0, V_PUB)),
    ("allowed_ids", (0, 1.5)),
]


@pytest.mark.parametrize("name, value", REFUSED)
def test_impossible_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name}(\[3\])?: expected .*, got "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name, value", REFUSED_BY_VOCABULARY)
def test_ids_out_of_range_are_refused_by_name(name, value):
    params = SamplingParams(**{name: value})
    with pytest.raises(ValueError, match=rf"^{name}: expected .*ids in \[0, {V_PUB}\), got "):
        SamplingArrays.of([SamplingParams(), params], V_PUB)


def test_values_at_the_edge_are_taken():
    SamplingParams(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=(1 << 64) - 1, repetition_penalty=1e-3
    )
    SamplingParams(
        temperature=1e3, top_k=(1 << 31) - 1, top_p=1e-50, min_p=0.999, presence_penalty=-2.0,
        frequency_penalty=-2.0, logit_bias={0: -100.0}, allowed_ids=(0,),
    )
    SamplingParams(temperature=np.float32(0.7), top_p=np.float32(0.9))


def test_arrays_hold_each_row_s_values():
    rows = [
        SamplingParams(),
        SamplingParams(
            temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, presence_penalty=1.5,
            frequency_penalty=-0.5, repetition_penalty=2.0, logit_bias={2: -4.0, 6: 1.0},
            allowed_ids=[6, 2],
        ),
    ]
    arrays = SamplingArrays.of(rows, V_PUB)
    expected = {
        "temperature": [0, 0.5], "top_p": [1, 0.75], "min_p": [0, 0.25], "presence": [0, 1.5],
        "frequency": [0, -0.5], "repetition": [1, 2], "top_k": [0, 3], "plain": [True, False],
    }
    for name, values in expected.items():
        array = getattr(arrays, name)
        assert array.tolist() == values, name
        kind = {"top_k": jnp.int32, "plain": jnp.bool_}.get(name, jnp.float32)
        assert array.dtype == kind, name
    assert arrays.bias.tolist() == [[0.0] * V_PUB, [0, 0, -4, 0, 0, 0, 1]]
    assert arrays.allowed.tolist() == [[True] * V_PUB, [i in (2, 6) for i in range(V_PUB)]]


@pytest.mark.parametrize(
    "change",
    [
        dict(temperature=0.1), dict(presence_penalty=0.1), dict(frequency_penalty=0.1),
        dict(repetition_penalty=1.1), dict(logit_bias={0: 1.0}), dict(allowed_ids=(1,)),
    ],
)
def test_a_row_is_plain_only_with_neutral_controls(change):
    assert SamplingParams(seed=5, top_k=3, top_p=0.5, min_p=0.1).is_plain
    assert not SamplingParams(**change).is_plain


def test_greedy_arrays_carry_no_vocabulary_wide_columns():
    arrays = SamplingArrays.greedy(3)
    assert arrays.plain.all() and arrays.bias.shape == arrays.allowed.shape == (3, 0)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 5, 2**64 - 1])
def test_j18_every_legal_seed_reaches_the_device_whole(seed):
    low, high = (int(word) for word in jnp.asarray(seed_words(SamplingParams(seed=seed).seed)))
    assert low + (high << 32) == seed
