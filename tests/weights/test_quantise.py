"""Dense targets converted to float8: the formula, one result by every way, and nothing partial."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.config import DtypePolicy, RunConfig, qwen35_27b, tiny_target
from dflash_jax.engine.generate import generate
from dflash_jax.steps import Models, Params
from dflash_jax.weights import (
    WeightsError,
    inspect_folder,
    load_draft,
    load_target,
    read_target_config,
)
from dflash_jax.weights import quantise as module
from dflash_jax.weights.conversion import convert, plan_target
from dflash_jax.weights.export import target_json
from dflash_jax.weights.files import TensorFiles
from dflash_jax.weights.fingerprint import fingerprint
from dflash_jax.weights.quantise import QuantisedFiles, quantise
from dflash_jax.weights.source import target_source
from scripts.convert_weights import main
from tests.oracles import block_scaled_linear as oracle
from tests.tolerances import assert_same_bits
from tests.weights import official
from tests.weights.handmade import draft_tensors, in_fp8, target_tensors, write
from tests.weights.test_block_scaled import FP8, PREFIX, leaves, split_experts
from tests.weights.test_conversion import SHIPPED, handmade_draft


@pytest.mark.parametrize("shape", [(1, 130, 200), (3, 5, 128), (2, 256, 1)])
def test_values_and_scales_follow_the_formula(shape):
    weights = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weights[0, :4] *= 1e-6
    values, scale = quantise(weights, (128, 128))
    assert values.dtype == FP8 and scale.dtype == np.float32
    for matrix, got, s in zip(weights, values, scale, strict=True):
        exact, wanted = oracle.quantise(matrix.astype(np.float64), 128, 128)
        np.testing.assert_allclose(s, wanted, rtol=1e-7)
        # Half a float8 step: 2^-4 of a normal value, 2^-10 of a subnormal one.
        error = np.abs(got.astype(np.float64) - exact)
        assert (error <= np.maximum(np.abs(exact) * 2.0**-4, 2.0**-10) * (1 + 1e-6)).all()
        # The largest of a block is the largest float8 value.
        assert np.abs(got.astype(np.float32)).max() == 448


def test_blocks_of_zeros_and_of_tiny_values_have_scales_that_a_device_keeps():
    weights = np.zeros((1, 128, 256), np.float32)
    weights[0, 0, 128] = 1e-38
    values, scale = quantise(weights, (128, 128))
    assert scale[0, 0, 0] == 1 and scale[0, 0, 1] == np.finfo(np.float32).tiny
    np.testing.assert_array_equal(values[0, :, :128].astype(np.float32), 0)
    assert np.isfinite(values.astype(np.float32)).all()


def test_float8_values_come_back_from_their_own_weights():
    """Quantising what a float8 matrix means gives its values and scales again, bit for bit."""
    bits = np.random.default_rng(1).integers(0, 256, (1, 128, 256)).astype(np.uint8)
    values = np.where(bits & 0x7F == 0x7F, 0, bits).astype(np.uint8).view(FP8)
    values[0, 0, [0, 128]] = 448
    scale = np.array([[[0.5, 3.0]]], np.float32)
    weights = values.astype(np.float32) * np.repeat(scale, 128, axis=2)
    again, scales = quantise(weights, (128, 128))
    assert_same_bits(scales, scale)
    np.testing.assert_array_equal(again.astype(np.float32), values.astype(np.float32))


@pytest.mark.parametrize("piece", [1, 40 * 128, 1 << 24])
def test_pieces_end_anywhere_and_give_the_same(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(module, "_PIECE", piece)
    tensors = {"a": np.zeros((40, 48)), "b": np.zeros((3, 40, 48)), "c": np.zeros(4)}
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(size=a.shape).astype(np.float32) for n, a in tensors.items()}
    write(tmp_path, {}, tensors, dtype="float32")
    files = QuantisedFiles(TensorFiles(tmp_path), frozenset("ab"), (16, 32))
    assert files.names == ("a", "a_scale_inv", "b", "b_scale_inv", "c")
    for name in "ab":
        values, scale = quantise(tensors[name].reshape(-1, 40, 48), (16, 32))
        assert (files.dtype(name), files.dtype(f"{name}_scale_inv")) == ("F8_E4M3", "F32")
        # Scales first, so that the matrix is read for them; then again as what it left.
        for order in ((f"{name}_scale_inv", name), (name, f"{name}_scale_inv")):
            for asked in order:
                expected = scale if asked.endswith("inv") else values
                expected = expected.reshape(files.shape(asked))
                assert_same_bits(files.read(asked), expected)
    assert_same_bits(files.read("c"), tensors["c"])


@pytest.mark.parametrize("moe", [False, True])
def test_converting_dense_files_equals_loading_a_float8_release_of_them(tmp_path, moe):
    """That release has float32 scales; loaded directly and converted alike."""
    dense = split_experts(target_tensors(moe))
    content = target_json(tiny_target(moe))
    write(tmp_path / "dense", content, dense)
    released = dict(dense)
    for name in in_fp8(dense, 128, 128):
        if name.endswith("_scale_inv"):
            matrix = name.removesuffix("_scale_inv")
            values, scale = quantise(dense[matrix][None], (128, 128))
            released |= {matrix: values[0], name: scale[0]}
    small = {n: a for n, a in released.items() if a.dtype == FP8 or n.endswith("_scale_inv")}
    rest = {n: a.astype(ml_dtypes.bfloat16) for n, a in released.items() if n not in small}
    write(tmp_path / "fp8", content, small | rest, dtype="float32")
    for name, dtype in (("dense", "fp8"), ("fp8", "fp8"), ("fp8", "bfloat16")):
        out = tmp_path / f"{name} {dtype}"
        assert convert(plan_target(tmp_path / name, out, dtype))
        config, params = load_target(out, DtypePolicy(), public_vocab=250)
        expected, direct = load_target(tmp_path / "fp8", DtypePolicy(), public_vocab=250)
        assert config == expected == tiny_target(moe).with_fp8()
        assert jax.tree.structure(params) == jax.tree.structure(direct)
        for path, leaf in leaves(direct).items():
            assert_same_bits(leaves(params)[path], leaf)


def test_the_shipped_target_converts_by_the_command_and_says_so(tmp_path, capsys):
    command = ["--target", str(SHIPPED / "target"), "--draft", str(SHIPPED / "dflash")]
    command += ["--out", str(tmp_path), "--dtype", "fp8"]
    assert main([*command, "--dry-run"]) == 0
    assert "tensors quantised to float8" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())
    assert main(command) == 0
    manifest = json.loads((tmp_path / "target" / "manifest.json").read_text())
    config, params = load_target(tmp_path / "target", DtypePolicy())
    assert config == read_target_config(SHIPPED / "target").with_fp8()
    assert params["embedding"].dtype == "bfloat16"
    report = inspect_folder(tmp_path / "target")
    assert report.faults == ()
    assert f"  fp8: {config.fp8.count} matrices in blocks of 128 x 128" in report.lines
    assert f"{manifest['quantised']} tensors quantised to float8" in report.lines[-1]
    draft = json.loads((tmp_path / "draft" / "manifest.json").read_text())
    assert draft["dtype"] == "bfloat16" and "quantised" not in draft


def test_another_dtype_does_not_go_on_from_this_one(tmp_path):
    write(tmp_path / "dense", target_json(tiny_target()), target_tensors())
    assert convert(plan_target(tmp_path / "dense", tmp_path / "out", "fp8"))
    assert not convert(plan_target(tmp_path / "dense", tmp_path / "out", "fp8"))
    with pytest.raises(ValueError, match="out: expected a new folder"):
        convert(plan_target(tmp_path / "dense", tmp_path / "out", "bfloat16"))


def test_weights_that_are_not_finite_are_named_and_leave_nothing_whole(tmp_path):
    tensors = target_tensors()
    name = PREFIX + "layers.2.mlp.down_proj.weight"
    tensors[name][0, 0] = np.inf
    write(tmp_path / "dense", target_json(tiny_target()), tensors)
    with pytest.raises(WeightsError, match=f"{name}: expected finite weights to quantise"):
        convert(plan_target(tmp_path / "dense", tmp_path / "out", "fp8"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError):
        load_target(tmp_path / ".out.partial", DtypePolicy())


def test_faults_of_dense_files_are_those_of_any_conversion(tmp_path):
    tensors = target_tensors()
    up = PREFIX + "layers.0.mlp.up_proj.weight"
    tensors[up] = tensors[up][:, :-1]
    del tensors[PREFIX + "layers.0.mlp.down_proj.weight"]
    tensors["stray"] = np.zeros(1, np.float32)
    write(tmp_path / "dense", target_json(tiny_target()), tensors)
    with pytest.raises(WeightsError) as error:
        plan_target(tmp_path / "dense", tmp_path / "out", "fp8")
    assert f"{up}: expected shape (96, 64), got (96, 63)" in error.value.faults
    assert "layers.0.mlp.down_proj.weight: missing" in error.value.faults
    assert "stray: unmapped, no parameter takes it" in error.value.faults
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_drafts_are_not_quantised(tmp_path):
    folder = handmade_draft(tmp_path / "draft")
    assert {a.dtype for a in draft_tensors(True).values()} == {np.dtype("float32")}
    write(tmp_path / "target", target_json(tiny_target()), target_tensors())
    command = ["--target", str(tmp_path / "target"), "--draft", str(folder), "--dtype", "fp8"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    manifest = json.loads((tmp_path / "out" / "draft" / "manifest.json").read_text())
    dtypes = {entry["dtype"] for item in manifest["items"].values() for entry in item.values()}
    assert dtypes == {"bfloat16", "float32"}


def test_the_official_27b_is_planned_as_its_float8_release(tmp_path):
    official.write_folder(tmp_path, official.target_config("27B"), official.target_shapes("27B"))
    config = read_target_config(tmp_path, public_vocab=248077)
    source = target_source(tmp_path, config, quantised_to_fp8=True)
    assert source.faults == () and source.config == qwen35_27b().with_fp8()


def test_the_fingerprint_of_weights_sees_values_and_scales(tmp_path):
    write(tmp_path / "dense", target_json(tiny_target()), target_tensors())
    convert(plan_target(tmp_path / "dense", tmp_path / "out", "fp8"))
    found = set()
    for leaf, value in ((None, 0), ("scale", 2), ("kernel", 3)):
        _, weights = load_target(tmp_path / "out", DtypePolicy(), public_vocab=250)
        if leaf is not None:
            module = weights["layers_0"]["mlp"]["down"]
            module[leaf] = module[leaf].at[0, 0].set(value)
        found.add(fingerprint(weights))
    assert len(found) == 3


@pytest.mark.slow
def test_the_shipped_pair_decodes_a_float8_target_by_rounds_as_it_does_plainly(tmp_path):
    """Greedy text, token for token."""
    assert convert(plan_target(SHIPPED / "target", tmp_path / "target", "fp8"))
    policy = DtypePolicy.exact()
    target, weights = load_target(tmp_path / "target", policy)
    draft, draft_weights = load_draft(SHIPPED / "dflash2", target, policy)
    prompts = [list(range(40, 60)), [7, 8, 9]]
    texts = []
    for config, params, tokens in ((draft, draft_weights, 7), (None, {}, 0)):
        run = RunConfig(draft_tokens=tokens, batch=2, max_context=128, dtypes=policy)
        outputs = generate(
            Models(target, config, run), Params(target=weights, draft=params), prompts,
            max_new_tokens=24,
        )  # fmt: skip
        texts.append([output.tokens for output in outputs])
    assert texts[0] == texts[1] and all(len(tokens) == 24 for tokens in texts[0])
