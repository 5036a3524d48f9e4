"""Loads the models of a kit through the library's loaders, each once."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig, DtypePolicy, LayerKind, TargetConfig
from dflash_jax.steps import Models, Params
from dflash_jax.steps.models import target_call
from dflash_jax.weights import indexed_head, load_draft, load_target, read_target_config

from .kit import KitError


class LoadedKit:
    """The checkpoints of a kit, widened to float32.

    The kit masks no vocabulary row, so V_pub = V. Its drafts are not causal whatever their files
    say, so they are loaded with that override.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.target = functools.cache(self._target)
        self.draft = functools.cache(self._draft)

    def _target(self, name: str) -> tuple[TargetConfig, dict]:
        folder = self._existing("targets", name)
        rows = read_target_config(folder).vocab_rows
        return load_target(folder, DtypePolicy.exact(), public_vocab=rows)

    def _draft(self, name: str, target: str) -> tuple[DraftConfig, dict]:
        folder = self._existing("drafts", name)
        return load_draft(folder, self.target(target)[0], DtypePolicy.exact(), causal=False)

    def causal_draft(self, name: str, target: str) -> tuple[DraftConfig, dict]:
        """The draft with causal local layers: as its file resolves when it says nothing about
        causality, else by override."""
        folder = self._existing("drafts", name)
        config, policy = self.draft(name, target)[0], DtypePolicy.exact()
        local = tuple(kind is LayerKind.SLIDING for kind in config.layer_types)
        override = local if _states_causality(folder) else None
        loaded, params = load_draft(folder, self.target(target)[0], policy, causal=override)
        if loaded.causal != local:
            raise KitError(f"{name}: expected causal {local} by the file, got {loaded.causal}")
        return loaded, params

    def sampling_settings(self) -> dict[str, dict[str, dict]]:
        """Settings by name of every golden that the manifest notes settings for."""
        path = self._folder / "manifest.json"
        notes = json.loads(path.read_text("utf-8")).get("notes", {}) if path.is_file() else {}
        return {
            stem: {name: note["settings"] for name, note in noted.items()}
            for stem, noted in notes.items()
            if stem.startswith("dist_")
        }

    def _existing(self, kind: str, name: str) -> Path:
        folder = self._folder / kind / name
        if not folder.is_dir():
            raise KitError(f"kit: expected a folder {folder}, got none")
        return folder


def _states_causality(folder: Path) -> bool:
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    nested = raw.get("dflash_config", {})
    return any(value is not None for value in (raw.get("is_causal"), nested.get("causal")))


def with_shortlist(models: Models, params: Params, ids: np.ndarray) -> tuple[Models, Params]:
    """The pair with a proposal head of these rows of the target's head."""
    if models.draft.head_rows:
        raise KitError("draft: expected no head of its own beside a shortlist")
    rows = target_call(models, params, "head_matrix")[jnp.asarray(ids)]
    draft, draft_params = indexed_head(models.target, models.draft, params.draft, rows, ids)
    return dataclasses.replace(models, draft=draft), params.replace(draft=draft_params)
