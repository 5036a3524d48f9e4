"""Official layouts resolve with exact counts from headers alone; damaged variants are refused."""

import json
import math
import shutil

import jax
import pytest

from dflash_jax.config import (
    ConfigError,
    DraftKind,
    DtypePolicy,
    RunConfig,
    dflash2_27b,
    dflash_27b,
    dflash_35b_a3b,
    qwen35_4b,
    qwen35_9b,
    qwen35_27b,
    qwen35_35b_a3b,
    tiny_draft,
    tiny_target,
)
from dflash_jax.steps import Models
from dflash_jax.steps.init import abstract_params
from dflash_jax.weights import (
    WeightsError,
    load_draft,
    load_target,
    read_draft_config,
    read_target_config,
)
from dflash_jax.weights.export import draft_json
from dflash_jax.weights.source import draft_source, target_source
from tests.weights import official
from tests.weights.handmade import draft_tensors, write

TARGETS = {
    "4B": qwen35_4b,
    "9B": qwen35_9b,
    "27B": qwen35_27b,
    "35B-A3B": qwen35_35b_a3b,
}
PRESETS = {
    "27B-DFlash2": dflash2_27b,
    "27B-DFlash": dflash_27b,
    "35B-A3B-DFlash": dflash_35b_a3b,
}
PUBLIC = 248077
POLICY = DtypePolicy()


def target(folder, size, *, dtypes=None, shards=1, **how):
    shapes = official.target_shapes(size, **how)
    official.write_folder(folder, official.target_config(size), shapes, dtypes, shards)
    return target_source(folder, read_target_config(folder, public_vocab=PUBLIC))


def draft(folder, release, shapes=None, dtypes=None):
    size, original = official.DRAFTS[release]
    config = official.draft_config(release)
    official.write_folder(folder, config, shapes or original, dtypes)
    resolved = read_draft_config(folder, TARGETS[size]())
    return draft_source(folder, resolved, PUBLIC)


def used(source):
    """Stored tensors that become parameters: number and elements."""
    names = {source.stored[part.name] for entry in source.chosen for part in entry.layout}
    return len(names), sum(math.prod(source.files.shape(name)) for name in names)


# Counts


@pytest.mark.parametrize(
    ("release", "tensors", "parameters"),
    [
        ("27B-DFlash2", 81, 1_924_404_480),
        ("35B-A3B-DFlash", 69, 385_906_176),
        ("27B-DFlash", 58, 1_730_213_120),
    ],
)
def test_a_released_draft_resolves_with_its_published_counts(
    tmp_path, release, tensors, parameters
):
    source = draft(tmp_path, release)
    source.check()
    assert source.config == PRESETS[release]()
    assert used(source) == (tensors, parameters)
    assert source.ignored == () and source.head is None


def test_the_27b_draft_file_has_the_published_size(tmp_path):
    """3,848,817,896 bytes as released: 8,936 of them are the header."""
    source = draft(tmp_path, "27B-DFlash2")
    size = (tmp_path / "model.safetensors").stat().st_size
    header = 8 + len(source.files.headers["model.safetensors"].text)
    assert size - header == 3_848_817_896 - 8_936


@pytest.mark.parametrize(
    ("size", "tensors", "total", "parameters"),
    [
        ("4B", 426, 774, 4_205_751_296),
        ("9B", 427, 775, 8_953_803_264),
        ("27B", 851, 1199, 26_895_998_464),
        ("35B-A3B", 693, 1045, 34_660_610_688),
    ],
)
def test_a_released_target_resolves_with_exact_counts(tmp_path, size, tensors, total, parameters):
    source = target(tmp_path, size, shards=26)
    source.check()
    assert source.config == TARGETS[size]()
    assert used(source) == (tensors, parameters)
    assert len(source.files.names) == total
    assert len(source.ignored) == total - tensors


def test_the_35b_release_has_its_published_parameters():
    shapes = official.target_shapes("35B-A3B")
    assert (len(shapes), official.count(shapes)) == (1045, 35_951_822_704)


@pytest.mark.parametrize(
    "how",
    [
        {"each": True},
        {"prefix": "model.", "whole": False},
        {"prefix": "language_model.model.", "whole": False},
    ],
    ids=["one tensor an expert", "text only", "wrapped the other way"],
)
def test_other_exports_of_the_35b_resolve_to_the_same_parameters(tmp_path, how):
    source = target(tmp_path, "35B-A3B", shards=2, **how)
    source.check()
    assert used(source)[1] == 34_660_610_688


def flat(config):
    """Every draft field at the top level, under a third party's class name."""
    section = config.pop("dflash_config")
    return config | section | {"architectures": ["Qwen3DFlash2Model"]}


def speculators(config):
    """Geometry in a section, block ids plus one, the mask of sliding layers as the exporter's."""
    section, geometry = config.pop("dflash_config"), dict(config)
    for name in ("architectures", "is_causal", "num_target_layers"):
        del geometry[name]
    ids = [i + 1 for i in section.pop("target_layer_ids")]
    return section | {
        "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2",
        "transformer_layer_config": geometry, "aux_hidden_state_layer_ids": ids,
        "sliding_window_non_causal": True,
    }  # fmt: skip


def prefixed(shapes):
    return {f"model.{name}": shape for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("config", "shapes"),
    [(flat, dict), (speculators, dict), (dict, prefixed), (speculators, prefixed)],
    ids=["flat", "speculators", "model. prefix", "speculators with a prefix"],
)
def test_other_exports_of_the_27b_draft_resolve_to_the_same_parameters(tmp_path, config, shapes):
    tensors = shapes(official.DRAFTS["27B-DFlash2"][1])
    written = config(official.draft_config("27B-DFlash2"))
    official.write_folder(tmp_path, written, tensors)
    source = draft_source(tmp_path, read_draft_config(tmp_path, qwen35_27b()), PUBLIC)
    source.check()
    assert source.config == dflash2_27b()
    assert used(source) == (81, 1_924_404_480)


def test_a_speculators_export_with_a_reduced_head_resolves_with_its_map(tmp_path):
    # The map is a hole and reads as offsets of zero: the first 32000 ids.
    head = {"lm_head.weight": (32000, 5120), "d2t": (32000,)}
    tensors = official.DRAFTS["27B-DFlash2"][1] | head
    written = speculators(official.draft_config("27B-DFlash2"))
    official.write_folder(tmp_path, written, tensors, {"d2t": "I64"})
    source = draft_source(tmp_path, read_draft_config(tmp_path, qwen35_27b()), PUBLIC)
    source.check()
    assert len(source.head.token_ids) == 32000
    assert used(source) == (81, 1_924_404_480)


@pytest.mark.parametrize(
    ("size", "release"), [("27B", "27B-DFlash2"), ("35B-A3B", "35B-A3B-DFlash")]
)
def test_official_leaves_are_those_of_the_modules(tmp_path, size, release):
    sources = (target(tmp_path / "t", size, shards=2), draft(tmp_path / "d", release))
    run = RunConfig(draft_tokens=7, batch=1, max_context=64)
    params = abstract_params(Models(target=sources[0].config, draft=sources[1].config, run=run))
    for source, tree in zip(sources, (params.target, params.draft), strict=True):
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        modules = {tuple(key.key for key in path): leaf.shape for path, leaf in flat}
        assert {entry.leaf.path: entry.leaf.shape for entry in source.chosen} == modules


# Damage. Nothing is placed on a device before all of it is known.


@pytest.fixture
def no_device(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("device work before the faults were raised")

    monkeypatch.setattr(jax, "device_put", refuse)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Sparse official folders; a test copies what it damages."""
    folder = tmp_path_factory.mktemp("official")
    target(folder / "target", "27B", shards=4)
    draft(folder / "draft", "27B-DFlash2")
    return folder


def copied(pair, folder, kind):
    """A copy of config and index with links to the shards."""
    folder.mkdir(exist_ok=True)
    for file in (pair / kind).iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
        else:
            (folder / file.name).symlink_to(file)
    return folder


def faults(load):
    with pytest.raises(WeightsError) as error:
        load()
    assert all(fault in str(error.value) for fault in error.value.faults)
    return error.value.faults


def of_target(folder):
    return faults(lambda: load_target(folder, POLICY, public_vocab=PUBLIC))


def of_draft(folder):
    return faults(lambda: load_draft(folder, qwen35_27b(), POLICY))


SHARD = "model-00002-of-00004.safetensors"
INDEX = "model.safetensors.index.json"


def edit_index(folder, change):
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def test_a_missing_shard_is_one_fault_not_one_for_each_of_its_tensors(tmp_path, pair, no_device):
    folder = copied(pair, tmp_path, "target")
    (folder / SHARD).unlink()
    assert of_target(folder) == (f"{SHARD}: named by the index, absent",)


def test_a_truncated_file_is_named_with_both_sizes(tmp_path, pair, no_device):
    folder = copied(pair, tmp_path, "draft")
    whole = (folder / "model.safetensors").resolve()
    (folder / "model.safetensors").unlink()
    size = whole.stat().st_size
    with open(whole, "rb") as source, open(folder / "model.safetensors", "wb") as stream:
        stream.write(source.read(1 << 16))
        stream.truncate(size - 1)
    expected = f"model.safetensors: truncated, expected {size} bytes, got {size - 1}"
    assert of_draft(folder) == (expected,)


@pytest.mark.parametrize("length", [0, 5, 8, 300])
def test_a_file_cut_inside_its_header_is_no_safetensors_file(tmp_path, pair, length, no_device):
    folder = copied(pair, tmp_path, "draft")
    with open(folder / "model.safetensors", "rb") as stream:
        head = stream.read(length)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(head)
    (fault,) = of_draft(folder)
    assert fault.startswith("model.safetensors: not a safetensors file")


def test_index_entries_that_lead_out_of_the_folder_are_refused(tmp_path, pair, no_device):
    folder = copied(pair, tmp_path / "a", "target")
    shutil.copy(pair / "target" / "config.json", tmp_path)
    (tmp_path / "outside.safetensors").symlink_to((folder / SHARD).resolve())
    for path in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "..", "a\\b"):
        edit_index(folder, lambda names, path=path: names.update({"lm_head.weight": path}))
        expected = f"{INDEX}: expected names of files in the folder, got {path!r}"
        assert expected in of_target(folder)


def test_an_index_naming_a_missing_file_is_refused(tmp_path, pair, no_device):
    folder = copied(pair, tmp_path, "target")
    edit_index(folder, lambda names: names.update({"lm_head.weight": "other.safetensors"}))
    assert of_target(folder) == ("other.safetensors: named by the index, absent",)


def rewritten(folder, pair, change, dtypes=None):
    """The 27B DFlash2 release with other tensors under the same config."""
    shapes = dict(official.DRAFTS["27B-DFlash2"][1])
    change(shapes)
    folder = copied(pair, folder, "draft")
    (folder / "model.safetensors").unlink()
    official.write_header(folder / "model.safetensors", shapes, dtypes)
    return folder


def test_all_faults_of_a_damaged_draft_are_listed_in_one_error(tmp_path, pair, no_device):
    def change(shapes):
        shapes["candidate_selector.successor_codebook"] = (official.VOCAB, 255)
        shapes["model.norm.weight"] = shapes["norm.weight"]
        shapes["layers.5.input_layernorm.weight"] = (5120,)
        del shapes["layers.4.mlp.up_proj.weight"]

    dtypes = {"layers.0.mlp.up_proj.weight": "I32", "fc.weight": "F32"}
    assert of_draft(rewritten(tmp_path, pair, change, dtypes)) == (
        "candidate_selector.successor_codebook: expected shape (248320, 256), got (248320, 255)",
        "layers.0.mlp.up_proj.weight: expected dtype out of ('BF16', 'F16', 'F32'), got I32 "
        "(quantised?)",
        "layers.4.mlp.up_proj.weight: missing",
        "layers.5.input_layernorm.weight: unmapped, no parameter takes it",
        "norm.weight: doubled, same tensor as model.norm.weight",
    )


def test_a_tensor_twice_in_one_header_is_doubled(tmp_path, pair, no_device):
    folder = rewritten(tmp_path, pair, lambda shapes: None)
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length)
    text = text.replace(b'"hidden_norm.weight"', b'"norm.weight"')
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(size - length + len(text))
    found = of_draft(folder)
    assert "norm.weight: doubled in model.safetensors" in found
    assert "hidden_norm.weight: missing" in found


def test_overlapping_tensors_are_refused(tmp_path, pair, no_device):
    folder = rewritten(tmp_path, pair, lambda shapes: None)
    with open(folder / "model.safetensors", "r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        # Both norms are [5120]: the second now lies on the first.
        header["norm.weight"]["data_offsets"] = header["hidden_norm.weight"]["data_offsets"]
        stream.seek(8)
        stream.write(json.dumps(header).encode().ljust(length))
    assert any(f.startswith("norm.weight: expected at byte") for f in of_draft(folder))


def test_a_config_of_another_geometry_is_a_fault_of_every_tensor_it_touches(tmp_path):
    config = official.draft_config("35B-A3B-DFlash") | {"intermediate_size": 6145}
    official.write_folder(tmp_path, config, official.DRAFTS["35B-A3B-DFlash"][1])
    found = faults(lambda: load_draft(tmp_path, qwen35_35b_a3b(), POLICY))
    assert len(found) == 18 and all("expected shape" in fault for fault in found)


@pytest.mark.parametrize("value", ["false", 0, [False]])
def test_causality_of_another_type_is_named(tmp_path, pair, value, no_device):
    folder = copied(pair, tmp_path, "draft")
    content = json.loads((folder / "config.json").read_text()) | {"is_causal": value}
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="is_causal: expected a bool"):
        load_draft(folder, qwen35_27b(), POLICY)


def test_values_that_are_not_finite_in_vectors_are_faults_of_their_tensors(tmp_path, no_device):
    tensors = draft_tensors()
    tensors["norm.weight"][3] = float("nan")
    tensors["layers.1.self_attn.k_norm.weight"][:2] = float("inf")
    folder = write(tmp_path, draft_json(tiny_draft(DraftKind.DFLASH)), tensors)
    assert faults(lambda: load_draft(folder, tiny_target(), POLICY)) == (
        "layers.1.self_attn.k_norm.weight: expected finite values, got 2 that are not",
        "norm.weight: expected finite values, got 1 that are not",
    )
