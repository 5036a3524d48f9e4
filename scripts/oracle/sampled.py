"""Checks of processed distributions and of one sampled verification in closed form.

golden/dist_NAME.npz and golden/verify_TARGET__DRAFT.npz: the library's logits and laws must give
the kit's exact probabilities, column by column, with the accepted history in the penalties.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.sampling.distribution import adjusted_logits, target_distribution
from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.state.scratch import Proposal, RoundExtent
from dflash_jax.steps import Models, Params, verify
from dflash_jax.steps.models import draft_call, target_call

from .compare import Checks, Exact, Floats, Input
from .drafts import block_after, context_after
from .kit import Golden, KitError
from .lane import models_for, prefilled
from .loaded import LoadedKit
from .selector import forced_law

_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition": "repetition_penalty",
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
}


def check_dist(golden: Golden, kit: LoadedKit) -> Checks:
    """Exact laws of the first three tokens after a prompt, under several settings."""
    config, weights = kit.target(golden.target)
    prompt, public = golden["prompt"], golden.scalar("public_vocab")
    models = models_for(config, None, draft_tokens=0, positions=len(prompt) + 3)
    params = Params(target=weights, draft={})
    state = prefilled(models, params, prompt)
    first = np.asarray(target_call(models, params, "logits", state.target.continuation[:1]))
    checks: Checks = {
        "prompt": [Input()], "public_vocab": [Input()], "logits1": [Floats(first[0])]
    }
    following = functools.cache(functools.partial(_following, models, params, state))
    for name, settings in _settings(golden, kit).items():
        rows = public if settings.get("public") else config.vocab_rows
        column = functools.partial(_law, _params(settings), rows, prompt)
        laws = _three_tokens(column, first, following, config.vocab_rows)
        checks |= {f"{name}_{part}": [Floats(value)] for part, value in laws.items()}
    return checks


def _three_tokens(column, first, following, size: int) -> dict[str, np.ndarray]:
    """p1, p2 and the joint laws [V] and [V, V] from (logits, tokens) -> law of the last column."""
    p1 = _padded(column(first, ()), size)
    p2, joint23 = np.zeros((size, size)), np.zeros((size, size))
    for x1 in np.flatnonzero(p1).tolist():
        p2[x1] = _padded(column(following((x1,)), (x1,)), size)
        for x2 in np.flatnonzero(p2[x1]).tolist():
            third = _padded(column(following((x1, x2)), (x1, x2)), size)
            joint23[x2] += p1[x1] * p2[x1, x2] * third
    joint12 = p1[:, None] * p2
    return {
        "p1": p1, "p2": p2, "joint12": joint12, "marginal2": joint12.sum(0),
        "joint23": joint23, "marginal3": joint23.sum(0),
    }


def _law(request: SamplingParams, public: int, prompt, logits, tokens: Sequence[int]):
    """Law of the last column: tokens[0] is the anchor and counted, the others are proposals."""
    counts = np.bincount(np.array(tokens[:1], np.int64), minlength=public).astype(np.int32)
    seen = np.isin(np.arange(public), prompt)
    drafts = np.array([tokens[1:]], np.int32).reshape(1, -1)
    p = _processed(SamplingArrays.of([request], public), logits[None], counts[None], seen[None],
                   drafts)
    return np.asarray(p)[0, -1]


@jax.jit
def _processed(sampling, logits, counts, seen, drafts):
    law = target_distribution(adjusted_logits(logits, sampling, counts, seen, drafts), sampling)
    return law.weights / law.total[..., None]


def _following(models: Models, params: Params, state: DecodeState, tokens: tuple[int, ...]):
    """Logits [len, V] behind tokens that follow the committed ones."""
    row = np.array([tokens], np.int32)
    return np.asarray(_verified(models, params, state, row))[0]


@functools.partial(jax.jit, static_argnums=0)
def _verified(models: Models, params: Params, state: DecodeState, tokens):
    """Logits [1, W, V] of a chain of tokens [1, W], the anchor first."""
    width = tokens.shape[1]
    depth = jnp.arange(width, dtype=jnp.int32)[None]
    proposal = Proposal(
        tokens=tokens, parent=jnp.maximum(depth - 1, 0), depth=depth,
        candidates=tokens[:, 1:, None], q=jnp.ones((1, width - 1, 1), jnp.float32),
    )
    count = jnp.full((1,), width, jnp.int32)
    extent = RoundExtent(proposals=count - 1, columns=count, draft_columns=count)
    return verify(models, params, state, Rows.of([0]), proposal, extent).logits


def check_verify(golden: Golden, kit: LoadedKit) -> Checks:
    """One verification of a given path: laws, accept probabilities and residuals."""
    config, weights = kit.target(golden.target)
    draft, draft_params = kit.draft(golden.draft, golden.target)
    prompt, ranks, anchor = golden["prompt"], golden["ranks"], golden.scalar("anchor")
    count = len(ranks)
    models = models_for(config, draft, draft_tokens=count, positions=len(prompt) + count + 1)
    params = Params(target=weights, draft=draft_params)
    pair = context_after(models, params, prompt)
    token = jnp.full((1,), anchor, jnp.int32)
    hidden = block_after(pair, token, count + 1).output.hidden
    head = target_call(models, params, "head_matrix")
    best = draft_call(models, params, "topk", hidden, head, models.target.public_vocab)
    edges = draft_call(models, params, "edges", hidden, best, token)
    candidates = np.asarray(best.ids[0])
    path = candidates[np.arange(count), ranks]
    request = _params(_plain(kit))
    q = forced_law(edges, best.ids, ranks, request.temperature)
    told = (anchor, *path.tolist())
    logits = _following(models, params, pair.state, told)
    p = np.stack(
        [_law(request, config.vocab_rows, prompt, logits[: j + 1], told[: j + 1])
         for j in range(count + 1)]
    )
    checks: Checks = {name: [Input()] for name in ("prompt", "anchor", "ranks")} | {
        "candidates": [Exact(candidates)], "path": [Exact(path)], "q": [Floats(q)],
        "target_logits": [Floats(logits)], "p": [Floats(_padded(p, config.vocab_rows))],
    }
    return checks | _closed_form(p, candidates, q, path, ranks)


def _closed_form(p, candidates, q, path, ranks) -> Checks:
    """What acceptance does on average, for the walk's q and for a point mass on the path."""
    p, index = p.astype(np.float64), np.arange(len(ranks))
    accept = np.minimum(1.0, p[index, path] / q[index, ranks])
    reached = np.concatenate([[1.0], np.cumprod(accept)])
    spread, point = np.zeros((2, len(ranks), p.shape[1]))
    np.put_along_axis(spread, candidates, q, axis=1)
    point[index, path] = 1.0
    return {
        "accept": [Floats(accept)],
        "residual": [Floats(_residual(p, spread))],
        "accepted_length": [Floats(reached * np.append(1.0 - accept, 1.0))],
        "onehot_accept": [Floats(p[index, path])],
        "onehot_residual": [Floats(_residual(p, point))],
    }


def _residual(p, q):
    left = np.maximum(p[:-1] - q, 0.0)
    return left / left.sum(-1, keepdims=True)


def _padded(p, size: int) -> np.ndarray:
    padding = [(0, 0)] * (p.ndim - 1) + [(0, size - p.shape[-1])]
    return np.pad(p.astype(np.float64), padding)


def _settings(golden: Golden, kit: LoadedKit) -> dict[str, dict]:
    settings = kit.sampling_settings().get(golden.stem)
    if not settings:
        raise KitError(f"manifest.json: expected settings of {golden.stem}, got none")
    return settings


def _plain(kit: LoadedKit) -> dict:
    """The setting named plain, which every verify golden uses."""
    found = [named["plain"] for named in kit.sampling_settings().values() if "plain" in named]
    if not found:
        raise KitError("manifest.json: expected a setting plain of a dist golden, got none")
    return found[0]


def _params(settings: dict) -> SamplingParams:
    unknown = settings.keys() - _FIELDS.keys() - {"public"}
    if unknown:
        raise KitError(f"manifest.json: expected settings {sorted(_FIELDS)}, got {sorted(unknown)}")
    return SamplingParams(
        **{field: settings[name] for name, field in _FIELDS.items() if name in settings}
    )
