"""Our drafts against the published DFlash and DFlash2 models, loaded from real files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DtypePolicy, LayerKind
from dflash_jax.ops.dynamic_grouped_conv import apply_taps, finish, increments
from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.scratch import RoundExtent
from dflash_jax.steps import Params, propose
from dflash_jax.steps.models import draft_call, target_call
from dflash_jax.weights import load_draft, load_target
from scripts.oracle.drafts import block_after, context_after
from scripts.oracle.lane import ROWS, models_for
from tests.parity.geometries import DRAFT_GEOMETRIES, TARGET_GEOMETRIES
from tests.tolerances import FP32_CHAIN, assert_close

pytestmark = pytest.mark.parity

# Longer than every window, and shorter than most.
PROMPTS = (23, 3)
ANCHOR = 11
# What the published rule makes of each draft's file.
CAUSAL = {
    "mixed": (True, True, False),
    "full": (False, False),
    "narrow": (False, False, False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A published pair, ours from its files, and prompts."""

    target: object
    draft: object
    models: object
    params: Params


# Called eagerly, each operation in it would be a program of its own to compile.
proposed = jax.jit(propose, static_argnums=0)


def named(case):
    return f"{case[0]}-{'dflash2' if case[1] else 'dflash'}"


CASES = [(name, dflash2) for dflash2 in (False, True) for name in DRAFT_GEOMETRIES]
only_dflash2 = pytest.mark.parametrize(
    "case", [case for case in CASES if case[1]], indirect=True, ids=named, scope="module"
)


@pytest.fixture(scope="module", params=CASES, ids=named)
def case(request, published, tmp_path_factory):
    geometry, dflash2 = request.param
    folder = tmp_path_factory.mktemp("pair")
    place = list(DRAFT_GEOMETRIES).index(geometry)
    target = published.writers.write_target(
        folder / "target", TARGET_GEOMETRIES[place], moe=place == 1
    )
    text = target.config.get_text_config()
    draft = published.writers.write_draft(folder / "draft", geometry, text, dflash2=dflash2)
    policy = DtypePolicy.exact()
    target_config, target_params = load_target(folder / "target", policy)
    draft_config, draft_params = load_draft(folder / "draft", target_config, policy)
    assert draft_config.causal == CAUSAL[geometry]
    models = models_for(
        target_config, draft_config, draft_tokens=draft.block_size - 1, positions=64
    )
    params = Params(target=target_params, draft=draft_params)
    return Case(target=target, draft=draft, models=models, params=params)


def prompt_of(case, count):
    vocabulary = case.models.target.vocab_rows
    return np.random.default_rng(count).integers(0, vocabulary, count)


def published_block(case, published, count, width):
    """The published run of one block after a prompt of `count` tokens."""
    reference = published.reference
    blocks = reference.run_target(case.target, prompt_of(case, count).tolist()).blocks
    features = reference.features_of(blocks, case.draft.target_layer_ids)
    return reference.run_draft(case.draft, case.target, features, ANCHOR, width)


def our_block(case, count, width):
    pair = context_after(case.models, case.params, prompt_of(case, count))
    return pair, block_after(pair, jnp.array([ANCHOR], jnp.int32), width)


def test_context_keys_and_values_of_the_state(case, published):
    count = PROMPTS[0]
    expected = published_block(case, published, count, 2)
    pair, _ = our_block(case, count, 2)
    rings, pages = iter(pair.state.context.rings), iter(pair.state.context.pages)
    draft = case.models.draft
    for layer, kind in enumerate(draft.layer_types):
        if kind is LayerKind.SLIDING:
            store, held = next(rings), np.arange(count - draft.window, count)
            rows = [
                np.asarray(image[0])[:, held % draft.window] for image in (store.key, store.value)
            ]
        else:
            store, held = next(pages), np.arange(count)
            rows = [
                np.asarray(image).reshape(draft.kv_heads, -1, draft.head_dim)[:, held]
                for image in (store.key, store.value)
            ]
        assert_close(rows[0], expected.context_keys[layer][:, held], FP32_CHAIN)
        assert_close(rows[1], expected.context_values[layer][:, held], FP32_CHAIN)


@pytest.mark.parametrize("count", PROMPTS)
def test_residuals_hidden_and_logits_of_a_block(case, published, count):
    # Another width than the file recommends changes every column.
    for width in (case.draft.block_size, case.draft.block_size + 2):
        expected = published_block(case, published, count, width)
        _, block = our_block(case, count, width)
        for ours, theirs in zip(block.output.residuals, expected.layers, strict=True):
            assert_close(ours[0], theirs, FP32_CHAIN)
        assert_close(block.hidden, expected.hidden, FP32_CHAIN)
        logits = target_call(case.models, case.params, "logits", block.output.hidden)
        assert_close(logits[0], expected.logits, FP32_CHAIN)


def test_context_feature(case, published):
    expected = published_block(case, published, PROMPTS[0], 2)
    reference = published.reference
    ids = prompt_of(case, PROMPTS[0]).tolist()
    blocks = reference.run_target(case.target, ids).blocks
    features = reference.features_of(blocks, case.draft.target_layer_ids)
    c = case.models.draft_module.apply(
        {"params": case.params.draft},
        jnp.asarray(features)[None],
        method=lambda module, x: module.context.conditioning(x),
    )
    assert_close(c[0], expected.context, FP32_CHAIN)


@pytest.mark.parametrize("count", PROMPTS)
def test_greedy_proposals(case, published, count):
    width = case.draft.block_size
    expected = published_block(case, published, count, width)
    pair, _ = our_block(case, count, width)
    sequence = pair.state.sequence
    state = pair.state.replace(
        sequence=sequence.replace(anchor=jnp.full_like(sequence.anchor, ANCHOR))
    )
    whole = jnp.full((1,), width, jnp.int32)
    extent = RoundExtent(proposals=whole - 1, columns=whole, draft_columns=whole)
    proposal = proposed(case.models, case.params, state, ROWS, SamplingArrays.greedy(1), extent)
    np.testing.assert_array_equal(proposal.tokens[0], [ANCHOR, *expected.tokens])


@only_dflash2
def test_selector_scores(case, published):
    width = case.draft.block_size
    expected = published_block(case, published, PROMPTS[0], width)
    _, block = our_block(case, PROMPTS[0], width)
    hidden, anchor = block.output.hidden, jnp.array([ANCHOR], jnp.int32)
    head = target_call(case.models, case.params, "head_matrix")
    public = case.models.target.public_vocab
    best = draft_call(case.models, case.params, "topk", hidden, head, public)
    unary, candidates, edges = published.reference.selector_scores(
        case.draft, expected.hidden[1:], expected.logits, ANCHOR
    )
    np.testing.assert_array_equal(best.ids[0], candidates)
    assert_close(best.scores[0], unary, FP32_CHAIN)
    ours = draft_call(case.models, case.params, "edges", hidden, best, anchor)
    assert_close(ours[0], edges, FP32_CHAIN)


@only_dflash2
def test_convolutions(case, published):
    generator = np.random.default_rng(5)
    taps, width = case.models.draft.conv.taps, case.draft.block_size
    shape = (2, width, case.models.draft.hidden)
    x, y = generator.standard_normal((2, *shape)).astype(np.float32)
    for layer in range(case.models.draft.draft_layers):
        for branch in ("attention_conv", "mlp_conv"):
            theirs = getattr(case.draft.layers[layer], branch)
            prepared, closing, finished = published.reference.convolve(theirs, x, y)
            ours = case.params.draft[f"layers_{layer}"][branch]
            delta = increments(jnp.asarray(x), ours["projection"]["kernel"], taps=taps)
            assert_close(delta[:, :, 1], closing, FP32_CHAIN)
            assert_close(apply_taps(x, ours["base"][0], delta[:, :, 0]), prepared, FP32_CHAIN)
            out = finish(jnp.zeros(shape), jnp.asarray(y), ours["base"], delta[:, :, 1])
            assert_close(out, finished, FP32_CHAIN)
