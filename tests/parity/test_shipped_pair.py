"""The shipped pair in the published implementations: same logits, proposals and texts.

transformers and the `dflash` package load the folders as they lie in the package. Everything runs
in float32. Block 7, the target's last, is captured as its residual, through the hooks of
`reference`: transformers' own `hidden_states` hold its normed output instead.
"""

import time

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.assets import DRAFTS, tiny_pair_path
from dflash_jax.config import DtypePolicy
from dflash_jax.engine.generate import generate
from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.scratch import RoundExtent
from dflash_jax.steps import Params, propose
from dflash_jax.target import Target
from dflash_jax.training.figures import PROMPTS, read_prompts
from dflash_jax.weights import load_draft, load_target
from scripts.oracle.drafts import context_after
from scripts.oracle.lane import ROWS, columns_at, models_for
from scripts.oracle.rounds import generated
from tests.tolerances import FP32_CHAIN, assert_close

pytestmark = pytest.mark.parity

EXACT = DtypePolicy.exact()
WIDTH, BUDGET, CONTEXTS = 8, 48, 6
LENGTHS = (40, 64, 100)  # shorter than the window, as long, and longer: the rings have wrapped


@pytest.fixture(scope="module")
def target(published):
    """The published target, ours, and texts: held-out prompts with the target's answers."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_pair_path("target"), dtype="float32"
    ).eval()
    assert type(theirs) is transformers.Qwen3_5ForCausalLM
    config, weights = load_target(tiny_pair_path("target"), EXACT)
    prompts = read_prompts(tiny_pair_path(PROMPTS))[:: 128 // CONTEXTS][:CONTEXTS]
    models = models_for(config, None, draft_tokens=0, positions=64 + BUDGET)
    params = Params(target=weights, draft={})
    texts = [
        prompt + list(generate(models, params, [prompt], max_new_tokens=BUDGET)[0].tokens)
        for prompt in prompts
    ]
    return theirs, config, weights, texts


@pytest.fixture(scope="module", params=DRAFTS)
def pair(request, target, published):
    """A published draft beside ours."""
    _, config, weights, _ = target
    cls = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}[request.param]
    theirs, loading = getattr(published.dflash, cls).from_pretrained(
        tiny_pair_path(request.param), dtype="float32", output_loading_info=True
    )
    assert not any(loading.values()), loading
    draft, params = load_draft(tiny_pair_path(request.param), config, EXACT)
    models = models_for(config, draft, draft_tokens=WIDTH - 1, positions=64 + BUDGET + WIDTH)
    return theirs.eval(), models, Params(target=weights, draft=params)


def test_the_target_has_transformers_logits(target, published):
    theirs, config, weights, texts = target
    models = models_for(config, None, draft_tokens=0, positions=len(texts[0]))
    module, state = Target(config, EXACT, ()), models.zeros()
    for text in texts[:2]:
        embedded = module.apply({"params": weights}, jnp.array([text], jnp.int32), method="embed")
        columns = columns_at(state, 0, len(text))
        output = module.apply(
            {"params": weights}, embedded, columns, state.target, method="prefill"
        )
        logits = module.apply({"params": weights}, output.hidden, method="logits")
        expected = published.reference.run_target(theirs, text).logits
        assert_close(logits[0], expected, FP32_CHAIN)


def test_drafts_propose_the_same_tokens_for_the_same_context(target, pair, published):
    reference, (published_target, _, _, texts) = published.reference, target
    theirs, models, params = pair
    whole = jnp.full((1,), WIDTH, jnp.int32)
    extent = RoundExtent(proposals=whole - 1, columns=whole, draft_columns=whole)
    compared = 0
    for text in texts:
        blocks = reference.run_target(published_target, text).blocks
        for length in LENGTHS:
            features = reference.features_of(blocks[:, :length], theirs.target_layer_ids)
            expected = reference.run_draft(theirs, published_target, features, text[length], WIDTH)
            state = context_after(models, params, np.array(text[:length])).state
            anchor = jnp.full_like(state.sequence.anchor, text[length])
            state = state.replace(sequence=state.sequence.replace(anchor=anchor))
            proposal = propose(models, params, state, ROWS, SamplingArrays.greedy(1), extent)
            np.testing.assert_array_equal(proposal.tokens[0], [text[length], *expected.tokens])
            compared += WIDTH - 1
    assert compared == len(texts) * len(LENGTHS) * (WIDTH - 1)


def test_the_published_loop_writes_the_same_text(target, pair, published, monkeypatch):
    published_target, _, _, texts = target
    theirs, models, params = pair
    # The published statistics read a GPU clock.
    monkeypatch.setattr(published.dflash, "_cuda_time", time.perf_counter)
    for text in texts[:2]:
        prompt = text[:64]
        found = published.dflash.dflash_generate(
            theirs, published.reference.RecomputingTarget(published_target),
            published.torch.tensor([prompt]), BUDGET, None, return_stats=True,
        )
        assert found.output_ids[0].tolist() == text
        ours = generated(models, params, np.array(prompt), BUDGET)
        assert ours.output == text[64:]
        emitted = [item.emitted for item in ours.rounds]
        assert whole_rounds(emitted) == whole_rounds(found.acceptance_lengths)
        assert max(emitted) > 3


def whole_rounds(emitted):
    """Tokens of each round, in order, as long as a whole block is wanted."""
    taken, left = [], BUDGET - 1
    for count in emitted:
        if left < WIDTH:
            break
        taken.append(count)
        left -= count
    return taken
