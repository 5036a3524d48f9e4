"""Model pairs that tests and benchmarks share: tiny ones with values, published ones by shape.

Tiny pairs run in float32 on a CPU. The target of `leaning_params` prefers one token, and so does
its draft, so that rounds accept some proposals and reject others; random parameters accept nothing.
"""

import functools

import jax
import numpy as np

from dflash_jax.config import (
    DraftKind,
    DtypePolicy,
    RunConfig,
    dflash2_27b,
    dflash2_35b_a3b,
    dflash_27b,
    dflash_35b_a3b,
    qwen35_27b,
    qwen35_35b_a3b,
    tiny_draft,
    tiny_target,
)
from dflash_jax.steps import Models, Params
from dflash_jax.steps.init import random_params

TARGETS = {"dense": tiny_target(), "moe": tiny_target(moe=True)}
DRAFTS = {"dflash": tiny_draft(DraftKind.DFLASH), "dflash2": tiny_draft(DraftKind.DFLASH2)}
PAIRS = tuple((target, draft) for target in TARGETS for draft in DRAFTS)
DRAFT_TOKENS = (1, 3, 7, 15)
BATCHES = (1, 3, 8)

# Published geometries, as (target, draft): for shapes only.
PUBLISHED = {
    "27b-dflash2": (qwen35_27b, dflash2_27b),
    "27b-dflash": (qwen35_27b, dflash_27b),
    "35b-a3b-dflash": (qwen35_35b_a3b, dflash_35b_a3b),
    "35b-a3b-dflash2": (qwen35_35b_a3b, dflash2_35b_a3b),
}

LANES, SLOTS, MAX_CONTEXT, PAGE, CHUNK, WINDOW = 8, 9, 128, 16, 16, 12
# Shorter and longer than the window of 12, at its edge, and at the edges of chunks and pages.
PROMPT_LENGTHS = (3, 30, 12, 17, 1, 41, 25, 13)
# The token that `leaning_params` prefers.
FAVOURITE = 77


def every_combination():
    """All (target, draft, K, B) of claim 1."""
    return [(*pair, k, b) for pair in PAIRS for k in DRAFT_TOKENS for b in BATCHES]


def covering_combinations():
    """Twelve of them in which every two values of two different factors meet."""
    targets, drafts = tuple(TARGETS), tuple(DRAFTS)
    return [
        (targets[(k + b) % 2], drafts[(k // 2 + b) % 2], DRAFT_TOKENS[k], BATCHES[b])
        for k in range(len(DRAFT_TOKENS))
        for b in range(len(BATCHES))
    ]


def tiny_run(draft_tokens: int, batch: int, **overrides) -> RunConfig:
    """A float32 run with 8 lanes, 9 slots and pages of 16 tokens."""
    fields = dict(
        lanes=max(LANES, batch), slots=max(SLOTS, batch + 1), max_context=MAX_CONTEXT,
        page_size=PAGE, chunk=CHUNK, dtypes=DtypePolicy.exact(),
    )
    return RunConfig(draft_tokens=draft_tokens, batch=batch, **(fields | overrides))


def tiny_models(target: str, draft: str | None, draft_tokens: int, batch: int, **run) -> Models:
    """A tiny pair by name; draft None is plain decoding."""
    config = None if draft is None else DRAFTS[draft]
    return Models(TARGETS[target], config, tiny_run(draft_tokens, batch, **run))


def plain_models(models: Models) -> Models:
    """The same target without a draft."""
    run = models.run
    return Models(
        models.target, None,
        tiny_run(0, run.batch, lanes=run.lanes, slots=run.slots, max_context=run.max_context,
                 page_size=run.page_size, chunk=run.chunk, dtypes=run.dtypes),
    )


def leaning_params(models: Models) -> Params:
    """Random parameters under which FAVOURITE is often, and not always, the next token."""
    return Params(
        target=_leaning_target(models.target, models.run.dtypes),
        draft={} if models.draft is None else _leaning_draft(models),
    )


def unbiased_params(models: Models) -> Params:
    """The random parameters that `leaning_params` changes."""
    draft = {} if models.draft is None else _random_draft(
        models.target, models.draft, models.run.dtypes
    )
    return Params(target=_random_target(models.target, models.run.dtypes), draft=draft)


@functools.cache
def _random_target(target, dtypes):
    return random_params(Models(target, None, tiny_run(0, 1, dtypes=dtypes)), seed=1).target


@functools.cache
def _leaning_target(target, dtypes):
    drawn = _random_target(target, dtypes)
    # Channel 0 of every embedding is a constant, which only the favourite's head row reads.
    embedding = drawn["embedding"].at[:, 0].set(4.0)
    lean = 0.9 if target.moe is None else 0.8
    head = drawn["head"].at[:, 0].set(0.0).at[FAVOURITE, 0].set(lean)
    return {**drawn, "embedding": embedding, "head": head}


def _leaning_draft(models: Models):
    drawn = _random_draft(models.target, models.draft, models.run.dtypes)
    # The random convolutions of DFlash2 make the other channels larger.
    gain = 4.0 if models.draft.kind == DraftKind.DFLASH else 12.0
    weight = drawn["final_norm"]["weight"].at[0].mul(gain)
    return {**drawn, "final_norm": {"weight": weight}}


@functools.cache
def _random_draft(target, draft, dtypes):
    return random_params(Models(target, draft, tiny_run(1, 1, dtypes=dtypes)), seed=1).draft


def prompts(models: Models, lengths=PROMPT_LENGTHS, seed: int = 3) -> list[list[int]]:
    """One prompt of public ids per length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, models.target.public_vocab, n).tolist() for n in lengths]


def outside(size: int) -> tuple[int, ...]:
    """Indices that an axis of so many entries lacks, at either end."""
    return -1, -size, -size - 1, -(2**31), size, 2**31 - 1


def host(tree):
    """A pytree as NumPy arrays that later donations cannot touch."""
    return jax.tree.map(lambda x: np.array(x), tree)
