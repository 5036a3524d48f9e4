"""Engines over tiny pairs, what each request says alone, and the checks of what they hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.engine import lanes
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.generate import generate
from dflash_jax.engine.request import Embeddings
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import (
    advance,
    begin,
    commit,
    first_token,
    images,
    materialize,
    prefill_chunk,
)
from tests import cases

GREEDY = SamplingParams()
# Says the same by the programs that can sample, which an engine always uses: no further compile.
NEUTRAL = SamplingParams(logit_bias={0: 0.0})
BATCH, SLOTS = 3, 7
STEPS = (
    advance, begin, commit, first_token, materialize, prefill_chunk,
    images.resume, images.read_slot, images.write_slot, images.read_pages, images.write_pages,
    lanes._first, lanes._set_row,
)


class Letters:
    """A tokenizer: id i is the i-th character from "0" on."""

    chat_template = None

    def encode(self, text):
        return [ord(letter) - ord("0") for letter in text]

    def decode(self, ids):
        return "".join(chr(ord("0") + token) for token in ids)


@functools.cache
def pair(draft: str | None = "dflash", batch: int = BATCH, slots: int = SLOTS):
    """Models and parameters. DFlash has a ring and pages, DFlash2 rings alone."""
    draft_tokens = 0 if draft is None else 3
    models = cases.tiny_models("dense", draft, draft_tokens, batch, lanes=batch, slots=slots)
    return models, cases.leaning_params(models)


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Eight prompts, shorter and longer than chunk, window and page."""
    return tuple(map(tuple, cases.prompts(pair()[0])))


def engine(draft: str | None = "dflash", **options) -> Engine:
    return Engine(*pair(draft), tokenizer=Letters(), **options)


def sampled(seed: int) -> SamplingParams:
    """Controls that draw, filter and penalise."""
    return SamplingParams(
        temperature=0.6, top_k=30, top_p=0.95, presence_penalty=0.2, repetition_penalty=1.05,
        seed=seed,
    )


def controls(number: int) -> SamplingParams:
    """Greedy and sampled in turn."""
    return sampled(number) if number % 2 else GREEDY


_alone: dict = {}


def alone(
    prompt, max_new_tokens: int, sampling=GREEDY, draft="dflash", batch=BATCH, slots=SLOTS
):
    """The output of `generate` for one prompt by itself."""
    key = (tuple(prompt), max_new_tokens, repr(sampling), draft, batch, slots)
    if key not in _alone:
        models, params = pair(draft, batch, slots)
        (_alone[key],) = generate(
            models, params, [list(prompt)], max_new_tokens=max_new_tokens,
            sampling=NEUTRAL if sampling == GREEDY else sampling,
        )
    return _alone[key]


def holdings(engine: Engine, *more):
    """Everything that holds slots and pages."""
    rows = [row.holding for row in engine._schedule.rows.values()]
    images = [image.holding for image in engine._store if image.holding is not None]
    return [*rows, *images, *more]


def check(engine: Engine, *more) -> None:
    """Free lists and counts agree with everything that is held."""
    engine._pools.check(holdings(engine, *more))


def finish(engine: Engine, *more) -> None:
    """Steps until nothing is left, checking what is held after each."""
    while not engine.idle:
        assert engine.step()
        check(engine, *more)


def traces() -> list[int]:
    return [step._cache_size() for step in STEPS]


def embeddings(rows, index, prompt_tokens: int = 3) -> Embeddings:
    """Rows at places of a prompt of text."""
    return Embeddings.at(rows, index, prompt_tokens)


def poison_free(engine: Engine, value: float) -> None:
    """Overwrites every slot and page that nobody holds."""
    pools, state = engine._pools, jax.tree.map(np.array, engine._lanes.state)
    slots = np.array(pools._free_slots, int)
    for leaf in (
        *jax.tree.leaves((state.target.gdn, state.context.rings)), state.target.continuation
    ):
        leaf[slots] = value
    for layers, pool in ((state.target.kv, pools.target), (state.context.pages, pools.draft)):
        for leaf in jax.tree.leaves(layers):
            leaf[:, np.array(pool._free, int)] = value
    engine._lanes._state = jax.tree.map(jnp.array, state)
