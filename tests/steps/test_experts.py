"""The experts a round reads are counted as its router chooses them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.state.decode import Rows
from dflash_jax.state.scratch import RoundExtent
from dflash_jax.steps.experts import active_experts
from dflash_jax.steps.init import random_params
from dflash_jax.target.moe import SparseMoe
from tests import cases
from tests.steps.harness import chain_proposal


def scene():
    """A verification of four random columns in two lanes that hold nothing."""
    models = cases.tiny_models("moe", "dflash", 3, 2)
    tokens = jax.random.randint(jax.random.key(0), (2, 4), 0, models.target.public_vocab)
    four = jnp.full((2,), 4, jnp.int32)
    extent = RoundExtent(proposals=four - 1, columns=four, draft_columns=four)
    return (
        models, random_params(models, 0), models.zeros(), Rows.of((0, 1)), chain_proposal(tokens),
        extent,
    )


def test_distinct_experts_of_a_layer_are_those_that_its_router_chose(monkeypatch):
    inputs = scene()
    models, seen, call = inputs[0], [], SparseMoe.__call__

    def watched(self, x, **options):
        scores = self.router(x.reshape(-1, x.shape[-1]), jnp.float32)["experts"]
        jax.debug.callback(lambda layer, s: seen.append((int(layer), s)), self.layer, scores)
        return call(self, x, **options)

    monkeypatch.setattr(SparseMoe, "__call__", watched)
    counts = np.asarray(active_experts(*inputs))
    jax.effects_barrier()
    scores, k = dict(seen), models.target.moe.experts_per_token
    expected = [
        len(np.unique(np.argsort(-scores[layer], axis=1, kind="stable")[:, :k]))
        for layer in range(len(counts))
    ]
    assert counts.tolist() == expected
    assert k < max(expected)


def test_a_dense_target_has_no_experts_to_count():
    models = cases.tiny_models("dense", "dflash", 3, 2)
    with pytest.raises(ValueError, match="target: expected a mixture of experts, got a dense one"):
        active_experts(models, None, None, None, None, None)
