"""The experts a round reads are counted as its router chooses them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.steps import speculate
from dflash_jax.steps.experts import active_experts
from dflash_jax.target.moe import SparseMoe
from tests import cases
from tests.steps.harness import Session, extent_of


def scene(target):
    models = cases.tiny_models(target, "dflash", 3, 2)
    session = Session(models, cases.leaning_params(models))
    session.admit({lane: cases.prompts(models)[lane] for lane in (0, 1)}, 12)
    rows = session.rows([0, 1])
    extent = extent_of(models, session.state, rows)
    state = jax.tree.map(jnp.copy, session.state)
    state, scratch = speculate(
        models, session.params, state, rows, SamplingArrays.greedy(2), extent
    )
    return models, session.params, state, rows, scratch.proposal, extent


def test_distinct_experts_of_a_layer_are_those_that_its_router_chose(monkeypatch):
    inputs = scene("moe")
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
    with pytest.raises(ValueError, match="target: expected a mixture of experts, got a dense one"):
        active_experts(*scene("dense"))
