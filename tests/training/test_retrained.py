"""Runs with other seeds in the report and the card: what is shown, and what is refused."""

import copy
import json
import shutil
import statistics
import sys

import pytest

from dflash_jax.assets import tiny_pair_path
from dflash_jax.training import figures
from dflash_jax.training.card import CARD
from dflash_jax.training.progress import REPORT
from scripts import make_tiny_pair
from tests.training.test_make_pair import figures_of


def run_report(seed: int, value: float) -> dict:
    """The shipped report as that of another seed, its tokens per round moved by `value`."""
    report = json.loads(tiny_pair_path(REPORT).read_text("utf-8"))
    report = {name: part for name, part in report.items() if name not in ("retrained", "remark")}
    recipe = report["recipe"]
    recipe["seed"] = recipe["target"]["seed"] = seed
    recipe["draft"]["seed"] = seed + 1
    report["command"] = f"python scripts/make_tiny_pair.py --out /home/me/{seed}"
    for name in ("dflash", "dflash2"):
        for found in (report[name]["training_run"], report[name]["sampled"]["tokens_per_round"]):
            for key in found:
                found[key] += value
    return report


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Runs `--card` on a finished folder of seed 0; reports are written from dicts."""
    (tmp_path / REPORT).write_text(json.dumps(run_report(0, 0.0)), "utf-8")
    (tmp_path / CARD).write_text("old", "utf-8")

    def run(*reports, options=()):
        files = [tmp_path / f"run{index}.json" for index in range(len(reports))]
        for file, report in zip(files, reports, strict=True):
            file.write_text(json.dumps(report), "utf-8")
        given = ["--retrained", *files] if files else []
        arguments = ["make_tiny_pair", "--card", tmp_path, *given, *options]
        monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
        return make_tiny_pair.main()

    return run


def test_the_card_sets_other_seeds_against_the_pair(call, tmp_path):
    first = run_report(0, 0.0)["dflash"]["training_run"]
    above = 1.01 * (first["high"] - first["value"])
    assert call(run_report(5, above), run_report(3, -0.01), options=["--remark", "So be it."]) == 0
    card = (tmp_path / CARD).read_text("utf-8")
    rows = [line[2:].split(" | ") for line in card.split("| seed |")[1].splitlines()[2:6]]
    assert [row[0] for row in rows] == ["0, this pair", "3", "5", "mean, standard deviation"]
    assert [row[1].split("]")[1:] for row in rows[:3]] == [[""], [", inside"], [", outside"]]
    values = [first["value"], first["value"] - 0.01, first["value"] + above]
    assert rows[3][1] == f"{statistics.mean(values):.3f}, {statistics.stdev(values):.3f}"
    assert "`--target-seconds 100 --draft-seconds 55 --seed 3` on NVIDIA" in card
    assert "So be it." in card and "/home/me/3" not in card and "/home/me/5" not in card


def test_runs_are_added_and_outlive_a_new_measurement(call, tmp_path, monkeypatch):
    assert call(run_report(3, 0.1)) == 0
    assert call(run_report(2, 0.2)) == 0
    added = json.loads((tmp_path / REPORT).read_text("utf-8"))["retrained"]
    assert [run["seed"] for run in added] == [2, 3]
    monkeypatch.setattr(figures, "measure_draft", lambda *rest: figures_of(3.5))
    for name in ("target", "dflash", "dflash2"):
        (tmp_path / name).symlink_to(tiny_pair_path(name))
    shutil.copy(tiny_pair_path(figures.PROMPTS), tmp_path)
    figures.measure_folders(tmp_path)
    assert json.loads((tmp_path / REPORT).read_text("utf-8"))["retrained"] == added
    value = added[0]["dflash"]["training_run"]["value"]
    assert f"| 2 | {value:.3f} [" in (tmp_path / CARD).read_text("utf-8")


def changed(path: str, value) -> dict:
    """A run of seed 3 with one field set, or taken away."""
    report = copy.deepcopy(run_report(3, 0.0))
    *parents, last = path.split(".")
    part = report
    for name in parents:
        part = part[name]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return report


@pytest.mark.parametrize(("reports", "message"), [
    ([run_report(0, 0.0)], "run0.json: expected a seed not in [0], got 0"),
    ([run_report(3, 0.0)] * 2, "run1.json: expected a seed not in [0, 3], got 3"),
    ([changed("recipe.gamma", 2.0)], "recipe: gamma: expected 4.0 as in the pair's own report"),
    ([changed("recipe.draft.seconds", 50.0)], "run0.json: recipe: draft: expected {'steps'"),
    ([changed("corpus.python", "3.12.1")], "run0.json: corpus: expected"),
    ([changed("target.parameters", 7)], "run0.json: target: parameters: expected"),
    ([run_report(2, 0.0), changed("dflash2.sampled", None)], "run1.json: expected the report of a"),
    ([changed("dflash.training_run", 4.5)], "run0.json: expected the report of a finished run"),
    ([changed("recipe", [])], "run0.json: expected the report of a finished run"),
    ([[1]], "run0.json: expected an object, got list"),
])
def test_a_report_that_does_not_belong_is_refused_and_nothing_written(
    call, tmp_path, capsys, reports, message
):
    before = (tmp_path / REPORT).read_bytes()
    assert call(*reports) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / REPORT).read_bytes() == before and (tmp_path / CARD).read_text() == "old"


def test_options_without_their_subject_and_missing_files_are_named(
    call, capsys, monkeypatch, tmp_path
):
    for options, message in (
        (["--card", tmp_path, "--retrained", tmp_path / "no.json"], "no.json: expected a file in"),
        (["--card", tmp_path / "no"], "report.json: expected a file in"),
        (["--card", tmp_path, "--remark", "so"], "remark: expected a report with retrained runs"),
        (["--retrained", tmp_path / REPORT], "--retrained: expected --card with it"),
        (["--measure", tmp_path, "--remark", "so"], "--remark: expected --card with it"),
    ):
        monkeypatch.setattr(sys, "argv", ["make_tiny_pair", *map(str, options)])
        assert make_tiny_pair.main() == 2
        assert message in capsys.readouterr().err
