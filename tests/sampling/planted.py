"""Bugs that a chi-square test has to notice; each takes pytest's monkeypatch and is undone by it.

Steps already traced keep the honest code, so a test plants before it traces anything.
"""

import importlib
import types

import jax.numpy as jnp

from dflash_jax.ops import candidate_selector
from dflash_jax.ops.candidate_selector import conditional_walk
from dflash_jax.sampling import distribution
from dflash_jax.sampling.uniform import Purpose
from tests.sampling import table_target

# The module, which the function of the same name hides.
_accept = importlib.import_module("dflash_jax.steps.accept")


def q_recomputed(monkeypatch):
    """q is a fresh softmax of the scores at three times the temperature drawn at."""

    def walk_with_another_q(edges, candidates, temperature, uniforms):
        walk = conditional_walk(edges, candidates, temperature, uniforms)
        before = jnp.pad(walk.ranks[:, :-1], ((0, 0), (1, 0)))
        scores = jnp.take_along_axis(edges, before[:, :, None, None], axis=2)[:, :, 0]
        hotter = 3.0 * temperature[:, None, None]
        weights = jnp.exp((scores - scores.max(-1, keepdims=True)) / hotter)
        return walk.replace(q=weights / weights.sum(-1, keepdims=True))

    for module in (table_target, candidate_selector):
        monkeypatch.setattr(module, "conditional_walk", walk_with_another_q)


def correction_from_p(monkeypatch):
    """The correction comes from p, q is not subtracted."""
    monkeypatch.setattr(_accept, "_residual", lambda p, proposal, accepted: p)


def residual_without_clamp(monkeypatch):
    """p - q, negative where the draft was too sure."""

    def unclamped(p, proposal, accepted):
        place = jnp.minimum(accepted, proposal.candidates.shape[1] - 1)[:, None, None]
        ids = jnp.take_along_axis(proposal.candidates, place, axis=1)[:, 0]
        q = jnp.take_along_axis(proposal.q, place, axis=1)[:, 0]
        return p.at[jnp.arange(len(ids))[:, None], ids].add(-q, mode="drop")

    monkeypatch.setattr(_accept, "_residual", unclamped)


def penalties_without_history(monkeypatch):
    """Every column sees the committed counts only."""
    monkeypatch.setattr(distribution, "_overlay", lambda plain, *unused: plain)


def accept_key_reused(monkeypatch):
    """The correction is drawn with the uniform that rejected."""
    purposes = {item.name: int(item) for item in Purpose} | {"CORRECTION": int(Purpose.ACCEPT)}
    monkeypatch.setattr(_accept, "Purpose", types.SimpleNamespace(**purposes))
