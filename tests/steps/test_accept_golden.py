"""accept against the kit's closed form of one verification: probabilities and residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.sampling.uniform import seed_words
from dflash_jax.state.scratch import RoundExtent, Verification
from dflash_jax.state.sequence import SequenceState
from dflash_jax.steps import accept
from tests.oracles import sampling as oracle
from tests.oracles.uniform import top_bits
from tests.steps.harness import chain_proposal

ROWS, FRONTIER = 2048, 19
PLAIN = SamplingParams(temperature=0.8, top_k=20, top_p=0.95)


@pytest.mark.parametrize("point_mass", [False, True])
def test_decisions_follow_the_closed_form(repository_root, point_mass):
    folder = repository_root / "tests" / "data" / "kit_tiny" / "golden"
    with np.load(folder / "verify_tiny__tiny_dflash2.npz") as archive:
        golden = dict(archive)
    prefix = "onehot_" if point_mass else ""
    pass_probability, residual = golden[prefix + "accept"], golden[prefix + "residual"]
    found = jax.tree.map(np.asarray, decide(golden, point_mass))
    outcomes = set()
    for seed in range(ROWS):
        def draw(purpose, offset, seed=seed):
            return top_bits(seed, FRONTIER + offset, purpose, 0) * 2.0**-24

        fails = [draw(oracle.ACCEPT, i + 1) >= mass for i, mass in enumerate(pass_probability)]
        accepted = [*fails, True].index(True)
        if accepted < len(residual):
            law, purpose = residual[accepted], oracle.CORRECTION
        else:
            law, purpose = golden["p"][accepted], oracle.BONUS
        token = oracle.inverse_cdf(law, draw(purpose, accepted + 1))
        told = [*golden["path"][:accepted].tolist(), token]
        assert found.outputs[seed, : accepted + 1].tolist() == told, seed
        assert found.accepted[seed] == accepted
        outcomes.add(accepted)
    possible = np.flatnonzero(np.append(1 - pass_probability, 1) > 1e-3)
    assert outcomes == set(possible.tolist())


def decide(golden, point_mass):
    """accept on the golden's logits for many seeds."""
    count, size = len(golden["path"]), golden["p"].shape[1]

    def rows(array, dtype):
        array = np.asarray(array, dtype)
        return jnp.array(np.broadcast_to(array, (ROWS, *array.shape)))

    proposal = chain_proposal(rows([golden["anchor"], *golden["path"]], np.int32))
    if not point_mass:
        proposal = proposal.replace(
            candidates=rows(golden["candidates"], np.int32), q=rows(golden["q"], np.float32)
        )
    empty = jnp.zeros((ROWS, count + 1, 0), jnp.float32)
    verification = Verification(
        logits=rows(golden["target_logits"], np.float32), hidden=empty, features=empty,
        kv_rows=(), gdn_records=(),
    )
    sequence = SequenceState.zeros(ROWS, size).replace(
        frontier=rows(FRONTIER, np.int32),
        seed=jnp.array(np.stack([seed_words(seed) for seed in range(ROWS)])),
    )
    extent = RoundExtent(
        proposals=rows(count, np.int32), columns=rows(count + 1, np.int32),
        draft_columns=rows(count + 1, np.int32),
    )
    return accept(
        proposal, verification, sequence, SamplingArrays.of([PLAIN] * ROWS, size), extent,
        public_vocab=size,
    )
