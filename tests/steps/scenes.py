"""Prompts already prefilled, and what the target alone says after them; shared by all step tests.

Every new shape of a step costs seconds of compilation: tests start from here where they can.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests import cases
from tests.steps.harness import Session
from tests.steps.poison import poison_with

HUGE = 1e30


def budget(lane: int) -> int:
    """Different for every lane, so that tails with P < K and P = 0 fall in different rounds."""
    return 24 + lane


@functools.cache
def plain_text(target: str) -> dict[int, list[int]]:
    """What the target alone says after every prompt, 48 tokens each."""
    models = cases.tiny_models(target, None, 0, 8)
    session = Session(models, cases.leaning_params(models))
    session.admit(dict(enumerate(cases.prompts(models))), 48)
    return session.run()


@functools.cache
def prefilled(target: str, draft: str, poisoned: bool):
    """State and lanes after every prompt, prefilled in chunks longer than the window."""
    models = cases.tiny_models(target, draft, max(cases.DRAFT_TOKENS), 8)
    session = Session(
        models, cases.leaning_params(models), poison_with(np.nan, HUGE) if poisoned else None
    )
    session.admit(dict(enumerate(cases.prompts(models))), budget)
    return cases.host(session.state), session.lanes


def resumed(target, draft, draft_tokens, batch, before=None, **run) -> Session:
    """A session that continues `prefilled` with its own K and B: only the pending width differs."""
    models = cases.tiny_models(target, draft, draft_tokens, batch, **run)
    session = Session(models, cases.leaning_params(models), before)
    state, lanes = prefilled(target, draft, before is not None)
    pending = state.pending.replace(features=state.pending.features[:, : draft_tokens + 1])
    session.state = jax.tree.map(jnp.array, state.replace(pending=pending))
    session.lanes = {
        lane: dataclasses.replace(known, ledger=list(known.ledger))
        for lane, known in lanes.items()
    }
    return session
