"""The training scripts: their main path, and faults that are one line and lose nothing."""

import errno
import os
import sys
from collections import namedtuple
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError

import dflash_jax
from dflash_jax.training import continuations, tiny_pair
from dflash_jax.training.corpus import is_held_out
from dflash_jax.training.fit import CHECKPOINT, fit
from dflash_jax.weights import load_draft, load_target
from scripts import make_tiny_weights, train_draft, train_target
from tests.training import scenes

FULL = os.strerror(errno.ENOSPC)


def call(module, *options):
    """Runs a script's main with these options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__name__, *map(str, options)])
        return module.main()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A corpus of this package's smallest files, some of each split."""
    folder, package = tmp_path_factory.mktemp("text"), Path(dflash_jax.__file__).parent
    files = sorted(package.rglob("*.py"), key=lambda file: file.stat().st_size)[-60:]
    for index, file in enumerate(files):
        (folder / f"{index}.py").write_text(file.read_text("utf-8")[:4000], "utf-8")
    names = [file.name for file in folder.iterdir()]
    assert 0 < sum(map(is_held_out, names)) < len(names)
    return folder


@pytest.fixture
def target_call(text, tmp_path):
    """Runs train_target on the corpus; every option can be overridden."""
    def run(*options):
        small = ("--smoke", "--ids", 300, "--batch", 1, "--length", 24, "--text", text)
        return call(train_target, "--out", tmp_path / "out", *small, "--steps", 2, *options)

    return run


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random target with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("models")
    call(make_tiny_weights, "--out", folder)
    return folder / "target"


def draft_call(target, text, out, *options):
    small = ("--sequences", 2, "--write-batch", 2, "--prompt", 8, "--new-tokens", 16, "--steps", 2,
             "--batch", 1, "--blocks", 2, "--held-out-prompts", 2, "--dtype", "float32")
    return call(train_draft, "--target", target, "--draft", "dflash", "--out", out, "--text", text,
                *small, *options)


def test_a_target_is_trained_and_loads(target_call, tmp_path, capsys, monkeypatch):
    """Its second part: the disk fills up when the result is written, and the work is kept."""
    def full(*args):
        raise SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(tiny_pair, "save_target", full)
        assert target_call("--save-every", 1) == 2
    assert "train_target: error:" in (err := capsys.readouterr().err) and "disk full" in err
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.resume" / CHECKPOINT).is_dir()
    assert target_call("--save-every", 1) == 0
    assert "2 steps" in capsys.readouterr().out
    assert not (tmp_path / "out.resume").exists()
    config, _ = load_target(tmp_path / "out", scenes.EXACT)
    assert config.public_vocab == 300


def test_a_draft_is_trained_measured_and_loads(target, text, tmp_path, capsys):
    out = tmp_path / "draft"
    assert draft_call(target, text, out) == 0
    printed = capsys.readouterr().out
    assert "tokens per round, 2 prompts" in printed and "position 7" in printed
    config, _ = load_target(target, scenes.EXACT)
    draft, _ = load_draft(out, config, scenes.EXACT)
    assert draft.block_size == 8
    (tmp_path / "ids.json").write_text(str([[1] * 8, [2] * 8]), "utf-8")
    options = ("--validate", "--draft", out, "--prompts", tmp_path / "ids.json")
    assert draft_call(target, text, out, *options) == 0
    assert [train_draft.capture_size(n) for n in (2, 256, 300, 509)] == [2, 256, 150, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layers", 0, 99), r"target_layer_ids: expected"),
        (("--layers", -1), r"target_layer_ids: expected"),
        (("--mask-id", 5000), r"mask_token_id: expected"),
        (("--draft", "eagle"), r"--draft: expected one of ['dflash', 'dflash2'], got 'eagle'"),
        (("--blocks", 10), r"blocks: expected at most 9 anchors"),
        (("--sequences", 3), r"prompts: expected [N, P] with N a multiple of 2"),
        (("--text", "absent"), r"corpus: expected .py files of text below absent"),
        (("--validate",), r"--prompts: expected a file with --validate"),
        (("--validate", "--prompts", "absent"), r"absent: expected a JSON list of id lists"),
        (("--target", "absent"), r"config.json: expected a file in absent"),
    ],
)
def test_wrong_options_of_a_draft_are_one_line(
    target, text, tmp_path, capsys, monkeypatch, options, message
):
    monkeypatch.setattr(continuations, "continue_batch", lambda models, params, prompts, *rest: (
        jnp.zeros((len(prompts), 16), jnp.int32)
    ))
    assert draft_call(target, text, tmp_path / "draft", *options) == 2
    err = capsys.readouterr().err
    assert err.startswith("train_draft: error: ") and err.count("\n") == 1 and message in err
    assert not (tmp_path / "draft").exists()


def test_a_target_without_a_tokenizer_or_with_a_larger_one_is_refused(
    target, text, tmp_path, capsys
):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((target / name).read_bytes())
    assert draft_call(bare, text, tmp_path / "draft") == 2
    assert "tokenizer: expected" in capsys.readouterr().err
    with pytest.raises(ValueError, match="vocabulary: expected a tokenizer of at most 200 ids"):
        train_draft.target_tokenizer(target, 200)
    models = continuations.continuation_models(
        scenes.TARGET, scenes.EXACT, batch=1, prompt=2, new_tokens=2
    )
    with pytest.raises(ValueError, match=r"vocabulary: expected prompts of ids in \[0, 250\)"):
        continuations.continuations(models, {}, [[1, 250]], temperature=0.0, seed=0)


def test_a_full_disk_is_noticed_before_the_work(target_call, tmp_path, capsys, monkeypatch):
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1, 1, 10))
    monkeypatch.setattr(train_target, "fit_target", None)  # is not reached
    assert target_call() == 2
    assert "disk full: expected" in capsys.readouterr().err


def test_a_damaged_resume_folder_leaves_an_older_result_alone(
    target_call, tmp_path, capsys, monkeypatch
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("older", "utf-8")
    (tmp_path / "out.resume" / CHECKPOINT).mkdir(parents=True)
    assert target_call() == 2
    err = capsys.readouterr().err
    assert "manifest.json: expected the manifest of a checkpoint" in err and err.count("\n") == 1
    assert (tmp_path / "out" / "config.json").read_text("utf-8") == "older"


def rising(params, data, key):
    """Falls by the rate each step; no longer a number once x is past the limit."""
    loss = -params["x"].sum()
    return jnp.where(params["x"][0, 0] > data, jnp.nan, loss), {}


@pytest.mark.parametrize("saved_by", ["save_every", "none"])
def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_last_good_state(
    tmp_path, saved_by
):
    every = 1 if saved_by == "save_every" else 0
    config = scenes.quick(
        steps=40, learning_rate=0.1, warmup_steps=0, log_every=1, save_every=every, weight_decay=0
    )
    with pytest.raises(FloatingPointError, match="rising: loss: expected a finite number after"):
        fit(rising, {"x": jnp.zeros((1, 1))}, jnp.float32(0.45), config, name="rising",
            folder=tmp_path)
    assert (tmp_path / CHECKPOINT).is_dir() == bool(every)
    if every:  # the same data again fail at once, better data go on from there
        more = fit(rising, {"x": jnp.zeros((1, 1))}, jnp.float32(np.inf), config, name="rising",
                   folder=tmp_path)
        assert more.history[0][0] > 3 and float(more.params["x"][0, 0]) > 0.45


def test_orbax_on_a_full_disk_costs_the_checkpoint_and_not_the_run(
    tmp_path, monkeypatch, capsys
):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return False

        def save(self, folder, state):
            raise ValueError(f"RESOURCE_EXHAUSTED: failed to write: {FULL} [os_error_code='28']")

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer", Full)
    config = scenes.quick(steps=3, save_every=1)
    found = fit(rising, {"x": jnp.zeros((1, 1))}, jnp.float32(9.0), config, folder=tmp_path)
    assert found.steps == 3
    assert "no checkpoint at step 1" in (err := capsys.readouterr().err) and FULL in err
    assert list(tmp_path.iterdir()) == []
