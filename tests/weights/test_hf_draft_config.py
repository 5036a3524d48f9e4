"""config.json of a draft: spellings, the causality rule, and refusals by name."""

import json
import logging

import pytest

from dflash_jax.config import ConfigError, DraftKind, LayerKind, tiny_draft, tiny_target
from dflash_jax.weights import read_draft_config
from dflash_jax.weights.export import draft_json

FULL, LOCAL = LayerKind.FULL, LayerKind.SLIDING
FIRST, SECOND = DraftKind.DFLASH, DraftKind.DFLASH2
TARGET = tiny_target()
ABSENT = object()


@pytest.fixture
def draft_of(tmp_path):
    """Reads a draft's config.json with the given content, for the tiny target."""

    def read(content, **choices):
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_draft_config(tmp_path, TARGET, **choices)

    return read


def draft_file(kind=FIRST, **top):
    """A released-style file without `is_causal`."""
    content = draft_json(tiny_draft(kind, block_size=8))
    del content["is_causal"]
    return content | top


def flattened(content):
    """Every key of `dflash_config` moved to the top level."""
    content = dict(content)
    return content | content.pop("dflash_config")


@pytest.mark.parametrize("kind", [FIRST, SECOND])
def test_a6_a7_nested_and_flat_drafts_give_one_config(draft_of, kind):
    content = draft_file(kind, is_causal=False)
    expected = tiny_draft(kind, block_size=8)
    assert draft_of(content) == expected
    assert draft_of(flattened(content)) == expected
    mixed = content | {"block_size": 4, "mask_token_id": 3}
    assert draft_of(mixed) == expected, "nested wins"


def test_dflash2_class_name_of_third_party_exports(draft_of):
    content = flattened(draft_file(SECOND, is_causal=False))
    content["architectures"] = ["Qwen3DFlash2Model"]
    assert draft_of(content).kind is SECOND


@pytest.mark.parametrize(
    "key",
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim rms_norm_eps max_position_embeddings sliding_window mask_token_id conv_kernel_size "
    "conv_group_size selector_rank selector_top_k".split(),
)
def test_a7_missing_draft_key_is_named(draft_of, key):
    content = flattened(draft_file(SECOND))
    del content[key]
    field = "window" if key == "sliding_window" else key
    with pytest.raises(ConfigError, match=f"^{field}: "):
        draft_of(content)


def test_missing_theta_is_named(draft_of):
    content = draft_file()
    del content["rope_parameters"]
    with pytest.raises(ConfigError, match="^rope_theta: "):
        draft_of(content)
    assert draft_of(content | {"rope_theta": 5e5, "rope_scaling": None}).rope_theta == 5e5


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rope_scaling_is_refused_by_name(draft_of, name):
    scaled = {name: {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}
    with pytest.raises(ConfigError, match=f"^{name}.rope_type: .*'yarn'"):
        draft_of(draft_file() | scaled)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output_multiplier", 0.196),
        ("final_logit_softcapping", 20.0),
        ("input_embedding_scale", 8.0),
        ("attention_sink_bias", True),
        ("attention_value_scale", 0.5),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("sample_from_anchor", True),
        ("use_aux_hidden_state", False),
        ("projector_type", "domino"),
        ("projector_type", "dflash2"),
        ("architectures", ["LlamaForCausalLM"]),
        ("model_type", "llama"),
        ("num_target_layers", 5),
        ("vocab_size", 256),
        ("conv_kernel_size", 2),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_draft_that_would_compute_something_else_is_refused(draft_of, key, value, nested):
    content = draft_file()
    if nested and key not in ("architectures", "model_type", "vocab_size"):
        content["dflash_config"][key] = value
    else:
        content[key] = value
    with pytest.raises(ConfigError, match=f"^{key}: "):
        draft_of(content)


ODD_VALUES = [-5, 4.0, "2", True, {}, [], [[]], [{}], [None], 10**400]


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: str(value)[:8])
@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "model_type",
        "layer_types",
        "num_hidden_layers",
        "speculators_model_type",
        "projector_type",
    ],
)
def test_a_draft_value_of_another_type_is_named(draft_of, key, value):
    with pytest.raises(ConfigError, match=f"^{key}: expected .*, got "):
        draft_of(draft_file() | {key: value})


@pytest.mark.parametrize("value", [2.0, "2", True, 0, -1, 10**9, 10**400], ids=str)
def test_a_layer_count_without_layer_types_is_checked(draft_of, value):
    content = draft_file(num_hidden_layers=value)
    del content["layer_types"]
    with pytest.raises(ConfigError, match="^num_hidden_layers: expected an integer in "):
        draft_of(content)


def test_scaling_keys_without_a_rope_type_are_refused_by_name(draft_of):
    inherited = {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rotary_dim": 8}
    assert draft_of(draft_file(rope_parameters=inherited)).rope_theta == 1e4
    with pytest.raises(ConfigError, match="^rope_parameters.factor: expected none without a rope_"):
        draft_of(draft_file(rope_parameters=inherited | {"factor": 4.0}))


def test_neutral_values_of_those_keys_are_accepted(draft_of):
    neutral = {
        "output_multiplier": 1.0,
        "input_embedding_scale": 1,
        "final_logit_softcapping": None,
        "sample_from_anchor": False,
        "attention_sink_bias": False,
        "projector_type": "dflash",
        "mask_token": "<mask>",
    }
    content = draft_file()
    content["dflash_config"] |= neutral
    assert draft_of(content) == draft_of(draft_file())


def test_unknown_key_of_the_draft_section_is_refused(draft_of):
    content = draft_file()
    content["dflash_config"]["markov_rank"] = 4
    with pytest.raises(ConfigError, match="^dflash_config: .*markov_rank"):
        draft_of(content)


def test_a8_inherited_rotation_keys_are_dropped_with_a_log_line(draft_of, caplog):
    rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    with caplog.at_level(logging.INFO, "dflash_jax.weights"):
        config = draft_of(draft_file(rope_parameters=rope, rope_dim=128))
    assert config == draft_of(draft_file())
    assert "partial_rotary_factor, mrope_section, rope_dim" in caplog.text


def test_use_sliding_window_does_not_remove_the_window(draft_of):
    config = draft_of(draft_file(use_sliding_window=False))
    assert (config.window, config.layer_types) == (12, (LOCAL, FULL))


def test_symmetric_window_by_use_swa(draft_of):
    content = draft_file(layer_types=["full_attention"] * 2, sliding_window=None)
    content["dflash_config"] |= {"use_swa": True, "swa_window_size": 9, "causal": False}
    config = draft_of(content)
    assert (config.window, config.layer_types, config.causal) == (9, (LOCAL, LOCAL), (False, False))
    del content["dflash_config"]["causal"]
    with pytest.raises(ConfigError, match="^causal: "):
        draft_of(content)
    assert draft_of(content, causal=False) == config


def test_absent_target_layer_ids_come_from_the_formula_with_a_log_line(tmp_path, caplog):
    for layers, draft_layers, expected in (
        (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
    ):
        target = tiny_target(layer_types=(FULL,) * layers, gdn=None)
        draft = tiny_draft(FIRST, layer_types=(FULL,) * draft_layers, window=None)
        content = draft_json(draft)
        del content["dflash_config"]["target_layer_ids"]
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert read_draft_config(tmp_path, target).target_layer_ids == expected
        assert f"target_layer_ids absent: {list(expected)}" in caplog.text


def test_a5_shifted_ids_name_the_same_blocks(draft_of):
    content = draft_file()
    ids = content["dflash_config"].pop("target_layer_ids")
    content["dflash_config"]["aux_hidden_state_layer_ids"] = [i + 1 for i in ids]
    assert draft_of(content).target_layer_ids == tuple(ids)
    content["dflash_config"]["target_layer_ids"] = [0, 1, 2]
    with pytest.raises(ConfigError, match="^target_layer_ids: "):
        draft_of(content)


def test_a5_id_equal_to_the_layer_count_is_an_error(draft_of):
    content = draft_file()
    content["dflash_config"]["target_layer_ids"] = [0, 4]
    with pytest.raises(ConfigError, match=r"^target_layer_ids: expected block ids in \[0, 4\)"):
        draft_of(content)


def speculators(kind="dflash", **top):
    """The same tiny draft as an export of the speculators library."""
    content = flattened(draft_file(FIRST if kind == "dflash" else SECOND))
    ids = content.pop("target_layer_ids")
    moved = ("mask_token_id", "block_size", "conv_kernel_size", "conv_group_size")
    moved += ("selector_rank", "selector_top_k")
    outer = {key: content.pop(key) for key in moved if key in content}
    del content["architectures"]
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": content,
        "aux_hidden_state_layer_ids": [i + 1 for i in ids],
        **outer,
        **top,
    }


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_speculators_export_gives_the_native_config(draft_of, kind, symmetric):
    ours = tiny_draft(FIRST if kind == "dflash" else SECOND, block_size=8)
    causal = tuple(entry is LOCAL and not symmetric for entry in ours.layer_types)
    config = draft_of(speculators(kind, sliding_window_non_causal=symmetric))
    assert config == tiny_draft(ours.kind, block_size=8, causal=causal)


def test_speculators_faults_are_named(draft_of):
    with pytest.raises(ConfigError, match="^speculators_model_type: "):
        draft_of(speculators() | {"speculators_model_type": "eagle3"})
    for key in ("transformer_layer_config", "aux_hidden_state_layer_ids"):
        content = speculators()
        del content[key]
        with pytest.raises(ConfigError, match=f"^{key}: "):
            draft_of(content)
    with pytest.raises(ConfigError, match="^sample_from_anchor: "):
        draft_of(speculators(sample_from_anchor=True))


@pytest.mark.parametrize(
    ("top", "nested", "expected", "reason"),
    [
        (ABSENT, ABSENT, (True, False), "layer_types"),
        (None, ABSENT, (True, False), "layer_types"),
        (False, ABSENT, (False, False), "is_causal"),
        (True, ABSENT, (True, True), "is_causal"),
        (ABSENT, False, (False, False), "dflash_config.causal"),
        (ABSENT, True, (True, True), "dflash_config.causal"),
        (None, True, (True, True), "dflash_config.causal"),
        (False, True, (False, False), "is_causal"),
    ],
)
def test_a1_causality_is_resolved_in_order_and_logged(
    draft_of, caplog, top, nested, expected, reason
):
    content = draft_file()
    if top is not ABSENT:
        content["is_causal"] = top
    if nested is not ABSENT:
        content["dflash_config"]["causal"] = nested
    with caplog.at_level(logging.INFO, "dflash_jax.weights"):
        assert draft_of(content).causal == expected
    assert f"causal = {list(expected)}, decided by {reason}" in caplog.text


def test_a1_without_layer_types_nothing_is_causal(draft_of, caplog):
    content = draft_file()
    del content["layer_types"]
    with caplog.at_level(logging.INFO, "dflash_jax.weights"):
        config = draft_of(content)
    assert (config.layer_types, config.causal) == ((FULL, FULL), (False, False))
    assert "absence of is_causal and layer_types" in caplog.text


@pytest.mark.parametrize("override", [False, True, (False, True), [True, True]])
def test_a2_the_caller_overrides_the_file(draft_of, override):
    for top in (ABSENT, False, True):
        content = draft_file() if top is ABSENT else draft_file(is_causal=top)
        expected = (override,) * 2 if isinstance(override, bool) else tuple(override)
        assert draft_of(content, causal=override).causal == expected


def test_a2_released_five_plus_one_without_the_key(draft_of):
    content = draft_file(num_hidden_layers=6)
    content["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
    assert draft_of(content).causal == (True,) * 5 + (False,)
    assert draft_of(content, causal=False).causal == (False,) * 6
    assert draft_json(draft_of(content, causal=False))["is_causal"] is False


def test_wrong_override_is_an_error(draft_of):
    for override in ((True,), (1, 0), "ab"):
        with pytest.raises(ConfigError, match="^causal: "):
            draft_of(draft_file(), causal=override)
