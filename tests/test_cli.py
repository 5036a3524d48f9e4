"""The command line: arguments, prompts, printing, and one-line errors with status 2."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from dflash_jax import cli
from dflash_jax.config import DraftKind, tiny_draft, tiny_target
from dflash_jax.engine.request import FinishReason, Output, Statistics
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.sampling.presets import PRESETS
from scripts import make_tiny_weights


@pytest.fixture
def prompt_file(tmp_path):
    file = tmp_path / "prompt.json"
    file.write_text("[1, 2, 3]", "utf-8")
    return file


@pytest.fixture
def calls(monkeypatch):
    """Replaces loading and generation; returns what they were called with."""
    seen = {}

    def read_target_config(folder, *, public_vocab):
        seen["public_vocab"] = public_vocab
        return tiny_target()

    def read_draft_config(folder, target, *, causal):
        seen["causal"] = causal
        return tiny_draft(DraftKind.DFLASH2, block_size=8)

    def load_target(folder, policy, *, public_vocab):
        return read_target_config(folder, public_vocab=public_vocab), {}

    def load_draft(folder, target, policy, *, causal):
        return read_draft_config(folder, target, causal=causal), {}

    def generate(
        models, params, prompts, *, max_new_tokens, eos_ids, sampling, tree_nodes, on_tokens
    ):
        seen["generate"] = (models, prompts, max_new_tokens, eos_ids)
        seen["tree_nodes"] = tree_nodes
        seen["sampling"] = sampling
        outputs = []
        if seen.get("fault"):
            statistics = Statistics()
            return [Output(tokens=(), finish_reason=FinishReason.FAULT, statistics=statistics)]
        for row in range(len(prompts)):
            statistics = Statistics(prompt_tokens=3, new_tokens=3, decode_seconds=0.5)
            statistics.count_round(2, 1)
            on_tokens(row, [7])
            on_tokens(row, [8, 9])
            outputs.append(
                Output(tokens=(7, 8, 9), finish_reason=FinishReason.EOS, statistics=statistics)
            )
        return outputs

    readers = (read_target_config, read_draft_config)
    for replacement in (*readers, load_target, load_draft, generate):
        monkeypatch.setattr(cli, replacement.__name__, replacement)
    return seen


def run(*options, target="target"):
    return cli.main(["generate", "--target", str(target), *map(str, options)])


def test_ids_stream_to_standard_output_and_the_rest_to_standard_error(calls, prompt_file, capsys):
    assert run("--draft", "draft", "--prompt-ids", prompt_file, "--max-new-tokens", 3) == 0
    out, err = capsys.readouterr()
    assert out == "7 8 9\n"
    assert "DFlash2DraftModel" in err and "bidirectional" in err
    assert "accepted: 1 of 2 proposals (50.0%); by position 1 0" in err
    assert "rounds: 1, and 0 without proposals; 2.000 tokens a round" in err
    assert "decode: 2 tokens in 0.500 s, 4.00 tokens/s" in err
    assert "finished: eos" in err


def test_quiet_prints_the_tokens_alone(calls, prompt_file, capsys):
    assert run("--prompt-ids", prompt_file, "--max-new-tokens", 3, "--quiet") == 0
    assert capsys.readouterr() == ("7 8 9\n", "")


def test_rows_of_a_batch_are_told_apart(calls, tmp_path, capsys):
    file = tmp_path / "batch.json"
    file.write_text("[[1, 2], [3]]", "utf-8")
    assert run("--prompt-ids", file, "--max-new-tokens", 3, "--quiet") == 0
    assert capsys.readouterr().out == "0: 7\n0: 8 9\n1: 7\n1: 8 9\n"
    models, prompts, _, _ = calls["generate"]
    assert (models.run.batch, prompts) == (2, [[1, 2], [3]])


def test_options_reach_the_run(calls, prompt_file):
    options = ("--draft", "draft", "--draft-tokens", 3, "--max-context", 96, "--causal", "false")
    more = ("--dtype", "float32", "--public-vocab", 240)
    assert run(*options, *more, "--prompt-ids", prompt_file, "--max-new-tokens", 5) == 0
    models, prompts, max_new_tokens, _ = calls["generate"]
    assert (models.run.draft_tokens, models.run.max_context) == (3, 96)
    assert models.run.dtypes.param == "float32"
    assert (prompts, max_new_tokens) == ([[1, 2, 3]], 5)
    assert calls["public_vocab"] == 240
    assert calls["causal"] is False


@pytest.mark.parametrize(
    ("given", "nodes"), [("12", (12,)), ("16,12,0", (16, 12, 0)), ("auto", "auto"), (None, None)]
)
def test_widths_of_trees_reach_the_run(calls, prompt_file, given, nodes):
    options = ("--draft", "draft", "--prompt-ids", prompt_file, "--max-new-tokens", 5)
    more = () if given is None else ("--draft-tree-nodes", given, "--draft-tree-paths", 4)
    assert run(*options, *more) == 0
    assert calls["tree_nodes"] == nodes
    assert calls["generate"][0].run.tree_paths == (8 if given is None else 4)


def test_defaults_of_a_run(calls, prompt_file):
    assert run("--draft", "draft", "--prompt-ids", prompt_file, "--max-new-tokens", 5) == 0
    models = calls["generate"][0]
    assert (models.run.draft_tokens, models.run.max_context) == (7, 2048)
    assert models.run.dtypes.param == "bfloat16"
    assert calls["causal"] is None


def test_eos_ids_come_from_the_target_unless_ignored(calls, prompt_file, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}), "utf-8")
    options = ("--prompt-ids", prompt_file, "--max-new-tokens", 5)
    run(*options, target=tmp_path)
    assert calls["generate"][3] == {5}
    run(*options, "--ignore-eos", target=tmp_path)
    assert calls["generate"][3] == frozenset()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("[1, 2]", [[1, 2]]),
        ("[[1, 2], [3]]", [[1, 2], [3]]),
        ("1 2\n3", [[1, 2, 3]]),
        ("1, 2,3", [[1, 2, 3]]),
        ("  [5]\n", [[5]]),
    ],
)
def test_forms_of_prompt_ids(text, rows):
    assert cli.parse_prompt_ids(text) == rows


@pytest.mark.parametrize(
    "text", ["", "[]", "[[1], []]", "[1", "[1.5]", "[true]", "[1, [2]]", "one two", '[{"a": 1}]']
)
def test_other_prompt_ids_are_value_errors(text):
    with pytest.raises(ValueError, match="--prompt-ids"):
        cli.parse_prompt_ids(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-new-tokens", 0), "max_new_tokens: expected an integer >= 1, got 0"),
        (("--max-new-tokens", 5, "--max-context", 7), "max_context: expected at least 8"),
        (("--max-new-tokens", 5, "--max-context", 0), "max_context: expected"),
        (("--max-new-tokens", 5, "--draft-tokens", 3), "--draft-tokens: expected only with"),
        (("--max-new-tokens", 5, "--causal", "true"), "--causal: expected only with --draft"),
        (("--max-new-tokens", 5, "--raw"), "--raw: expected only with --prompt"),
        (("--max-new-tokens", 5, "--draft", "d", "--draft-tokens", 0), "draft_tokens: expected"),
        (("--max-new-tokens", 5, "--draft-tree-nodes", 9), "--draft-tree-nodes: expected only"),
        (
            ("--max-new-tokens", 5, "--draft", "d", "--draft-tree-nodes", "0,8"),
            "tree_nodes: expected 0 or K + 2 = 9..32, got 8",
        ),
        (
            ("--max-new-tokens", 5, "--draft", "d", "--draft-tree-nodes", 12,
             "--draft-tree-paths", 9),
            "tree_paths: expected 2..8, got 9",
        ),
        (
            ("--max-new-tokens", 5, "--draft", "d", "--draft-tree-paths", 4),
            "--draft-tree-paths: expected only with --draft-tree-nodes",
        ),
    ],
)
def test_faults_are_one_line_and_status_2(calls, prompt_file, capsys, options, message):
    assert run("--prompt-ids", prompt_file, *options) == 2
    out, err = capsys.readouterr()
    assert out == "" and "generate" not in calls
    assert err.startswith("dflash-jax: error: ") and err.count("\n") == 1
    assert message in err


def test_an_interrupt_is_one_line_and_status_130(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_run", lambda argv: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["generate"]) == 130
    assert capsys.readouterr().err == "dflash-jax: interrupted\n"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_output_that_cannot_be_shown_or_read_ends_without_a_traceback(encoding):
    """Text the encoding lacks is escaped; a reader that has gone is status 1."""
    code = (
        "import sys; from dflash_jax import cli\n"
        "cli._run = lambda argv: [print('\\u2713' * 999, flush=True) for _ in range(999)] and 0\n"
        "sys.exit(cli.main([]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    first = process.stdout.readline().decode(encoding)
    process.stdout.close()
    assert first.startswith("\\u2713" if encoding == "ascii" else "\u2713")
    assert process.wait() == 1 and process.stderr.read() == b""
    process.stderr.close()


def test_missing_files_are_one_line_and_status_2(tmp_path, capsys):
    assert run("--prompt-ids", tmp_path / "none.json", "--max-new-tokens", 5) == 2
    assert run("--prompt", "hi", "--max-new-tokens", 5, target=tmp_path) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2 and "none.json" in err[0] and "tokenizer.json" in err[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--prompt --prompt-ids is required"),
        (("--prompt", "a", "--prompt-ids", "f"), "not allowed with"),
        (("--prompt", "a", "--max-new-tokens", "x"), "invalid int value"),
        (("--prompt", "a", "--dtype", "int4"), "invalid choice"),
        (("--prompt", "a", "--draft-tree-nodes", "wide"), "expected auto, or numbers"),
        (("--prompt", "a", "--draft-tree-nodes", "12,"), "expected auto, or numbers"),
        (("--prompt", "a", "--unknown"), "--unknown"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        run("--max-new-tokens", 5, *options)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("dflash-jax: error: ") and err.count("\n") == 1
    assert message in err


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory):
    """A random target and draft, as `make_tiny_weights.py` writes them."""
    folder = tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["make_tiny_weights.py", "--out", str(folder)])
        make_tiny_weights.main()
    return folder


def test_a_draft_changes_rounds_but_not_ids(tiny_pair, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(" ".join(str(token) for token in range(60, 84)), "utf-8")
    options = ("--prompt-ids", prompt, "--max-new-tokens", 12, "--ignore-eos")
    more = ("--dtype", "float32", "--max-context", 64)
    capsys.readouterr()
    assert run(*options, *more, target=tiny_pair / "target") == 0
    plain = capsys.readouterr()
    assert "rounds: 0, and 11 without proposals" in plain.err
    draft = ("--draft", tiny_pair / "draft", "--draft-tokens", 3)
    assert run(*options, *more, *draft, target=tiny_pair / "target") == 0
    speculative = capsys.readouterr()
    assert speculative.out == plain.out
    assert len(plain.out.split()) == 12
    assert "causal = [False, False], decided by is_causal" in speculative.err
    assert "finished: length" in speculative.err


def test_text_in_gives_text_out(tiny_pair, capsys):
    options = ("--prompt", "Hello", "--max-new-tokens", 12, "--ignore-eos", "--quiet")
    more = ("--dtype", "float32", "--max-context", 64)
    draft = ("--draft", tiny_pair / "draft", "--draft-tokens", 3)
    assert run(*options, *more, *draft, target=tiny_pair / "target") == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and len(out) > 1
    assert err == ""


def test_ids_outside_the_tokenizer_are_a_fault(tiny_pair, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("1 259", "utf-8")
    assert run("--prompt-ids", prompt, "--max-new-tokens", 1, target=tiny_pair / "target") == 2
    assert "prompts[0]: expected ids in [0, 259), got 259" in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_one_line(tmp_path, prompt_file, capsys):
    assert run("--prompt-ids", prompt_file, "--max-new-tokens", 1, target=tmp_path / "no") == 2
    err = capsys.readouterr().err
    assert "config.json" in err and err.count("\n") == 1


def test_sampling_options_override_their_preset(calls, prompt_file):
    options = ("--prompt-ids", prompt_file, "--max-new-tokens", 5)
    assert run(*options) == 0
    assert calls["sampling"] == SamplingParams()
    assert run(*options, "--preset", "thinking", "--top-k", 5, "--seed", 2**64 - 1) == 0
    assert calls["sampling"] == dataclasses.replace(PRESETS["thinking"], top_k=5, seed=2**64 - 1)


@pytest.mark.parametrize(
    "option, value, field",
    [("--temperature", -1, "temperature"), ("--top-p", 0, "top_p"), ("--seed", 2**64, "seed")],
)
def test_impossible_controls_are_refused_by_name(calls, prompt_file, capsys, option, value, field):
    options = ("--prompt-ids", prompt_file, "--max-new-tokens", 5)
    assert run(*options, option, value) == 2
    assert f"{field}: expected" in capsys.readouterr().err


def test_preset_folder_reads_the_targets_generation_config(calls, prompt_file, tmp_path):
    (tmp_path / "config.json").write_text("{}", "utf-8")
    stated = {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.75}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated), "utf-8")
    options = ("--prompt-ids", prompt_file, "--max-new-tokens", 5, "--preset", "folder")
    assert run(*options, target=tmp_path) == 0
    assert calls["sampling"] == SamplingParams(temperature=0.5, top_k=3, top_p=0.75)


def test_a_faulty_row_is_reported_even_when_quiet(calls, prompt_file, capsys):
    calls["fault"] = True
    assert run("--prompt-ids", prompt_file, "--max-new-tokens", 5, "--quiet") == 1
    assert "row 0: ended early, no finite logit" in capsys.readouterr().err
