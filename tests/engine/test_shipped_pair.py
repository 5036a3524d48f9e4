"""The shipped pair with every kernel: plain decoding's own text, and its law where it samples.

On a GPU: pytest --gpu -m gpu tests/engine/test_shipped_pair.py
"""

import functools

import numpy as np
import pytest
from scipy import stats

from dflash_jax.assets import tiny_pair_path
from dflash_jax.config import DtypePolicy, RunConfig
from dflash_jax.engine.generate import generate
from dflash_jax.engine.text import TextTokenizer
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params
from dflash_jax.steps.models import target_call
from dflash_jax.weights import load_draft, load_target
from tests.sampling.test_whole_rounds import Prefilled

PROMPTS = (
    "def read_lines(path):\n    with open(path) as f:\n",
    "class Queue:\n    \"\"\"Create a queue object with a given maximum size.\n",
    "import os\nimport sys\n\ndef main(argv):\n",
    "    def test_close(self):\n        self.assert",
)
BUDGET = 96
CONTROLS = dict(temperature=0.9, top_k=20, top_p=0.95, presence_penalty=0.5)
# Interpret mode compiles for minutes: one short case of it.
FORMS = pytest.mark.parametrize(
    "form, rows, budget",
    [pytest.param("pallas", 4, BUDGET, marks=pytest.mark.gpu),
     pytest.param("interpret", 1, 24, marks=pytest.mark.slow)],
)
DRAFTS = pytest.mark.parametrize(
    "draft, draft_tokens, nodes", [("dflash", 7, 0), ("dflash2", 7, 0), ("dflash2", 7, 12)], ids=str
)


@functools.cache
def loaded(draft, exact):
    policy = DtypePolicy.exact() if exact else DtypePolicy()
    target, weights = load_target(tiny_pair_path("target"), policy)
    if draft is None:
        return target, None, Params(target=weights, draft={})
    config, draft_weights = load_draft(tiny_pair_path(draft), target, policy)
    return target, config, Params(target=weights, draft=draft_weights)


def prompts(rows):
    tokenizer = TextTokenizer.load(tiny_pair_path("target"))
    return [tokenizer.encode(text) for text in PROMPTS[:rows]]


def pair(draft, draft_tokens, form, *, exact, batch, nodes=0):
    target, config, params = loaded(draft, exact)
    policy = DtypePolicy.exact() if exact else DtypePolicy()
    run = RunConfig(
        draft_tokens=draft_tokens, batch=batch, max_context=320, chunk=64, dtypes=policy,
        implementation=form, tree_nodes=nodes,
    )
    return Models(target, config, run), params


def texts(models, params, rows, budget, **options):
    return [
        list(output.tokens)
        for output in generate(models, params, prompts(rows), max_new_tokens=budget, **options)
    ]


@FORMS
@DRAFTS
def test_greedy_float32_text_is_that_of_plain_decoding_without_a_kernel(
    form, rows, budget, draft, draft_tokens, nodes
):
    plain = texts(*pair(None, 0, "xla", exact=True, batch=rows), rows, budget)
    with_kernels = pair(draft, draft_tokens, form, exact=True, batch=rows, nodes=nodes)
    assert texts(*with_kernels, rows, budget) == plain


@FORMS
@DRAFTS
def test_bf16_text_is_plain_text_up_to_a_near_tie(form, rows, budget, draft, draft_tokens, nodes):
    """At the first difference the target's two best logits are within 2^-6 of each other."""
    plain = texts(*pair(None, 0, "xla", exact=False, batch=rows), rows, budget)
    with_kernels = pair(draft, draft_tokens, form, exact=False, batch=rows, nodes=nodes)
    for prompt, ours, theirs in zip(
        prompts(rows), texts(*with_kernels, rows, budget), plain, strict=True
    ):
        assert len(ours) == len(theirs)
        first = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None
        )
        if first is not None:
            assert near_tie(prompt + theirs[:first], (ours[first], theirs[first]))


def near_tie(ids, tokens):
    """Whether the float32 target finds two tokens, its best among them, equally likely."""
    models, params = pair(None, 0, "xla", exact=True, batch=1)
    hidden = Prefilled(models, params, np.array([ids], np.int32)).state.target.continuation
    logits = np.asarray(target_call(models, params, "logits", hidden[:1]), np.float64)[0]
    best = logits[: models.target.public_vocab].max()
    return all((best - logits[token]) / abs(best) < 2.0**-6 for token in tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("draft, nodes", [("dflash", 0), ("dflash2", 0), ("dflash2", 12)], ids=str)
def test_sampled_texts_have_the_law_of_plain_sampling_without_a_kernel(draft, nodes):
    """Two samples of each place's tokens, under temperature, filters and a penalty."""
    length, repeats, rows = 6, 48, 16  # the heads take at most 128 columns
    counts = {}
    for name in (None, draft):
        form, width = ("xla", 0) if name is None else ("pallas", 7)
        models, params = pair(
            name, width, form, exact=True, batch=rows, nodes=nodes if name else 0
        )
        found = []
        for repeat in range(repeats):
            first = (repeat + repeats * (name is None)) * rows  # no seed is used twice
            sampling = [SamplingParams(seed=first + row, **CONTROLS) for row in range(rows)]
            found += [
                output.tokens for output in generate(
                    models, params, prompts(1) * rows, max_new_tokens=length, sampling=sampling
                )
            ]
        counts[name] = np.array(found)
    for place in range(length):
        assert same_law(counts[None][:, place], counts[draft][:, place]) > 1e-4, place


def same_law(one, other):
    """The p-value of two samples' homogeneity; tokens seen fewer than ten times are one cell."""
    table = np.stack([np.bincount(sample, minlength=2048) for sample in (one, other)])
    rare = table.sum(axis=0) < 10
    table = np.concatenate([table[:, ~rare], table[:, rare].sum(axis=1, keepdims=True)], axis=1)
    return stats.chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue
