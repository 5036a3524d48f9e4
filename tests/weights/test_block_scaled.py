"""Block-scaled float8 targets: every block's scale reaches its rows, and every fault is listed."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.config import (
    ConfigError,
    DtypePolicy,
    RunConfig,
    qwen35_27b,
    qwen35_35b_a3b,
    tiny_target,
)
from dflash_jax.ops.block_scaled_linear import BlockScale, dequantise
from dflash_jax.steps import Models
from dflash_jax.steps.init import abstract_params
from dflash_jax.weights import WeightsError, inspect_folder, load_draft, load_target
from dflash_jax.weights.conversion import convert, plan_target
from dflash_jax.weights.export import draft_json, save_target, target_json
from dflash_jax.weights.init import random_target
from dflash_jax.weights.source import target_source
from tests import cases
from tests.tolerances import assert_same_bits
from tests.weights import official
from tests.weights.handmade import dequantised, draft_tensors, in_fp8, target_tensors, write

PREFIX = "model.language_model."
FP8 = ml_dtypes.float8_e4m3fn
# Blocks as released, which no tiny matrix fills; whole ones; and ones that end inside of tensors.
BLOCKS = [(128, 128), (16, 32), (24, 40)]


def config_json(moe, block):
    section = {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"}
    return target_json(tiny_target(moe)) | {"quantization_config": section}


def split_experts(tensors):
    """One tensor an expert, as transformers writes them."""
    split = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            split[name] = tensor
            continue
        stem, _, last = name.rpartition(".")
        for e, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if last == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), np.split(matrix, 2), strict=True))
            split |= {f"{stem}.{e}.{part}.weight": m for part, m in parts.items()}
    return split


def loaded(folder, tensors, block, moe=False, **how):
    write(folder, config_json(moe, block), tensors, **how)
    return load_target(folder, DtypePolicy(), public_vocab=250)


def leaves(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in flat}


def values_of(params, columns):
    """Leaves by path, float8 ones dequantised in float32 by the op."""
    flat = leaves(params)
    found = {}
    for path, leaf in flat.items():
        scale = flat.get(path.removesuffix("kernel") + "scale") if path.endswith("kernel") else None
        scale = flat.get(f"{path}_scale", scale)
        if scale is not None:
            stored = BlockScale(jnp.asarray(scale), columns)
            found[path] = np.asarray(dequantise(jnp.asarray(leaf), stored, jnp.float32))
        elif not path.endswith("scale"):
            found[path] = leaf
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("moe", [False, True])
def test_every_weight_keeps_its_float8_value_and_its_blocks_scale(tmp_path, block, moe):
    """Equal, bit for bit, to the dense target of the products."""
    tensors = in_fp8(target_tensors(moe), *block)
    config, params = loaded(tmp_path / "fp8", tensors, block, moe)
    assert config == tiny_target(moe).with_fp8(*block)
    exact = {n: a.astype(np.float32) for n, a in dequantised(tensors, *block).items()}
    folder = write(tmp_path / "dense", target_json(tiny_target(moe)), exact, dtype="float32")
    expected = leaves(load_target(folder, DtypePolicy.exact(), public_vocab=250)[1])
    got = values_of(params, block[1])
    for layer in config.linear_layers:
        stem = f"layers_{layer}/delta_net"
        rows = got[f"{stem}/in_proj/kernel"], got.pop(f"{stem}/gates/kernel").astype(np.float32)
        got[f"{stem}/in_proj/kernel"] = np.concatenate(rows)
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(got[path].astype(np.float32), value, err_msg=path)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_nothing_is_widened_and_shapes_are_those_of_the_modules(tmp_path, block):
    tensors = in_fp8(target_tensors(True), *block)
    config, params = loaded(tmp_path, tensors, block, True)
    models = Models(config, None, cases.tiny_run(0, 1, dtypes=DtypePolicy()))
    described = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    expected = abstract_params(models).target
    assert described == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    in_file = sum(a.size for a in tensors.values() if a.dtype == FP8)
    in_memory = sum(x.size for x in jax.tree.leaves(params) if x.dtype == FP8)
    assert in_file == in_memory > 0


@pytest.mark.parametrize("block", [(128, 128), (8, 32), (24, 40)], ids=str)
def test_single_experts_give_the_bytes_of_fused_ones(tmp_path, block):
    """Where blocks end with the gate rows; elsewhere each expert's own blocks are kept."""
    single = in_fp8(split_experts(target_tensors(True)), *block)
    config, params = loaded(tmp_path / "single", single, block, True)
    assert config == tiny_target(True).with_fp8(*block)
    ours = values_of(params, block[1])["layers_2/moe/gate_up"]
    exact = dequantised(single, *block)
    for e in range(8):
        stem = f"{PREFIX}layers.2.mlp.experts.{e}"
        rows = [exact[f"{stem}.{part}_proj.weight"] for part in ("gate", "up")]
        np.testing.assert_array_equal(ours[e], np.concatenate(rows).astype(np.float32))
    if block == (8, 32):
        _, fused = loaded(tmp_path / "fused", in_fp8(target_tensors(True), *block), block, True)
        for path, leaf in leaves(fused).items():
            assert_same_bits(leaves(params)[path], leaf)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_of_either_dtype_and_in_shards_are_the_same(tmp_path, dtype):
    tensors = in_fp8(target_tensors(), 16, 32)
    _, one = loaded(tmp_path / "a", tensors, (16, 32))
    _, other = loaded(tmp_path / "b", tensors, (16, 32), dtype=dtype, shards=3)
    for path, leaf in leaves(one).items():
        assert_same_bits(leaves(other)[path], leaf)


def test_matrices_that_the_files_leave_dense_stay_dense(tmp_path):
    """As `modules_to_not_convert` lists them: the tensors decide, matrix by matrix."""
    tensors = in_fp8(target_tensors(), 16, 32, ("layers.1.", "layers.2.mlp.down", "self_attn"))
    config, params = loaded(tmp_path, tensors, (16, 32))
    assert config.fp8.layers == (
        ("delta_net/in_proj", "delta_net/output", "mlp/gate_up", "mlp/down"), (),
        ("delta_net/in_proj", "delta_net/output", "mlp/gate_up"), ("mlp/gate_up", "mlp/down"),
    )  # fmt: skip
    assert params["layers_1"]["delta_net"]["in_proj"]["kernel"].dtype == jnp.bfloat16
    assert "gates" not in params["layers_1"]["delta_net"] and "gates" in str(params["layers_2"])
    models = Models(config, None, cases.tiny_run(0, 1, dtypes=DtypePolicy()))
    assert jax.tree.structure(abstract_params(models).target) == jax.tree.structure(params)


def test_a_float8_block_of_128_is_assumed_where_config_json_says_nothing(tmp_path):
    tensors = in_fp8(target_tensors(), 128, 128)
    write(tmp_path, target_json(tiny_target()), tensors)
    config, _ = load_target(tmp_path, DtypePolicy(), public_vocab=250)
    assert config == tiny_target().with_fp8()


@pytest.mark.parametrize("stated", [[128], "128", [0, 128], [128.0, 128], 128])
def test_blocks_that_are_no_pair_of_extents_are_refused(tmp_path, stated):
    content = config_json(False, (16, 32))
    content["quantization_config"]["weight_block_size"] = stated
    write(tmp_path, content, in_fp8(target_tensors(), 16, 32))
    with pytest.raises(ConfigError, match="weight_block_size: expected two positive integers"):
        load_target(tmp_path, DtypePolicy(), public_vocab=250)


# Faults. Nothing is placed on a device before all of them are known.


def faults_of(folder, tensors, monkeypatch, block=(16, 32)):
    monkeypatch.setattr(jax, "device_put", None)
    with pytest.raises(WeightsError) as error:
        loaded(folder, tensors, block)
    return error.value.faults


def test_every_fault_of_names_shapes_and_dtypes_is_listed_at_once(tmp_path, monkeypatch):
    tensors = in_fp8(target_tensors(), 16, 32)
    layer = PREFIX + "layers.{}."
    up, down = layer.format(0) + "mlp.up_proj.weight", layer.format(0) + "mlp.down_proj.weight"
    o_proj, k_proj = (layer.format(3) + f"self_attn.{x}_proj.weight" for x in "ok")
    out, gate = layer.format(1) + "linear_attn.out_proj.weight", layer.format(2) + "mlp.gate_proj"
    norm, a = PREFIX + "norm.weight", layer.format(0) + "linear_attn.in_proj_a.weight"
    del tensors[up + "_scale_inv"]
    tensors[down + "_scale_inv"] = tensors[down + "_scale_inv"][:, :2]
    tensors[k_proj] = tensors[k_proj].astype(np.float32)
    tensors[out] = tensors[out].astype(np.float32)
    del tensors[gate + ".weight"]
    tensors[norm], tensors[a] = tensors[norm].astype(FP8), tensors[a].astype(FP8)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(FP8)
    tensors["lm_head.weight_scale_inv"] = np.ones((17, 2), np.float32)
    tensors[o_proj + "_scale_inv"] = tensors[o_proj + "_scale_inv"].astype(FP8)
    tensors[layer.format(9) + "mlp.up_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)
    readable = "('BF16', 'F16', 'F32')"
    assert faults_of(tmp_path, tensors, monkeypatch) == tuple(sorted([
        f"{up.removeprefix(PREFIX)}_scale_inv: missing",
        f"{down}_scale_inv: expected shape (4, 3), got (4, 2)",
        f"{k_proj}: expected dtype F8_E4M3 as other parts of layers_3/attention/qgkv/kernel, "
        "got BF16",
        f"{out}_scale_inv: a scale of a weight in BF16, expected F8_E4M3",
        f"{gate.removeprefix(PREFIX)}.weight: missing",
        f"{norm}: expected dtype out of {readable}, got F8_E4M3 (quantised?)",
        f"{a}: expected dtype out of {readable}, got F8_E4M3 (quantised?)",
        f"lm_head.weight: expected dtype out of {readable}, got F8_E4M3 (quantised?)",
        "lm_head.weight_scale_inv: a scale of a weight that is kept dense",
        f"{o_proj}_scale_inv: expected dtype out of ('BF16', 'F16', 'F32', 'F8_E8M0'), "
        "got F8_E4M3 (quantised?)",
        f"{layer.format(9)}mlp.up_proj.weight_scale_inv: a scale without its weight",
    ]))  # fmt: skip


def test_scales_that_are_not_finite_or_not_positive_are_faults(tmp_path, monkeypatch):
    tensors = in_fp8(target_tensors(), 16, 32)
    stem = PREFIX + "layers.0.mlp."
    for name, values in {"up": [np.nan, np.inf], "gate": [0.0, -1.0], "down": [-np.inf]}.items():
        tensors[f"{stem}{name}_proj.weight_scale_inv"].flat[: len(values)] = values
    assert faults_of(tmp_path, tensors, monkeypatch) == (
        f"{stem}down_proj.weight_scale_inv: expected finite values, got 1 that are not",
        f"{stem}gate_proj.weight_scale_inv: expected positive scales, got 2 that are not",
        f"{stem}up_proj.weight_scale_inv: expected finite values, got 2 that are not",
    )


def test_blocks_of_another_size_than_stated_are_a_fault_of_every_scale(tmp_path, monkeypatch):
    tensors = in_fp8(target_tensors(), 16, 32)
    found = faults_of(tmp_path, tensors, monkeypatch, block=(32, 32))
    scales = [name for name in tensors if name.endswith("_scale_inv")]
    assert len(found) == len(scales)
    assert all("_scale_inv: expected shape" in fault for fault in found)


def test_float8_without_any_scale_is_one_line(tmp_path, monkeypatch):
    tensors = in_fp8(target_tensors(), 16, 32)
    tensors = {n: a for n, a in tensors.items() if not n.endswith("_scale_inv")}
    (fault,) = faults_of(tmp_path, tensors, monkeypatch)
    assert "this is FP8 without scales" in fault


def test_a_float8_draft_is_refused_by_name(tmp_path):
    tensors = in_fp8(draft_tensors(), 16, 32)
    folder = write(tmp_path, draft_json(cases.DRAFTS["dflash"]), tensors)
    with pytest.raises(WeightsError) as error:
        load_draft(folder, tiny_target(), DtypePolicy())
    (fault,) = error.value.faults
    assert "this is FP8, block-scaled" in fault and "which targets have" in fault


def test_float8_targets_are_neither_drawn_nor_written_as_files(tmp_path):
    config = tiny_target().with_fp8()
    with pytest.raises(ValueError, match="fp8: expected none, got 16 matrices"):
        random_target(config, DtypePolicy(), seed=0)
    with pytest.raises(ValueError, match="fp8: expected none, got 16 matrices"):
        save_target(tmp_path, config, {})


# Official layouts, from headers


def official_fp8(folder, size, **how):
    """Shapes and dtypes of an official FP8 release: 128 x 128 blocks, BF16 scales."""
    shapes, dtypes = {}, {}
    ends = ("in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight", "_proj.weight", "_up_proj")
    for name, shape in official.target_shapes(size, **how).items():
        shapes[name] = shape
        layer = ".layers." in name and not name.startswith("model.visual.")
        if layer and (name.endswith(ends) or name.endswith("experts.down_proj")):
            dtypes[name] = "F8_E4M3"
            blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
            shapes[f"{name}_scale_inv"] = blocks
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = official.target_config(size) | {"quantization_config": section}
    return official.write_folder(folder, config, shapes, dtypes, shards=8)


@pytest.mark.parametrize(
    ("size", "how", "matrices"),
    [
        ("27B", {}, 64 * 4),
        ("35B-A3B", {"each": True}, 40 * 6),
        ("35B-A3B", {}, 40 * 6),
    ],
    ids=["27B", "35B, one tensor an expert", "35B, fused experts"],
)
def test_official_float8_layouts_resolve_with_blocks_as_they_are(tmp_path, size, how, matrices):
    folder = official_fp8(tmp_path, size, **how)
    report = inspect_folder(folder, public_vocab=248077)
    assert report.faults == ()
    assert f"  fp8: {matrices} matrices in blocks of 128 x 128" in report.lines
    assert any(line.startswith("  F8_E4M3: ") for line in report.lines)
    config = (qwen35_27b() if size == "27B" else qwen35_35b_a3b()).with_fp8()
    source = target_source(folder, dataclasses.replace(config, fp8=None))
    assert source.config == config
    scales = [entry for entry in source.chosen if entry.leaf.path[-1].endswith("scale")]
    assert len(scales) == matrices
    # No block was cut: a scale in memory for each in the files.
    parts = {part.name: part.shape for entry in scales for part in entry.layout}
    in_leaves = sum(math.prod(entry.leaf.shape) for entry in scales)
    assert sum(map(math.prod, parts.values())) == in_leaves
    models = Models(config, None, RunConfig(draft_tokens=0, batch=1, max_context=64))
    flat, _ = jax.tree_util.tree_flatten_with_path(abstract_params(models).target)
    modules = {tuple(key.key for key in path): leaf.shape for path, leaf in flat}
    assert {entry.leaf.path: entry.leaf.shape for entry in source.chosen} == modules


# Converted


def test_converted_float8_files_load_with_the_same_bytes(tmp_path):
    tensors = in_fp8(target_tensors(True), 24, 40, dense=("layers.1.",))
    config, direct = loaded(tmp_path / "hf", tensors, (24, 40), True)
    assert convert(plan_target(tmp_path / "hf", tmp_path / "out", "bfloat16"))
    again, params = load_target(tmp_path / "out", DtypePolicy(), public_vocab=250)
    assert again == config
    assert jax.tree.structure(params) == jax.tree.structure(direct)
    for path, leaf in leaves(direct).items():
        assert_same_bits(leaves(params)[path], leaf)
    report = inspect_folder(tmp_path / "out", public_vocab=250)
    assert report.faults == ()
    assert f"  fp8: {config.fp8.count} matrices in blocks of 24 x 40" in report.lines


def test_float8_weights_that_are_nan_are_listed_and_leave_nothing_whole(tmp_path):
    tensors = in_fp8(target_tensors(True), 16, 32)
    stem = PREFIX + "layers.1."
    bad = {f"{stem}mlp.experts.down_proj": [(0, 0, 0), (2, 5, 1)],
           f"{stem}linear_attn.in_proj_z.weight": [(-1, -1)]}
    assert {tensors[name].dtype for name in bad} == {np.dtype(FP8)}
    for name, places in bad.items():
        for place, byte in zip(places, (0x7F, 0xFF), strict=False):
            tensors[name].view(np.uint8)[place] = byte
    write(tmp_path / "hf", config_json(True, (16, 32)), tensors)
    with pytest.raises(WeightsError) as error:
        convert(plan_target(tmp_path / "hf", tmp_path / "out", "bfloat16"))
    assert sorted(error.value.faults) == [
        f"{name}: expected finite values, got {len(bad[name])} that are not" for name in sorted(bad)
    ]
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError):
        load_target(tmp_path / ".out.partial", DtypePolicy())


def test_a_dense_folder_from_before_there_was_float8_still_loads(tmp_path):
    write(tmp_path / "hf", target_json(tiny_target()), target_tensors())
    convert(plan_target(tmp_path / "hf", tmp_path / "out", "bfloat16"))
    file = tmp_path / "out" / "manifest.json"
    manifest = json.loads(file.read_text())
    assert manifest["geometry"].pop("fp8", "absent") is None
    file.write_text(json.dumps(manifest))
    config, _ = load_target(tmp_path / "out", DtypePolicy(), public_vocab=250)
    assert config == tiny_target()


def test_a_manifest_whose_float8_matrices_are_not_the_items_is_refused(tmp_path):
    write(tmp_path / "hf", config_json(False, (16, 32)), in_fp8(target_tensors(), 16, 32))
    convert(plan_target(tmp_path / "hf", tmp_path / "out", "bfloat16"))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())

    def faults(change):
        changed = json.loads(json.dumps(manifest))
        change(changed["geometry"])
        (tmp_path / "out" / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(WeightsError) as error:
            load_target(tmp_path / "out", DtypePolicy(), public_vocab=250)
        return error.value.faults

    (line,) = faults(lambda geometry: geometry["fp8"].update(layers=[[]]))
    assert "geometry: fp8: fp8.layers: expected 4 layers" in line
    (line,) = faults(lambda geometry: geometry.update(fp8=[]))
    assert "geometry: fp8: " in line
    # As in folders from before there was float8: dense, which these items are not.
    found = faults(lambda geometry: geometry.pop("fp8"))
    assert len([fault for fault in found if "/scale: unmapped" in fault]) == 16
    found = faults(lambda geometry: geometry["fp8"]["layers"][0].remove("mlp/down"))
    assert "layers_0/mlp/down/scale: unmapped, no parameter takes it" in found
    assert len(found) == 2
