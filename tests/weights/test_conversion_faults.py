"""Damaged, foreign and rounded converted folders are refused; faulty sources leave nothing."""

import json
import shutil

import jax
import numpy as np
import pytest

from dflash_jax.config import ConfigError, DtypePolicy
from dflash_jax.weights import WeightsError, load_draft, load_target
from dflash_jax.weights.conversion import convert, plan_draft, plan_target
from dflash_jax.weights.inspect import inspect_folder
from dflash_jax.weights.to_hf import draft_to_hf
from tests.weights.test_conversion import KIT, TARGET, handmade_draft


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


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["items"]["head"]["final_norm/weight"].pop("shape"),
        lambda m: m["items"].update(layers_0=[]),
        lambda m: m.update(dtype="gloat32"),
        lambda m: m.update(causality=[]),
        lambda m: m.update(geometry=None),
    ],
)
def test_entries_of_a_manifest_of_another_type_are_refused(kit_draft, tmp_path, change):
    folder, target = damaged(kit_draft, tmp_path / "d")
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for use in (
        lambda: load_draft(folder, target, DtypePolicy()),
        lambda: draft_to_hf(folder, tmp_path / "back", target),
    ):
        with pytest.raises(WeightsError, match="manifest.json: .*: expected"):
            use()
    assert inspect_folder(folder, KIT / "targets" / "tiny").faults


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


def test_a_draft_whose_header_is_no_text_is_refused_by_name(tmp_path):
    folder = handmade_draft(tmp_path / "draft")
    with open(folder / "model.safetensors", "r+b") as stream:
        stream.seek(10)
        stream.write(b"\xc3")
    with pytest.raises(WeightsError, match="model.safetensors: not a safetensors file"):
        plan_draft(folder, tmp_path / "out", "bfloat16", TARGET)


def test_a_full_disk_is_refused_before_an_item_is_written(tmp_path, monkeypatch):
    plan = plan_target(KIT / "targets" / "tiny", tmp_path / "out", "float32")
    full = shutil._ntuple_diskusage(10**9, 10**9, plan.num_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(OSError, match="disk full"):
        convert(plan)
    assert not plan.out.exists() and not (plan.partial / "items").exists()
