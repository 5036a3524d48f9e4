"""Files -> fused leaves: every row is where the interfaces say, and every fault is listed."""

import json
import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.config import (
    DraftKind,
    DtypePolicy,
    dflash2_27b,
    dflash2_35b_a3b,
    dflash_35b_a3b,
    tiny_draft,
    tiny_target,
)
from dflash_jax.weights import WeightsError, load_draft, load_target, names
from dflash_jax.weights.export import draft_json, target_json
from tests.weights.handmade import draft_tensors, target_tensors, write

FIRST, SECOND = DraftKind.DFLASH, DraftKind.DFLASH2
EXACT, MIXED = DtypePolicy.exact(), DtypePolicy()
TARGET = tiny_target()


def load(folder, tensors, *, moe=False, tied=False, policy=EXACT, **how):
    content = target_json(tiny_target(moe, tie_embeddings=tied))
    return load_target(write(folder, content, tensors, **how), policy, public_vocab=250)[1]


def load_second(folder, tensors, kind=SECOND, policy=EXACT, **how):
    """A draft's config and parameters; TARGET has 250 public ids."""
    folder = write(folder, draft_json(tiny_draft(kind)), tensors, **how)
    return load_draft(folder, TARGET, policy)


def leaves(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in flat}


def assert_same(actual, expected):
    actual, expected = leaves(actual), leaves(expected)
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        assert actual[path].dtype == value.dtype, path
        np.testing.assert_array_equal(actual[path], value, err_msg=path)


@pytest.fixture(scope="module")
def dense():
    return target_tensors()


def rows(*parts):
    return np.concatenate(parts)


def under(tensors, prefix):
    return {n.removeprefix(prefix): a for n, a in tensors.items() if n.startswith(prefix)}


# Where the rows go


def test_full_attention_rows_split_query_and_gate_per_head(tmp_path, dense):
    layer = leaves(load(tmp_path, dense)["layers_3"])
    file = under(dense, "model.language_model.layers.3.")
    q = file["self_attn.q_proj.weight"]
    query = rows(*(q[h * 64 : h * 64 + 32] for h in range(4)))
    gate = rows(*(q[h * 64 + 32 : h * 64 + 64] for h in range(4)))
    k, v = file["self_attn.k_proj.weight"], file["self_attn.v_proj.weight"]
    np.testing.assert_array_equal(layer["attention/qgkv/kernel"], rows(query, gate, k, v))
    for path, name in {
        "attention/output/kernel": "self_attn.o_proj.weight",
        "attention/query_norm/weight": "self_attn.q_norm.weight",
        "attention/key_norm/weight": "self_attn.k_norm.weight",
        "input_norm/weight": "input_layernorm.weight",
        "post_norm/weight": "post_attention_layernorm.weight",
        "mlp/down/kernel": "mlp.down_proj.weight",
    }.items():
        np.testing.assert_array_equal(layer[path], file[name], err_msg=path)
    gate_up = rows(file["mlp.gate_proj.weight"], file["mlp.up_proj.weight"])
    np.testing.assert_array_equal(layer["mlp/gate_up/kernel"], gate_up)
    assert len(layer) == 8


def test_linear_attention_rows_and_taps(tmp_path, dense):
    layer = leaves(load(tmp_path, dense)["layers_1"]["delta_net"])
    file = under(dense, "model.language_model.layers.1.linear_attn.")
    fused = rows(*(file[f"in_proj_{part}.weight"] for part in ("qkv", "z", "a", "b")))
    assert layer["in_proj/kernel"].shape == (128 + 64 + 8, 64)
    np.testing.assert_array_equal(layer["in_proj/kernel"], fused)
    np.testing.assert_array_equal(layer["conv"], file["conv1d.weight"].reshape(128, 4))
    for path, name in {
        "A_log": "A_log",
        "dt_bias": "dt_bias",
        "norm/weight": "norm.weight",
        "output/kernel": "out_proj.weight",
    }.items():
        np.testing.assert_array_equal(layer[path], file[name], err_msg=path)
    assert len(layer) == 6


def test_embedding_head_and_final_norm(tmp_path, dense):
    params = load(tmp_path, dense)
    for leaf, name in (
        (params["embedding"], "model.language_model.embed_tokens.weight"),
        (params["head"], "lm_head.weight"),
        (params["final_norm"]["weight"], "model.language_model.norm.weight"),
    ):
        np.testing.assert_array_equal(leaf, dense[name])


def test_f3_tied_target_has_no_head(tmp_path, dense):
    tensors = dict(dense)
    del tensors["lm_head.weight"]
    assert "head" not in load(tmp_path, tensors, tied=True)
    with pytest.raises(WeightsError, match="lm_head.weight: unmapped"):
        load(tmp_path, dense, tied=True)


def test_router_and_experts_stacked_or_one_by_one(tmp_path):
    tensors = target_tensors(moe=True)
    stacked = load(tmp_path / "stacked", tensors, moe=True)
    moe = stacked["layers_0"]["moe"]
    prefix = "model.language_model.layers.0.mlp."
    router = rows(tensors[prefix + "gate.weight"], tensors[prefix + "shared_expert_gate.weight"])
    np.testing.assert_array_equal(moe["router"]["kernel"], router)
    np.testing.assert_array_equal(moe["gate_up"], tensors[prefix + "experts.gate_up_proj"])
    np.testing.assert_array_equal(moe["down"], tensors[prefix + "experts.down_proj"])
    shared = rows(*(tensors[f"{prefix}shared_expert.{n}_proj.weight"] for n in ("gate", "up")))
    np.testing.assert_array_equal(moe["shared"]["gate_up"]["kernel"], shared)
    single = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            single |= {f"{stem}{e}.gate_proj.weight": value[e, :16] for e in range(8)}
            single |= {f"{stem}{e}.up_proj.weight": value[e, 16:] for e in range(8)}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            single |= {f"{stem}{e}.down_proj.weight": value[e] for e in range(8)}
        else:
            single[name] = value
    assert_same(load(tmp_path / "single", single, moe=True), stacked)


def test_draft_rows_and_context_copies(tmp_path):
    tensors = draft_tensors()
    config, params = load_second(tmp_path, tensors, FIRST)
    assert config == tiny_draft(FIRST)
    flat = leaves(params)
    attention = [
        {n: tensors[f"layers.{i}.self_attn.{n}_proj.weight"] for n in "qkv"} for i in range(2)
    ]
    for i, part in enumerate(attention):
        fused = rows(part["q"], part["k"], part["v"])
        np.testing.assert_array_equal(flat[f"layers_{i}/attention/qkv/kernel"], fused)
    context = rows(*(part[n] for part in attention for n in "kv"))
    np.testing.assert_array_equal(flat["context/key_value/kernel"], context)
    norms = np.stack([tensors[f"layers.{i}.self_attn.k_norm.weight"] for i in range(2)])
    np.testing.assert_array_equal(flat["context/key_norm"], norms)
    for path, name in {
        "context/feature_projection/kernel": "fc.weight",
        "context/norm/weight": "hidden_norm.weight",
        "final_norm/weight": "norm.weight",
        "layers_1/attention/output/kernel": "layers.1.self_attn.o_proj.weight",
        "layers_1/attention/key_norm/weight": "layers.1.self_attn.k_norm.weight",
    }.items():
        np.testing.assert_array_equal(flat[path], tensors[name], err_msg=path)
    assert len(flat) == 5 + 2 * 8


def test_second_draft_adds_convolutions_and_selector(tmp_path):
    tensors = draft_tensors(second=True)
    flat = leaves(load_second(tmp_path, tensors)[1])
    expected = {"selector/projection/kernel": "candidate_selector.hidden_projection.weight"}
    for end in ("predecessor", "successor"):
        expected[f"selector/{end}"] = f"candidate_selector.{end}_codebook"
    for i in range(2):
        for conv in ("attention_conv", "mlp_conv"):
            source, path = f"layers.{i}.{conv}", f"layers_{i}/{conv}"
            expected[f"{path}/base"] = f"{source}.base_kernel"
            expected[f"{path}/projection/kernel"] = f"{source}.kernel_projection.weight"
    for path, name in expected.items():
        np.testing.assert_array_equal(flat[path], tensors[name], err_msg=path)
    assert len(flat) == 5 + 2 * 12 + 3


# Dtypes


def test_matrices_follow_the_policy_and_vectors_stay_float32(tmp_path, dense):
    flat = leaves(load(tmp_path, dense, policy=MIXED))
    for path, value in flat.items():
        vector = "norm" in path or path.endswith(("conv", "A_log", "dt_bias"))
        assert value.dtype == ("float32" if vector else "bfloat16"), path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_file_dtype_does_not_matter(tmp_path, dense, dtype):
    expected = load(tmp_path / "a", dense)
    assert_same(load(tmp_path / "b", dense, dtype=dtype), expected)


def test_float16_files_load_with_their_own_rounding(tmp_path):
    tensors = draft_tensors(second=True)
    flat = leaves(load_second(tmp_path, tensors, dtype="float16")[1])
    kernel = tensors["fc.weight"].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(flat["context/feature_projection/kernel"], kernel)


def test_float32_vectors_in_a_bfloat16_file_keep_their_bits(tmp_path, dense):
    """Some files store A_log and the GDN norm in float32 with values bfloat16 cannot hold."""
    fine = np.float32(1) + np.arange(4, dtype=np.float32) * np.float32(2**-20)
    name = "model.language_model.layers.0.linear_attn.A_log"
    params = load(tmp_path, dense | {name: fine}, dtype="float32", policy=MIXED)
    np.testing.assert_array_equal(params["layers_0"]["delta_net"]["A_log"], fine)


# Spellings


@pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
def test_prefixes_of_other_exports(tmp_path, dense, prefix):
    moved = {name.replace("model.language_model.", prefix): a for name, a in dense.items()}
    assert_same(load(tmp_path / "a", moved), load(tmp_path / "b", dense))


def test_shards_with_an_index_give_the_same_parameters(tmp_path, dense):
    assert_same(load(tmp_path / "a", dense, shards=3), load(tmp_path / "b", dense))


def test_vision_and_mtp_tensors_are_ignored(tmp_path, dense):
    extra = {
        "mtp.fc.weight": np.zeros((2, 2), np.float32),
        "model.visual.blocks.0.attn.qkv.bias": np.zeros(3, np.float32),
    }
    assert_same(load(tmp_path / "a", dense | extra), load(tmp_path / "b", dense))


def test_f5_codebooks_and_base_kernels_with_weight_and_other_aliases(tmp_path):
    tensors = draft_tensors(second=True)
    renamed = {}
    for name, value in tensors.items():
        if name.endswith(("codebook", "base_kernel")):
            name += ".weight"
        name = {
            "fc.weight": "encoder.fc.weight",
            "hidden_norm.weight": "encoder.output_norm_enc.weight",
        }.get(name, name)
        renamed["model." + name] = value
    expected = load_second(tmp_path / "b", tensors)[1]
    assert_same(load_second(tmp_path / "a", renamed)[1], expected)


def test_fused_qkv_of_a_draft(tmp_path):
    tensors = draft_tensors()
    fused = dict(tensors)
    for i in range(2):
        stem = f"layers.{i}.self_attn."
        parts = [fused.pop(f"{stem}{n}_proj.weight") for n in "qkv"]
        fused[stem + "qkv_proj.weight"] = rows(*parts)
    expected = load_second(tmp_path / "b", tensors, FIRST)[1]
    assert_same(load_second(tmp_path / "a", fused, FIRST)[1], expected)


# Faults


def test_all_faults_are_raised_together(tmp_path, dense):
    stem = "model.language_model.layers.0."
    tensors = dict(dense)
    del tensors[stem + "mlp.up_proj.weight"]
    tensors[stem + "mlp.down_proj.weight"] = np.zeros((64, 95), np.float32)
    tensors[stem + "mlp.down_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.norm.weight"] = np.zeros(64, np.float32)
    with pytest.raises(WeightsError) as error:
        load(tmp_path, tensors)
    assert error.value.faults == (
        "layers.0.mlp.up_proj.weight: missing",
        "model.language_model.layers.0.mlp.down_proj.bias: unmapped, no parameter takes it",
        "model.language_model.layers.0.mlp.down_proj.weight: expected shape (64, 96), got (64, 95)",
        "model.norm.weight: doubled, same tensor as model.language_model.norm.weight",
    )
    assert all(fault in str(error.value) for fault in error.value.faults)


def test_both_spellings_of_one_content_are_doubled(tmp_path):
    tensors = draft_tensors()
    fused = rows(*(tensors[f"layers.0.self_attn.{n}_proj.weight"] for n in "qkv"))
    tensors["layers.0.self_attn.qkv_proj.weight"] = fused
    with pytest.raises(WeightsError, match="layers.0.self_attn.qkv_proj.weight: doubled"):
        load_second(tmp_path, tensors, FIRST)


def test_second_backend_tensors_under_the_first_are_an_error(tmp_path):
    with pytest.raises(WeightsError, match="mlp_conv.base_kernel: unmapped.*a DFlash2 tensor"):
        load_second(tmp_path, draft_tensors(second=True), FIRST)
    with pytest.raises(WeightsError, match="candidate_selector.successor_codebook: missing"):
        load_second(tmp_path / "b", draft_tensors(second=False), SECOND)


@pytest.mark.parametrize(
    "suffix",
    ["weight_scale", "weight_packed", "weight_global_scale", "weight_scale_2"]
    + ["qweight", "qzeros", "g_idx", "scales", "biases"],
)
def test_quantised_files_are_refused_by_name(tmp_path, dense, suffix):
    name = f"model.language_model.layers.0.mlp.up_proj.{suffix}"
    with pytest.raises(WeightsError, match=f"up_proj.{suffix}: quantised"):
        load(tmp_path, dense | {name: np.zeros((1, 1), np.float32)})


def test_integer_matrix_is_refused_by_dtype(tmp_path, dense):
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    with pytest.raises(WeightsError, match="expected dtype .* got U8"):
        load(tmp_path, dense | {name: np.zeros((96, 64), np.uint8)})


def test_missing_files_and_shards(tmp_path, dense):
    folder = write(tmp_path, target_json(TARGET), dense, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match="model-00002-of-00002.safetensors: named by the index"):
        load_target(folder, EXACT)
    for file in folder.glob("model*"):
        file.unlink()
    with pytest.raises(WeightsError, match="model.safetensors: absent"):
        load_target(folder, EXACT)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "expected JSON, got "),
        ("[]", "expected an object, got list"),
        ("{}", "expected weight_map to be an object, got None"),
        ('{"weight_map": {}}', "expected weight_map to be an object, got an empty one"),
        ('{"weight_map": ["a"]}', "expected weight_map to be an object, got "),
        ('{"weight_map": "a"}', "expected weight_map to be an object, got "),
        ('{"weight_map": {"a": ["b"]}}', r"expected weight_map\['a'\] to be a file name, got "),
        ('{"weight_map": {"a": 5, "b": "c"}}', r"expected weight_map\['a'\] to be a file name"),
    ],
)
def test_an_index_that_maps_no_names_to_files_is_named(tmp_path, dense, content, expected):
    folder = write(tmp_path, target_json(TARGET), dense, shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=f"model.safetensors.index.json: {expected}"):
        load_target(folder, EXACT)


def test_shards_must_agree_with_their_index(tmp_path, dense):
    folder = write(tmp_path, target_json(TARGET), dense, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    twice = {"lm_head.weight": np.zeros((1, 1), np.float32)}
    for shard in folder.glob("*.safetensors"):
        save_file(load_file(shard) | twice, shard)
    with pytest.raises(WeightsError) as error:
        load_target(folder, EXACT)
    assert error.value.faults == (
        "lm_head.weight: expected shape (257, 64), got (1, 1)",
        "lm_head.weight: in two shards",
        "model.ghost: named by the index, in no shard",
    )


def test_norms_that_already_hold_one_plus_w_are_reported(tmp_path, dense, caplog):
    load(tmp_path / "a", dense)
    assert "1 + w" not in caplog.text
    shifted = {n: a + 1 if n.endswith("input_layernorm.weight") else a for n, a in dense.items()}
    load(tmp_path / "b", shifted)
    assert "1 + w" in caplog.text


# Published sizes: tensor count and parameters of released drafts (checkpoints.md 2.2)


@pytest.mark.parametrize(
    ("draft", "tensors", "parameters"),
    [
        (dflash_35b_a3b, 69, 385_906_176),
        (dflash2_27b, 81, 1_924_404_480),
        (dflash2_35b_a3b, 96, 526_251_520),
    ],
)
def test_released_drafts_have_the_published_size(draft, tensors, parameters):
    plan, _ = names.draft_plan(draft())
    shapes = {part.name: part.shape for leaf in plan for part in leaf.layouts[0]}
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters
