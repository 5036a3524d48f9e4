"""Runs of the same recipe with other seeds, in the report and the card of a finished pair."""

from collections.abc import Sequence
from pathlib import Path

from dflash_jax.config.folder import read_json
from dflash_jax.training.card import model_card
from dflash_jax.training.figures import write_report
from dflash_jax.training.progress import REPORT
from dflash_jax.training.recipe import DRAFTS

SEEDED = ("target", "draft")


def add_retrained(folder: Path, reports: Sequence[Path], remark: str | None = None) -> None:
    """Adds runs to FOLDER/report.json's "retrained", by seed, and writes the card anew.

    Args:
      reports: report.json of each run, made by the same recipe with another seed.
      remark: printed under the table of the runs instead of what was there; "" takes that away.
    Raises: ValueError naming the report that is missing, unfinished, of another recipe, or of a
      seed that is there already; nothing is written then.
    """
    shipped = read_json(folder / REPORT)
    own, expected = _read_run(folder / REPORT, shipped)
    runs = list(shipped.get("retrained", ()))
    for file in reports:
        run, facts = _read_run(file, read_json(file))
        for name in sorted(facts.keys() | expected.keys()):
            if facts.get(name) != expected.get(name):
                raise ValueError(f"{file}: {name}: expected {expected.get(name)} as in the pair's "
                                 f"own report, got {facts.get(name)}")
        taken = sorted({own["seed"], *(one["seed"] for one in runs)})
        if run["seed"] in taken:
            raise ValueError(f"{file}: expected a seed not in {taken}, got {run['seed']}")
        runs.append(run)
    if remark and not runs:
        raise ValueError("remark: expected a report with retrained runs, got none")
    if runs:
        shipped["retrained"] = sorted(runs, key=lambda run: run["seed"])
    if remark is not None:
        shipped["remark"] = remark
    write_report(folder, shipped)


def _read_run(file: Path, report: dict) -> tuple[dict, dict]:
    """What the card says of a run, and what has to be equal in all of them."""
    try:
        model_card(report)  # has every field of a finished report in it
        return _run(report), _facts(report)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file}: expected the report of a finished run, got one that lacks something: "
            f"{error!r}"
        ) from error


def _run(report: dict) -> dict:
    """Seed, command without its folders, devices, steps and figures."""
    recipe = report["recipe"]
    budgets = " ".join(f"--{name}-{_budget(recipe[name])}" for name in SEEDED)
    return {
        "seed": recipe["seed"], "command": f"{budgets} --seed {recipe['seed']}",
        "device": report["device"], "measured": report["measured"],
        "steps": {name: report[name]["steps"] for name in ("target", *DRAFTS)},
        **{
            name: {
                "training_run": _interval(report[name]["training_run"]),
                "sampled": _interval(report[name]["sampled"]["tokens_per_round"]),
            }
            for name in DRAFTS
        },
    }


def _facts(report: dict) -> dict:
    """Corpus, recipe and sizes, without the seeds."""
    recipe = report["recipe"]
    facts = {"corpus": report["corpus"]}
    facts |= {f"recipe: {name}": recipe[name] for name in recipe if name != "seed"}
    for name in SEEDED:
        fit = {key: value for key, value in recipe[name].items() if key != "seed"}
        facts[f"recipe: {name}"] = fit
    for name in ("target", *DRAFTS):
        facts[f"{name}: parameters"] = report[name]["parameters"]
    return facts


def _interval(found: dict) -> dict:
    return {name: found[name] for name in ("value", "low", "high")}


def _budget(fit: dict) -> str:
    return f"steps {fit['steps']}" if fit["seconds"] is None else f"seconds {fit['seconds']:g}"
