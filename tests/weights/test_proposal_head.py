"""Indexed proposal heads: which ids, what is refused, and the text of the full head."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import Models, Params, RunConfig, cli, generate
from dflash_jax.config import DtypePolicy
from dflash_jax.weights import WeightsError, load_draft, load_target
from dflash_jax.weights.conversion import convert, plan_target
from dflash_jax.weights.proposal_head import (
    FILE,
    choose_ids,
    coverage_of,
    head_rows,
    read_proposal_head,
    save_proposal_head,
    use_proposal_head,
)
from scripts.make_proposal_head import main

SHIPPED = Path(__file__).parents[2] / "dflash_jax" / "assets"
EXACT = DtypePolicy.exact()
COUNTS = np.array([5, 0, 9, 9, 1, 0, 0, 76])


# Which ids


def test_rows_are_the_most_frequent_ids_with_those_that_are_always_in():
    np.testing.assert_array_equal(choose_ids(COUNTS, rows=3), [2, 3, 7])
    np.testing.assert_array_equal(choose_ids(COUNTS, rows=3, always=[6, 1]), [1, 6, 7])
    # Ties and ids that never occur go by id.
    np.testing.assert_array_equal(choose_ids(COUNTS, rows=2), [2, 7])
    np.testing.assert_array_equal(choose_ids(COUNTS, rows=6), [0, 1, 2, 3, 4, 7])


@pytest.mark.parametrize(
    ("share", "ids"),
    [(0.5, [7]), (0.76, [7]), (0.77, [2, 7]), (0.94, [2, 3, 7]), (1, [0, 2, 3, 4, 7])],
)
def test_coverage_takes_no_more_ids_than_it_needs(share, ids):
    chosen = choose_ids(COUNTS, coverage=share)
    np.testing.assert_array_equal(chosen, ids)
    tokens = np.repeat(np.arange(8), COUNTS)
    assert coverage_of(chosen, tokens) >= share
    assert coverage_of(chosen[chosen != 2], tokens) < share or 2 not in ids


def test_ids_that_are_always_in_count_towards_the_coverage():
    np.testing.assert_array_equal(choose_ids(COUNTS, coverage=0.8, always=[0, 1]), [0, 1, 7])


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({}, "rows"),
        ({"rows": 2, "coverage": 0.5}, "rows"),
        ({"rows": 0}, "rows"),
        ({"rows": 9}, "rows"),
        ({"rows": 1, "always": [1, 2]}, "rows"),
        ({"coverage": 0.0}, "coverage"),
        ({"coverage": 1.1}, "coverage"),
        ({"rows": 2, "always": [8]}, "always"),
        ({"rows": 2, "always": [-1]}, "always"),
    ],
)
def test_a_wrong_choice_names_its_field(how, field):
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        choose_ids(COUNTS, **how)


# Files


@pytest.fixture(scope="module")
def target():
    return load_target(SHIPPED / "target", EXACT)


def test_rows_of_files_and_of_converted_weights_are_those_of_the_head(tmp_path, target):
    config, params = target
    ids = np.array([3, 500, 1015], np.int32)
    convert(plan_target(SHIPPED / "target", tmp_path / "orbax", "bfloat16"))
    for folder in (SHIPPED / "target", tmp_path / "orbax"):
        rows = head_rows(folder, config, ids)
        assert rows.dtype == "bfloat16"  # as stored
        np.testing.assert_array_equal(rows.astype(np.float32), params["embedding"][ids])


def folder_with(tmp_path, config, ids, rows=None):
    shutil.copytree(SHIPPED / "dflash2", tmp_path / "draft")
    ids = np.asarray(ids, np.int32)
    rows = head_rows(SHIPPED / "target", config, ids) if rows is None else rows
    save_file({"weight": rows, "token_ids": ids}, tmp_path / "draft" / FILE)
    return tmp_path / "draft"


@pytest.mark.parametrize(
    ("ids", "fault"),
    [
        ([4, 4, 5], "expected distinct token ids"),
        ([4, 6, 5], "expected ascending token ids"),
        ([4, 5, 1016], r"expected token ids in \[0, 1016\), got 4..1016"),
        ([-1, 5, 6], "expected token ids in"),
        ([], "expected a non-empty list"),
    ],
)
def test_ids_that_are_doubled_unsorted_or_not_public_are_refused(tmp_path, target, ids, fault):
    config, _ = target
    rows = np.zeros((len(ids), config.hidden), np.float32)
    with pytest.raises(WeightsError, match=f"token_ids: {fault}"):
        read_proposal_head(folder_with(tmp_path, config, ids, rows), config)
    with pytest.raises(ValueError, match=f"token_ids: {fault}"):
        save_proposal_head(tmp_path, rows, np.asarray(ids, np.int32), config)


def test_damaged_files_and_rows_of_another_head_are_refused(tmp_path, target):
    config, params = target
    folder = folder_with(tmp_path, config, range(40))
    draft, draft_params = load_draft(folder, config, EXACT)

    def use():
        return use_proposal_head(folder, config, params, draft, draft_params, EXACT)

    assert use()[0].head_rows == 40 and "head" not in draft_params
    tensors = load_file(folder / FILE)
    for change, fault in (
        ({"weight": tensors["weight"][:, 1:].copy()}, "weight: expected .* of shape"),
        ({"token_ids": tensors["token_ids"].astype(np.int64)}, "token_ids: expected I32"),
        ({"extra": tensors["token_ids"]}, "expected tensors .'token_ids', 'weight'"),
        ({"weight": tensors["weight"][::-1].copy()}, "weight: expected rows of the target's head"),
    ):
        save_file(tensors | change, folder / FILE)
        with pytest.raises(WeightsError, match=fault):
            use()
    save_file(tensors, folder / FILE)
    with open(folder / FILE, "r+b") as stream:
        stream.truncate(stream.seek(0, 2) - 1)
    with pytest.raises(WeightsError, match="truncated"):
        use()
    (folder / FILE).unlink()
    with pytest.raises(WeightsError, match="expected a proposal head .*got no file"):
        use()


# The text


@pytest.mark.parametrize("name", [pytest.param("dflash", marks=pytest.mark.slow), "dflash2"])
def test_greedy_text_with_an_indexed_head_is_that_of_the_full_one(tmp_path, target, name):
    """64 of 1016 ids: proposals change, and with them the rounds, but no token of the text."""
    config, params = target
    shutil.copytree(SHIPPED / name, tmp_path / "draft")
    command = ["--target", SHIPPED / "target", "--draft", tmp_path / "draft", "--rows", 64]
    command += ["--ids", SHIPPED / "held_out_prompts.json"]
    assert main([str(word) for word in command]) == 0
    draft, draft_params = load_draft(tmp_path / "draft", config, EXACT)
    indexed = use_proposal_head(tmp_path / "draft", config, params, draft, draft_params, EXACT)
    assert indexed[0].head_rows == 64
    run = RunConfig(draft_tokens=3, batch=2, max_context=128, chunk=32, dtypes=EXACT)
    outputs = [
        generate(
            Models(target=config, draft=geometry, run=run),
            Params(target=params, draft=tree),
            [[693, 8, 261, 273, 13, 693], [351, 445, 279]],
            max_new_tokens=32,
        )
        for geometry, tree in ((draft, draft_params), indexed)
    ]
    full, reduced = ([output.tokens for output in each] for each in outputs)
    assert full == reduced
    accepted = [sum(output.statistics.accepted for output in each) for each in outputs]
    assert accepted[1] > 0


def test_the_script_reports_coverage_and_always_keeps_special_and_stop_ids(tmp_path, capsys):
    shutil.copytree(SHIPPED / "dflash2", tmp_path / "draft")
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat. " * 50)
    common = ["--target", str(SHIPPED / "target"), "--draft", str(tmp_path / "draft")]
    text = ["--text", str(tmp_path / "corpus.txt")]
    assert main([*common, "--coverage", "0.9", *text]) == 0
    out = capsys.readouterr().out
    assert "special or stop ids" in out and "held-out ones" in out
    config, _ = load_target(SHIPPED / "target", EXACT)
    _, ids = read_proposal_head(tmp_path / "draft", config)
    assert special() and set(special()) <= set(ids.tolist())
    assert main([*common, "--rows", "5000", *text]) == 2
    assert "rows: expected" in capsys.readouterr().err
    (tmp_path / "bad").write_text("1 2 x")
    assert main([*common, "--rows", "64", "--ids", str(tmp_path / "bad")]) == 2
    assert "expected token ids" in capsys.readouterr().err


def special():
    content = json.loads((SHIPPED / "target" / "tokenizer.json").read_text())
    return [entry["id"] for entry in content["added_tokens"] if entry["special"]]


def test_the_command_line_asks_for_the_file_before_it_reads_weights(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "load_target", None)
    (tmp_path / "ids").write_text("1 2 3")
    command = ["generate", "--target", str(SHIPPED / "target"), "--max-new-tokens", "4"]
    command += ["--prompt-ids", str(tmp_path / "ids"), "--proposal-head", "indexed"]
    assert cli.main(command) == 2
    assert "--proposal-head: expected only with --draft" in capsys.readouterr().err
    assert cli.main([*command, "--draft", str(SHIPPED / "dflash2")]) == 2
    assert "expected a proposal head" in capsys.readouterr().err
