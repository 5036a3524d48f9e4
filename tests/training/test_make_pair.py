"""The recipe's script from end to end; fitting and measuring, which have tests, are stand-ins."""

import dataclasses
import json
import shlex
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.assets import tiny_pair_path
from dflash_jax.training import figures, tiny_pair
from dflash_jax.training.agreement import Agreement
from dflash_jax.training.card import CARD
from dflash_jax.training.figures import PROMPTS, DraftFigures, read_prompts
from dflash_jax.training.fit import FitResult
from dflash_jax.training.intervals import Interval
from dflash_jax.training.parameters import start_draft, start_target
from dflash_jax.training.progress import REPORT
from dflash_jax.training.recipe import DRAFT_TOKENS
from dflash_jax.training.validate import Acceptance, Recall
from dflash_jax.weights import load_draft, load_target
from scripts import make_tiny_pair
from tests.training import scenes


def figures_of(value: float) -> DraftFigures:
    """Figures that all have one value."""
    one = Interval(value=value, low=value - 1, high=value + 1)
    acceptance = Acceptance(prompts=4, new_tokens=16, rounds=9, tokens_per_round=one,
                            conditional=[one] * DRAFT_TOKENS)
    return DraftFigures(
        acceptance=acceptance, sampled=acceptance,
        agreement=Agreement(judged=5, accepted=one, expected=one, excess=one),
        recall=Recall(at_1=[value] * DRAFT_TOKENS, at_16=[value] * DRAFT_TOKENS),
    )


def fitted(params) -> FitResult:
    return FitResult(params=params, steps=3, history=[(3, {"loss": 1.5})], seconds=2.0)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Runs the script with these options; its folder."""
    text, out = tmp_path / "text", tmp_path / "out"
    text.mkdir()
    for index in range(60):
        (text / f"{index}.py").write_text(f"def f{index}(x):\n    return x + {index}\n" * 9)
    stand_ins = {
        "fit_target": lambda objective, *rest, **names: fitted(start_target(objective.config, 0)),
        "fit_draft": lambda objective, *rest, **names: fitted(start_draft(objective.draft, 0)),
        "own_text": lambda recipe, *rest: np.zeros((2, recipe.prompt + 8), np.int32),
        "capture": lambda target, dtypes, ids, *rest, **names: jnp.zeros((2, 24, 64 * len(ids))),
        "measure_draft": lambda *rest: figures_of(2.5),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(tiny_pair, name, stand_in)

    def run(*options):
        arguments = [*map(str, options)] or ["--out", str(out), "--smoke", "--text", str(text)]
        monkeypatch.setattr(sys, "argv", ["scripts/make_tiny_pair.py", *arguments])
        return make_tiny_pair.main()

    assert run() == 0
    return out, run


def test_folders_report_and_card_are_written(made):
    out, _ = made
    target, _ = load_target(out / "target", scenes.EXACT)
    for name in ("dflash", "dflash2"):
        load_draft(out / name, target, scenes.EXACT)
        raw = json.loads((out / name / "config.json").read_text("utf-8"))
        assert raw["num_target_layers"] == target.num_layers
    assert [len(prompt) for prompt in read_prompts(out / PROMPTS)] == [16] * 4
    card = (out / CARD).read_text("utf-8")
    assert "python scripts/make_tiny_pair.py --out" in card
    assert "| **2.500 [1.500, 3.500]** |" in card


def test_the_shipped_command_has_the_shipped_recipe(monkeypatch):
    report = json.loads(tiny_pair_path(REPORT).read_text("utf-8"))
    monkeypatch.setattr(sys, "argv", shlex.split(report["command"])[1:])
    recipe = make_tiny_pair.recipe_of(make_tiny_pair.parser().parse_args())
    assert json.loads(json.dumps(dataclasses.asdict(recipe))) == report["recipe"]


def test_another_seed_is_judged_by_the_same_held_out_prompts(made, tmp_path):
    out, run = made
    other = tmp_path / "other"
    assert run("--out", other, "--smoke", "--text", tmp_path / "text", "--seed", 1) == 0
    assert (other / PROMPTS).read_bytes() == (out / PROMPTS).read_bytes()


def test_measuring_again_replaces_figures_and_keeps_the_facts_of_the_training(
    made, capsys, monkeypatch
):
    out, run = made
    before = json.loads((out / REPORT).read_text("utf-8"))
    monkeypatch.setattr(figures, "measure_draft", lambda *rest: figures_of(3.5))
    assert run("--measure", out) == 0
    after = json.loads((out / REPORT).read_text("utf-8"))
    assert after["dflash"]["sampled"]["tokens_per_round"]["value"] == 3.5
    assert after["dflash"]["training_run"]["value"] == 2.5
    kept = ("command", "device", "corpus", "recipe", "seconds", "target", "continuations")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert "3.500 [2.500, 4.500]" in (out / CARD).read_text("utf-8")
    capsys.readouterr()
    (out / PROMPTS).write_text("[[1, 2], [3]]", "utf-8")
    assert run("--measure", out) == 2
    assert "expected prompts of one length, got [1, 2]" in capsys.readouterr().err
    (out / REPORT).unlink()
    assert run("--measure", out) == 2
    assert "report.json: expected a file" in capsys.readouterr().err
