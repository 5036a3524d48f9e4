"""Files exchanged with transformers: it reads ours, and we read what `save_pretrained` writes."""

import jax
import numpy as np
import pytest

from dflash_jax.config import DtypePolicy, tiny_target
from dflash_jax.weights import load_target
from dflash_jax.weights.export import save_target
from dflash_jax.weights.init import random_target

pytestmark = pytest.mark.parity


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "config",
    [tiny_target(), tiny_target(moe=True), tiny_target(tie_embeddings=True)],
    ids=["dense", "moe", "tied"],
)
def test_parameters_survive_the_way_through_transformers(tmp_path, config):
    """Its own spelling stores experts one by one and drops `attn_output_gate`."""
    transformers = pytest.importorskip("transformers")
    policy = DtypePolicy.exact()
    params = random_target(config, policy, seed=0)
    save_target(tmp_path / "ours", config, params)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype="float32", output_loading_info=True
    )
    assert not any(report.values()), report
    model.save_pretrained(tmp_path / "theirs")
    loaded, again = load_target(tmp_path / "theirs", policy, public_vocab=config.public_vocab)
    assert loaded == config
    same = jax.tree.map(np.array_equal, again, params)
    assert all(jax.tree.leaves(same)), same
