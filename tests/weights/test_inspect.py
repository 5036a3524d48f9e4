"""`inspect` tells what the loaders would do, from headers alone."""

import json
import time

import pytest

from dflash_jax.cli import main
from dflash_jax.weights.inspect import inspect_folder
from tests.weights import official


def test_the_27b_draft_is_described_with_its_causality_and_the_reason(tmp_path, capsys):
    size, shapes = official.DRAFTS["27B-DFlash2"]
    draft = official.draft_config("27B-DFlash2")
    official.write_folder(tmp_path / "draft", draft, shapes)
    official.write_folder(
        tmp_path / "target", official.target_config(size), official.target_shapes(size), shards=26
    )
    command = ["inspect", str(tmp_path / "draft"), "--target", str(tmp_path / "target")]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path / 'draft'}: draft"
    for line in (
        "  DFlash2DraftModel: hidden 5120, mlp 17408, layers 5",
        "  layer 4: sliding_attention, window 2048, bidirectional",
        f"causality: {[False] * 5}, decided by is_causal",
        "files: 1, 81 tensors, 3.849 GB",
        "  BF16: 81 tensors, 3.849 GB",
        "loaded: 81 tensors, 1,924,404,480 parameters, 3.849 GB",
        "ignored: 0 tensors, 0.000 GB",
        "faults: none",
    ):
        assert line in lines


def test_a_draft_alone_is_read_by_what_it_says_of_its_target(tmp_path):
    _, shapes = official.DRAFTS["35B-A3B-DFlash"]
    official.write_folder(tmp_path, official.draft_config("35B-A3B-DFlash"), shapes)
    report = inspect_folder(tmp_path)
    flags = [True] * 5 + [False]
    reason = "layer_types (is_causal absent: sliding layers are causal)"
    assert f"causality: {flags}, decided by {reason}" in report.lines
    assert "  not compared with a target: give one to do so" in report.lines
    assert report.faults == ()


def test_72_gb_of_single_experts_take_seconds_and_list_what_is_ignored(tmp_path):
    shapes = official.target_shapes("35B-A3B", each=True)
    official.write_folder(tmp_path, official.target_config("35B-A3B"), shapes, shards=26)
    start = time.perf_counter()
    report = inspect_folder(tmp_path)
    assert time.perf_counter() - start < 10
    assert report.faults == ()
    for line in (
        "loaded: 31333 tensors, 34,660,610,688 parameters, 69.321 GB",
        "ignored: 1118 tensors, 2.582 GB",
        "  model.visual.*: 333",
        "  moe 256 experts, top 8, routed 512, shared 512",
    ):
        assert line in report.lines


def test_faults_are_listed_and_make_the_status_one(tmp_path, capsys):
    _, shapes = official.DRAFTS["35B-A3B-DFlash"]
    shapes = {name: shape for name, shape in shapes.items() if name != "fc.weight"}
    official.write_folder(tmp_path, official.draft_config("35B-A3B-DFlash"), shapes)
    assert main(["inspect", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.endswith("faults: 1, would be refused\n  fc.weight: missing\n")


def test_a_config_that_cannot_be_read_leaves_the_table_of_the_files(tmp_path):
    shapes = official.target_shapes("27B")
    config = official.target_config("27B")
    del config["text_config"]["head_dim"]
    official.write_folder(tmp_path, config, shapes)
    report = inspect_folder(tmp_path)
    assert report.faults == ("config.json: head_dim: expected a value in config.json, got none",)
    assert any(line.startswith("files: 1, 1199 tensors") for line in report.lines)


def test_a_quantised_folder_is_named(tmp_path):
    _, shapes = official.DRAFTS["27B-DFlash"]
    shapes = shapes | {"layers.0.mlp.up_proj.weight_scale_2": (1,)}
    official.write_folder(tmp_path, official.draft_config("27B-DFlash"), shapes)
    (fault,) = inspect_folder(tmp_path).faults
    assert "this is NVFP4 (ModelOpt)" in fault


def test_a_folder_of_gguf_files_is_named(tmp_path):
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    (fault,) = inspect_folder(tmp_path).faults
    assert fault.startswith("model-Q4_K_M.gguf: ") and "this is GGUF (1 such files)" in fault


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_no_folder_and_no_config_are_the_callers_faults(tmp_path, content, capsys):
    folder = tmp_path / "folder"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_text(content)
    assert main(["inspect", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("dflash-jax: error: ")


def test_own_heads_and_flat_files_without_a_block_count_are_read(tmp_path):
    config = official.draft_config("35B-A3B-DFlash")
    config = {n: v for n, v in config.items() if n not in ("dflash_config", "num_target_layers")}
    config |= {"target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37], "mask_token_id": 248077}
    _, shapes = official.DRAFTS["35B-A3B-DFlash"]
    shapes = shapes | {"lm_head.weight": (official.VOCAB, 2048)}
    official.write_folder(tmp_path, json.loads(json.dumps(config)), shapes)
    report = inspect_folder(tmp_path)
    assert report.faults == ()
    assert "  with a head of its own, 248320 rows" in report.lines
