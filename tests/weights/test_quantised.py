"""Quantised folders are recognised by their tensors and refused by name (pitfalls F6)."""

import json

import pytest

from dflash_jax.config import DtypePolicy
from dflash_jax.weights import WeightsError, load_target
from dflash_jax.weights.quantised import recognise
from tests.weights import official

LINEAR = "model.language_model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("tensors", "scheme"),
    [
        (
            {"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32"},
            "NVFP4 (compressed-tensors)",
        ),
        (
            {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"},
            "NVFP4 (ModelOpt)",
        ),
        ({"qweight": "I32", "scales": "F16", "qzeros": "I32", "g_idx": "I32"}, "GPTQ"),
        ({"qweight": "I32", "scales": "F16", "qzeros": "I32"}, "AWQ"),
        (
            {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"},
            "W4A16 (compressed-tensors)",
        ),
        ({"weight_packed": "U8", "weight_scale": "U8"}, "MXFP4 (AutoRound)"),
        ({"weight": "U32", "scales": "BF16", "biases": "BF16"}, "MLX"),
        ({"weight": "F8_E4M3", "weight_scale_inv": "BF16"}, "FP8, block-scaled"),
        ({"weight": "F8_E4M3", "weight_scale": "F32", "input_scale": "F32"}, "FP8"),
        ({"weight": "F8_E4M3"}, "FP8 without scales"),
    ],
)
def test_f6_a_scheme_is_named_by_its_tensors_among_dense_ones(tensors, scheme):
    dense = {"model.norm.weight": "BF16", "mtp.fc.weight": "BF16"}
    line = recognise(dense | {f"{LINEAR}.{end}": dtype for end, dtype in tensors.items()})
    assert f"this is {scheme} (1 such tensors); needed: " in line
    assert "use the original bfloat16 release" in line


def test_dense_files_are_no_scheme():
    assert recognise(dict.fromkeys(official.target_shapes("35B-A3B"), "BF16")) is None
    for _, shapes in official.DRAFTS.values():
        assert recognise(dict.fromkeys(shapes, "BF16")) is None


def test_gguf_is_named_by_tensor_names_and_by_files(tmp_path):
    assert "this is GGUF" in recognise({"blk.0.ssm_conv1d.weight": "F32"})
    (tmp_path / "config.json").write_text(json.dumps(official.target_config("27B")))
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(WeightsError) as error:
        load_target(tmp_path, DtypePolicy(), public_vocab=248077)
    assert "model-Q4_K_M.gguf: quantised weights are not implemented, this is GGUF" in str(
        error.value
    )


def test_a_quantised_release_is_refused_in_one_line_not_one_for_each_tensor(tmp_path):
    shapes, dtypes = {}, {}
    for name, shape in official.target_shapes("27B").items():
        stem = name.removesuffix(".weight")
        if name.startswith("model.language_model.layers.") and stem.endswith("_proj"):
            shapes |= {f"{stem}.weight_packed": (shape[0], shape[1] // 2)}
            shapes |= {f"{stem}.weight_scale": (shape[0], shape[1] // 16)}
            shapes |= {f"{stem}.weight_global_scale": (1,)}
            dtypes |= {f"{stem}.weight_packed": "U8", f"{stem}.weight_scale": "F8_E4M3"}
        else:
            shapes[name] = shape
    official.write_folder(tmp_path, official.target_config("27B"), shapes, dtypes)
    with pytest.raises(WeightsError) as error:
        load_target(tmp_path, DtypePolicy(), public_vocab=248077)
    (line,) = error.value.faults
    assert "this is NVFP4 (compressed-tensors) (304 such tensors)" in line
