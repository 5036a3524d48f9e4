"""The recipe of the shipped pair: from a corpus to three Hugging Face folders.

Every stage has a budget in steps or in seconds, and what is finished is written before the next
stage starts.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.steps import Params
from dflash_jax.training.ahead import CompileAhead
from dflash_jax.training.capture import capture
from dflash_jax.training.continuations import continuations
from dflash_jax.training.corpus import prompts_by_file, random_windows, write_tokenizer
from dflash_jax.training.figures import (
    PROMPTS,
    DraftFigures,
    device,
    measure_draft,
    write_report,
)
from dflash_jax.training.fit import FitResult
from dflash_jax.training.parameters import count, draft_params, target_params
from dflash_jax.training.prepared import Prepared
from dflash_jax.training.progress import Progress, Stopwatch
from dflash_jax.training.recipe import (
    DRAFTS,
    SERVING,
    Recipe,
    pair_draft,
)
from dflash_jax.training.results import replacing, write_text
from dflash_jax.training.stages import draft_data, fit_draft, fit_target
from dflash_jax.weights.export import save_draft, save_target

HELD_OUT_SEED = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOutcome:
    """What one draft became: parameters in numbers, its fit, and its figures on held-out text."""

    parameters: int
    steps: int
    seconds: float
    figures: DraftFigures


def make_pair(
    recipe: Recipe, target: TargetConfig, prepared: Prepared, out: Path, *, command: str
) -> dict[str, DraftOutcome]:
    """Runs the recipe; writes OUT/target, OUT/dflash, OUT/dflash2, report.json, MODEL_CARD.md.

    OUT/held_out_prompts.json holds the ids of the validation's prompts, so that the figures can be
    repeated where Python carries other files.
    """
    say = Progress("pair").say
    drafts = {name: pair_draft(target, kind) for name, kind in DRAFTS.items()}
    report: dict = {
        "command": command, "device": device(), "measured": device(),
        "corpus": prepared.facts, "recipe": _plain(recipe), "seconds": {},
    }
    ahead = CompileAhead(recipe, target, drafts)
    clock = Stopwatch(report["seconds"], out, report, say)

    with clock("target"):
        fitted = fit_target(recipe.target_objective(target), prepared.train, recipe.target,
                            folder=out / "resume" / "target")
        write_target(out / "target", target, fitted, prepared)
    report["target"] = {"parameters": count(fitted.params), "steps": fitted.steps,
                        "loss": _losses(fitted)}
    serving = target_params(target, fitted.params, SERVING)
    with clock("continuations"):
        sequences = own_text(recipe, target, serving, prepared)
        report["continuations"] = {"sequences": len(sequences), "tokens": int(sequences.size)}
    with clock("features"):
        layer_ids = drafts["dflash"].target_layer_ids
        features = capture(target, recipe.dtypes, layer_ids,
                           target_params(target, fitted.params, recipe.dtypes), sequences,
                           batch=recipe.capture_batch)
        data = draft_data(target, target_params(target, fitted.params, recipe.dtypes), sequences,
                          jax.block_until_ready(features))
    masters = {}
    for name, config in drafts.items():
        with clock(name):
            masters[name] = fit_draft(recipe.draft_objective(target, config), data, recipe.draft,
                                      folder=out / "resume" / name, name=name)
            write_draft(out / name, target, config, masters[name])
    del data, features
    outcomes = {}
    for name, config in drafts.items():
        with clock(f"validate {name}"):
            outcomes[name] = _validate(
                recipe, target, config, serving, masters[name], prepared, out
            )
        report[name] = _entry(outcomes[name], masters[name])
    write_report(out, report)
    ahead.close(say)
    return outcomes


def own_text(recipe: Recipe, target: TargetConfig, params, prepared: Prepared) -> np.ndarray:
    """[N, prompt + new_tokens] int32: training prompts and what the target writes behind them."""
    models = recipe.writer(target)
    prompts = random_windows(
        prepared.train, recipe.sequences * len(recipe.temperatures), recipe.prompt, recipe.seed + 1
    )
    parts = [
        continuations(models, params, part, temperature=heat, seed=recipe.seed + i)
        for i, (part, heat) in enumerate(
            zip(np.split(prompts, len(recipe.temperatures)), recipe.temperatures, strict=True)
        )
    ]
    return np.concatenate(parts)


def write_target(folder: Path, config: TargetConfig, fitted: FitResult, prepared: Prepared) -> None:
    """A Hugging Face folder in bfloat16, tokenizer included."""
    with replacing(folder, need_bytes=2 * count(fitted.params)) as partial:
        save_target(partial, config, _host(target_params(config, fitted.params, SERVING)))
        write_tokenizer(partial, prepared.tokenizer)


def write_draft(
    folder: Path, target: TargetConfig, config: DraftConfig, fitted: FitResult
) -> None:
    """A Hugging Face folder in bfloat16."""
    with replacing(folder, need_bytes=2 * count(fitted.params)) as partial:
        params = _host(draft_params(config, fitted.params, SERVING))
        save_draft(partial, config, params, target_layers=target.num_layers)


def held_out_prompts(recipe: Recipe, prepared: Prepared) -> list[list[int]]:
    """The validation's prompts: starts at random places of every held-out file in turn.

    They belong to the data, not to the training: pairs of other seeds are judged by the same ones.
    """
    return prompts_by_file(
        prepared.held_out, recipe.held_out_prompts, recipe.prompt, HELD_OUT_SEED
    )


def _validate(
    recipe: Recipe, target: TargetConfig, config: DraftConfig, serving, fitted: FitResult,
    prepared: Prepared, out: Path,
) -> DraftOutcome:
    params = Params(target=serving, draft=draft_params(config, fitted.params, SERVING))
    prompts = held_out_prompts(recipe, prepared)
    write_text(out / PROMPTS, json.dumps(prompts) + "\n")
    return DraftOutcome(
        parameters=count(fitted.params), steps=fitted.steps, seconds=fitted.seconds,
        figures=measure_draft(target, config, params, prompts, recipe.held_out_tokens),
    )


def _entry(outcome: DraftOutcome, fitted: FitResult) -> dict:
    """A draft's part of the report."""
    return {
        "parameters": outcome.parameters, "steps": outcome.steps, "seconds": outcome.seconds,
        "training_run": dataclasses.asdict(outcome.figures.acceptance.tokens_per_round),
        **dataclasses.asdict(outcome.figures), "losses": _losses(fitted),
    }


def _losses(fitted: FitResult) -> list[list[float]]:
    """About twenty (step, loss) of a fit."""
    every = max(1, len(fitted.history) // 20)
    kept = [*fitted.history[::every], *fitted.history[-1:]]
    return [[step, round(float(metrics["loss"]), 4)] for step, metrics in kept]


def _host(tree):
    return jax.tree.map(np.asarray, tree)


def _plain(recipe: Recipe) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(recipe)))
