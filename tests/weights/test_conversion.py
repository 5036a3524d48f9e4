"""Conversion to orbax: the same parameters, the same files back, whole or absent, resumable."""

import json
import shutil
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

from dflash_jax.config import ConfigError, DraftKind, DtypePolicy, tiny_draft, tiny_target
from dflash_jax.weights import WeightsError, conversion, converted, load_draft, load_target
from dflash_jax.weights.conversion import convert, plan_draft, plan_target
from dflash_jax.weights.export import draft_json, target_json
from dflash_jax.weights.inspect import inspect_folder
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


# Refusals


@pytest.fixture(scope="module")
def kit_draft(tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "draft"
    draft = KIT / "drafts" / "tiny_dflash2"
    target = load_target(KIT / "targets" / "tiny", DtypePolicy())[0]
    convert(plan_draft(draft, out, "bfloat16", target))
    return out, target


def damaged(kit_draft, folder):
    out, target = kit_draft
    shutil.copytree(out, folder)
    return folder, target


def test_matrices_that_were_rounded_are_not_loaded_as_exact_ones(kit_draft, tmp_path):
    out, target = kit_draft
    with pytest.raises(WeightsError, match="dtype: expected float32, got bfloat16"):
        load_draft(out, target, DtypePolicy.exact())
    with pytest.raises(WeightsError, match="rounded to bfloat16"):
        draft_to_hf(out, tmp_path / "back", target)
    assert not (tmp_path / "back").exists()


def test_every_damage_of_a_converted_folder_is_listed_before_device_work(
    kit_draft, tmp_path, monkeypatch
):
    folder, target = damaged(kit_draft, tmp_path / "d")
    monkeypatch.setattr(jax, "device_put", None)
    sizes = json.loads((folder / "sizes.json").read_text())
    large = max(sizes, key=sizes.get)
    with open(folder / "items" / large, "r+b") as stream:
        stream.truncate(sizes[large] - 1)
    gone = next(name for name in sizes if name.startswith("layers_0"))
    (folder / "items" / gone).unlink()
    (folder / "config.json").write_bytes((folder / "config.json").read_bytes() + b"\n")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["items"]["head"]["final_norm/weight"]
    manifest["items"]["head"]["stray"] = {"shape": [1], "dtype": "float32", "sha256": ""}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(WeightsError) as error:
        load_draft(folder, target, DtypePolicy())
    assert sorted(error.value.faults) == sorted([
        "config.json: changed since the conversion",
        f"items/{gone}: absent",
        f"items/{large}: expected {sizes[large]} bytes, got {sizes[large] - 1}",
        "final_norm/weight: missing",
        "stray: unmapped, no parameter takes it",
    ])  # fmt: skip


def test_a_folder_of_the_other_kind_or_format_is_refused(kit_draft, tmp_path):
    folder, target = damaged(kit_draft, tmp_path / "d")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"kind": "target", "format": "x"}))
    with pytest.raises(WeightsError, match="format: expected .*\n.*kind: expected 'draft'"):
        load_draft(folder, target, DtypePolicy())
    (folder / "manifest.json").write_text("{")
    with pytest.raises(WeightsError, match="manifest.json: expected JSON"):
        load_draft(folder, target, DtypePolicy())


@pytest.mark.parametrize("key", ["items", "small_files", "headers"])
def test_names_of_a_manifest_that_lead_out_of_the_folder_are_refused(kit_draft, tmp_path, key):
    folder, target = damaged(kit_draft, tmp_path / "d")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["rounded"] = False
    manifest[key]["../outside"] = manifest[key][next(iter(manifest[key]))]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for use in (
        lambda: load_draft(folder, target, DtypePolicy()),
        lambda: draft_to_hf(folder, tmp_path / "back", target),
    ):
        with pytest.raises(WeightsError, match=f"{key}: expected names of files in the folder"):
            use()
    assert not (tmp_path / "outside").exists() and not (tmp_path / "back").exists()


def test_inspect_tells_what_was_converted_and_what_is_damaged(kit_draft, tmp_path):
    folder, _ = damaged(kit_draft, tmp_path / "d")
    report = inspect_folder(folder, KIT / "targets" / "tiny")
    assert report.faults == ()
    assert report.lines[-1].startswith("converted by dflash_jax ")
    assert report.lines[-1].endswith("matrices bfloat16, rounded from wider ones")
    shutil.rmtree(folder / "items" / "layers_0")
    faults = inspect_folder(folder).faults
    assert faults and all(f.startswith("items/layers_0/") for f in faults)


def test_flags_that_differ_from_the_conversions_are_refused(kit_draft, tmp_path):
    folder, target = damaged(kit_draft, tmp_path / "d")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["causality"]["flags"][0] ^= True
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(WeightsError, match="causality: expected"):
        load_draft(folder, target, DtypePolicy())
    load_draft(folder, target, DtypePolicy(), causal=True)


def test_a_damaged_item_is_named(kit_draft, tmp_path):
    folder, target = damaged(kit_draft, tmp_path / "d")
    sizes = json.loads((folder / "sizes.json").read_text())
    for name in sizes:
        if name.startswith("layers_1/_METADATA"):
            (folder / "items" / name).write_bytes(b"x" * sizes[name])
    with pytest.raises(WeightsError, match="layers_1: damaged"):
        load_draft(folder, target, DtypePolicy())


def test_a_destination_of_something_else_is_left_alone(tmp_path):
    plan = plan_target(KIT / "targets" / "tiny", tmp_path / "out", "float32")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="out: expected a new folder"):
        convert(plan)
    (tmp_path / "out").rmdir()
    assert convert(plan)
    assert not convert(plan)
    other = plan_target(KIT / "targets" / "tiny", tmp_path / "out", "bfloat16")
    with pytest.raises(ValueError, match="out: expected a new folder"):
        convert(other)


def test_faulty_sources_and_dtypes_leave_nothing_behind(tmp_path):
    folder = handmade_draft(tmp_path / "draft", {"surplus": np.zeros(1, np.float32)})
    with pytest.raises(WeightsError, match="surplus: unmapped"):
        plan_draft(folder, tmp_path / "out", "bfloat16", TARGET)
    with pytest.raises(ConfigError, match="dtype: expected one of"):
        plan_target(KIT / "targets" / "tiny", tmp_path / "out", "float8")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_full_disk_is_refused_before_an_item_is_written(tmp_path, monkeypatch):
    plan = plan_target(KIT / "targets" / "tiny", tmp_path / "out", "float32")
    full = shutil._ntuple_diskusage(10**9, 10**9, plan.num_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(OSError, match="disk full"):
        convert(plan)
    assert not plan.out.exists() and not (plan.partial / "items").exists()


# Going on after a stop


class Stop(BaseException):
    """A kill, as far as the writer can tell."""


def test_an_unfinished_folder_is_no_model_and_is_finished_by_the_next_run(tmp_path, monkeypatch):
    plan = plan_target(KIT / "targets" / "tiny", tmp_path / "out", "float32")
    save, written = conversion.save_item, []

    def save_two(folder, leaves):
        if len(written) == 2:
            raise Stop
        written.append(folder.name)
        save(folder, leaves)

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
    monkeypatch.setattr(conversion, "save_item", lambda folder, leaves: (
        again.append(folder.name), save(folder, leaves)))  # fmt: skip
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
