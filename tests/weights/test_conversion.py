"""Conversion to orbax: the same parameters, the same files back, whole or absent, resumable."""

import json
import math
import shutil
import tomllib
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dflash_jax.config import ConfigError, DraftKind, DtypePolicy, tiny_draft, tiny_target
from dflash_jax.weights import WeightsError, conversion, converted, load_draft, load_target
from dflash_jax.weights.conversion import convert, plan_draft, plan_target
from dflash_jax.weights.export import draft_json, target_json
from dflash_jax.weights.to_hf import draft_to_hf
from scripts.convert_weights import main
from tests.weights.handmade import draft_tensors, target_tensors, write

ROOT = Path(__file__).parents[2]
SHIPPED, KIT = ROOT / "dflash_jax" / "assets", ROOT / "tests" / "data" / "kit_tiny"
POLICIES = {"bfloat16": DtypePolicy(), "float32": DtypePolicy.exact()}
TARGET = tiny_target()
PAIRS = {
    "shipped": (SHIPPED / "target", [SHIPPED / "dflash", SHIPPED / "dflash2"]),
    "kit": (
        KIT / "targets" / "tiny",
        [KIT / "drafts" / "tiny_dflash", KIT / "drafts" / "tiny_dflash2"],
    ),
}


def same(actual, expected):
    """Equal structure, dtypes and bytes."""
    a, b = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (actual, expected))
    assert [path for path, _ in a] == [path for path, _ in b]
    for (path, got), (_, wanted) in zip(a, b, strict=True):
        assert got.dtype == wanted.dtype, path
        assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes(), path


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize(
    ("pair", "dtype"), [("shipped", "bfloat16"), ("kit", "float32"), ("kit", "bfloat16")]
)
def test_converted_models_load_bit_for_bit_like_their_files(tmp_path, pair, dtype):
    folder, drafts = PAIRS[pair]
    policy = POLICIES[dtype]
    assert convert(plan_target(folder, tmp_path / "target", dtype))
    config, params = load_target(tmp_path / "target", policy)
    expected, direct = load_target(folder, policy)
    assert config == expected
    same(params, direct)
    for draft in drafts:
        out = tmp_path / draft.name
        assert convert(plan_draft(draft, out, dtype, config))
        loaded, reference = (load_draft(where, config, policy) for where in (out, draft))
        assert loaded[0] == reference[0]
        same(loaded[1], reference[1])


@pytest.mark.parametrize(("pair", "dtype"), [("shipped", "bfloat16"), ("kit", "float32")])
def test_a_draft_written_back_has_the_bytes_of_its_files(tmp_path, pair, dtype):
    folder, drafts = PAIRS[pair]
    config, _ = load_target(folder, POLICIES[dtype])
    for draft in drafts:
        convert(plan_draft(draft, tmp_path / "orbax" / draft.name, dtype, config))
        draft_to_hf(tmp_path / "orbax" / draft.name, tmp_path / "back" / draft.name, config)
        assert files_of(tmp_path / "back" / draft.name) == files_of(draft)


# Layouts beside the plain one


def handmade_draft(folder, extra=(), kind=DraftKind.DFLASH2, **how):
    tensors = draft_tensors(kind is DraftKind.DFLASH2) | dict(extra)
    return write(folder, draft_json(tiny_draft(kind)), tensors, **how)


def own_tensors():
    rng = np.random.default_rng(3)
    ids = np.array([7, 3, 249, 0, 12, 100, 50, 6, 5])
    flags = np.zeros(257, bool)
    flags[ids] = True
    return {
        "lm_head.weight": rng.integers(-9, 9, (9, 64)).astype(np.float32),
        "embed_tokens.weight": rng.integers(-9, 9, (257, 64)).astype(np.float32),
        "d2t": ids - np.arange(9),
        "t2d": flags,
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: handmade_draft(folder, own_tensors()),
        lambda folder: handmade_draft(folder, shards=3),
        lambda folder: write(
            folder,
            draft_json(tiny_draft(DraftKind.DFLASH)),
            {f"model.{name}": values for name, values in fused(draft_tensors()).items()},
        ),
    ],
    ids=["own embedding, head and maps", "three shards", "fused qkv under a prefix"],
)
def test_other_draft_layouts_convert_and_come_back(tmp_path, make):
    draft = make(tmp_path / "draft")
    convert(plan_draft(draft, tmp_path / "orbax", "bfloat16", TARGET))
    loaded, reference = (
        load_draft(where, TARGET, POLICIES["float32"]) for where in (tmp_path / "orbax", draft)
    )
    assert loaded[0] == reference[0]
    same(loaded[1], reference[1])
    draft_to_hf(tmp_path / "orbax", tmp_path / "back", TARGET)
    assert files_of(tmp_path / "back") == files_of(draft)


def fused(tensors):
    for i in range(2):
        stem = f"layers.{i}.self_attn."
        parts = [tensors.pop(f"{stem}{name}_proj.weight") for name in "qkv"]
        tensors[stem + "qkv_proj.weight"] = np.concatenate(parts)
    return tensors


def test_a_moe_target_in_shards_converts(tmp_path):
    content = target_json(tiny_target(True))
    folder = write(tmp_path / "moe", content, target_tensors(moe=True), shards=3)
    convert(plan_target(folder, tmp_path / "orbax", "bfloat16"))
    results = [load_target(where, DtypePolicy())[1] for where in (tmp_path / "orbax", folder)]
    same(*results)


def test_leaves_go_where_the_shardings_say(tmp_path):
    folder = KIT / "targets" / "tiny"
    convert(plan_target(folder, tmp_path / "orbax", "float32"))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for where in (folder, tmp_path / "orbax"):
        asked = []

        def shardings(path, shape, asked=asked):
            asked.append((path, shape))
            return device

        _, params = load_target(where, POLICIES["float32"], shardings=shardings)
        leaves = jax.tree.leaves(params)
        assert len(asked) == len(leaves) and all(leaf.sharding == device for leaf in leaves)
        assert sorted(shape for _, shape in asked) == sorted(leaf.shape for leaf in leaves)


# The manifest


def test_the_manifest_states_sources_geometry_and_causality(tmp_path):
    convert(plan_draft(SHIPPED / "dflash", tmp_path / "d", "bfloat16", shipped_target()))
    manifest = json.loads((tmp_path / "d" / "manifest.json").read_text())
    source = SHIPPED / "dflash"
    assert manifest["kind"] == "draft" and manifest["dtype"] == "bfloat16"
    assert manifest["config_sha256"] == converted.file_digest(source / "config.json")
    (file,) = manifest["sources"]
    assert file["file"] == "model.safetensors"
    assert file["bytes"] == (source / "model.safetensors").stat().st_size
    assert manifest["geometry"]["kind"] == "DFlashDraftModel"
    causality = manifest["causality"]
    assert causality["flags"] == manifest["geometry"]["causal"] and causality["reason"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert manifest["library"] == f"dflash_jax {version}"
    assert sorted(manifest["items"]) == ["context", "head", "layers_0", "layers_1", "layers_2"]
    assert {file.name for file in (tmp_path / "d").iterdir()} == {
        "config.json", "items", "manifest.json", "sizes.json",
    }  # fmt: skip


def shipped_target():
    return load_target(SHIPPED / "target", DtypePolicy())[0]


def test_equal_sources_give_equal_manifests(tmp_path):
    for name in "ab":
        convert(plan_target(KIT / "targets" / "tiny", tmp_path / name, "float32"))
    assert files_of(tmp_path / "a")["manifest.json"] == files_of(tmp_path / "b")["manifest.json"]


# Going on after a stop


class Stop(BaseException):
    """A kill, as far as the writer can tell."""


def test_an_unfinished_folder_is_no_model_and_is_finished_by_the_next_run(tmp_path, monkeypatch):
    plan = plan_target(KIT / "targets" / "tiny", tmp_path / "out", "float32")
    save, written = conversion.save_item, []

    def save_two(folder, *leaves):
        if len(written) == 2:
            raise Stop
        written.append(folder.name)
        save(folder, *leaves)

    monkeypatch.setattr(conversion, "save_item", save_two)
    with pytest.raises(Stop):
        convert(plan)
    assert not plan.out.exists()
    with pytest.raises((ConfigError, WeightsError)):
        load_target(plan.partial, DtypePolicy.exact())
    other = plan_target(KIT / "targets" / "tiny", tmp_path / "out", "bfloat16")
    with pytest.raises(ValueError, match="unfinished conversion of these files, got"):
        convert(other)

    again = []
    monkeypatch.setattr(conversion, "save_item", lambda folder, *leaves: (
        again.append(folder.name), save(folder, *leaves)))  # fmt: skip
    progress = []
    convert(plan, on_bytes=lambda done, total: progress.append((done, total)))
    assert again == [item.name for item in plan.items if item.name not in written]
    assert progress[-1] == (plan.num_bytes, plan.num_bytes) and len(progress) == len(again)
    assert not plan.partial.exists()
    same(
        load_target(tmp_path / "out", DtypePolicy.exact())[1],
        load_target(KIT / "targets" / "tiny", DtypePolicy.exact())[1],
    )


def test_an_item_that_reads_back_wrong_is_not_recorded(tmp_path, monkeypatch):
    plan = plan_target(KIT / "targets" / "tiny", tmp_path / "out", "float32")
    restore = conversion.restore_item

    def restore_wrong(folder, names):
        values = restore(folder, names)
        next(iter(values.values())).flat[0] += 1
        return values

    monkeypatch.setattr(conversion, "restore_item", restore_wrong)
    with pytest.raises(WeightsError, match="expected {'shape'"):
        convert(plan)
    assert not plan.out.exists() and not list(plan.partial.glob("records/*"))


# The command


def test_the_script_plans_converts_resumes_nothing_and_writes_back(tmp_path, capsys):
    target, (draft, _) = PAIRS["kit"]
    command = ["--target", str(target), "--draft", str(draft), "--out", str(tmp_path / "out")]
    command += ["--dtype", "float32"]
    assert main([*command, "--dry-run"]) == 0
    assert "causality [" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "left" in shown.err and "GB" in shown.err
    assert main(command) == 0
    assert capsys.readouterr().out.count("already whole") == 2
    back = ["--target", str(tmp_path / "out" / "target"), "--draft", str(tmp_path / "out/draft")]
    assert main([*back, "--to-hf", "--out", str(tmp_path / "back")]) == 0
    assert files_of(tmp_path / "back") == files_of(draft)
    assert main([*back, "--to-hf", "--out", str(tmp_path / "back")]) == 2
    assert "back: expected a new folder" in capsys.readouterr().err


def test_a_faulty_draft_is_refused_before_its_target_is_converted(tmp_path, capsys):
    target, (draft, _) = PAIRS["kit"]
    shutil.copytree(draft, tmp_path / "draft")
    with open(tmp_path / "draft" / "model.safetensors", "r+b") as stream:
        stream.truncate(stream.seek(0, 2) - 4)
    out = ["--out", str(tmp_path / "out")]
    assert main(["--target", str(target), "--draft", str(tmp_path / "draft"), *out]) == 2
    assert "truncated" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_shards_cut_large_leaves_and_change_no_value(tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "SMALLEST_CHUNK", 1 << 10)
    folder, loaded, chunks = KIT / "targets" / "tiny", {}, {}
    for shards in (1, 4):
        out = tmp_path / str(shards)
        assert convert(plan_target(folder, out, "float32", shards=shards))
        loaded[shards] = load_target(out, POLICIES["float32"])[1]
        metadata = ocp.PyTreeCheckpointHandler().metadata(out / "items" / "layers_0")
        chunks[shards] = {
            name: math.prod(leaf.shape) // math.prod(leaf.storage.chunk_shape)
            for name, leaf in metadata.tree.items()
            if math.prod(leaf.shape) >= 4 << 10
        }
    same(loaded[4], loaded[1])
    assert len(chunks[1]) >= 3 and set(chunks[1].values()) == {1}
    assert chunks[4].keys() == chunks[1].keys() and min(chunks[4].values()) >= 4
    for shards in (0, -1, 2.0, 1025):
        with pytest.raises(ConfigError, match="shards: expected 1..1024"):
            plan_target(folder, tmp_path / "out", "float32", shards=shards)
    options = ["--target", str(folder), "--out", str(tmp_path / "cli"), "--shards", "3"]
    assert main(options) == 0
    manifest = json.loads((tmp_path / "cli" / "target" / "manifest.json").read_text())
    assert manifest["shards"] == 3
