"""config.json of a target: spellings and refusals by name."""

import json
import logging

import pytest

from dflash_jax.config import ConfigError, tiny_target
from dflash_jax.weights import read_target_config
from dflash_jax.weights.export import target_json


@pytest.fixture
def target_of(tmp_path):
    """Reads a target's config.json with the given content."""

    def read(content, **choices):
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_target_config(tmp_path, **choices)

    return read


def flat_target(moe=False):
    return target_json(tiny_target(moe, public_vocab=257))


def nested_target(moe=False):
    """The layout of released multimodal files."""
    text = flat_target(moe)
    name = text.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
    kind = text["model_type"].removesuffix("_text")
    tied = text["tie_word_embeddings"]
    return {
        "architectures": [name],
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": tied,
        "vision_config": {"hidden_size": 16, "hidden_act": "gelu_pytorch_tanh"},
    }


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("layout", [flat_target, nested_target])
def test_target_layouts_give_one_config(target_of, layout, moe):
    assert target_of(layout(moe)) == tiny_target(moe, public_vocab=257)


@pytest.mark.parametrize(
    "key",
    "hidden_size vocab_size num_hidden_layers layer_types num_attention_heads num_key_value_heads "
    "head_dim rms_norm_eps tie_word_embeddings max_position_embeddings intermediate_size "
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
    "linear_conv_kernel_dim".split(),
)
def test_missing_target_key_is_named(target_of, key):
    content = flat_target()
    del content[key]
    with pytest.raises(ConfigError, match=f"^{key}: "):
        target_of(content)


@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor", "mrope_section"])
def test_missing_rope_key_is_named(target_of, key):
    content = flat_target()
    del content["rope_parameters"][key]
    with pytest.raises(ConfigError, match=f"^{key}: "):
        target_of(content)


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_missing_moe_key_is_named(target_of, key):
    content = flat_target(moe=True)
    del content[key]
    with pytest.raises(ConfigError, match=f"^{key}: "):
        target_of(content)


def test_dense_and_moe_fields_exclude_each_other(target_of):
    with pytest.raises(ConfigError, match="^num_experts: "):
        target_of(flat_target() | {"num_experts": 8})
    with pytest.raises(ConfigError, match="^intermediate_size: "):
        target_of(flat_target(moe=True) | {"intermediate_size": 96})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("attn_output_gate", False),
        ("final_logit_softcapping", 20.0),
        ("norm_topk_prob", False),
        ("mlp_only_layers", [0]),
        ("architectures", ["Qwen3ForCausalLM"]),
        ("architectures", ["Qwen3_5ForCausalLM", "Qwen3_5ForCausalLM"]),
        ("model_type", "qwen3"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["linear_attention"] * 3 + ["attention"]),
    ],
)
def test_target_that_would_compute_something_else_is_refused(target_of, key, value):
    with pytest.raises(ConfigError, match=f"^{key}: "):
        target_of(flat_target() | {key: value})


ODD_VALUES = [-5, 4.0, "4", True, {}, [], [[]], [{}], [None], 10**400]


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("key", ["architectures", "model_type", "layer_types", "num_hidden_layers"])
def test_a_target_value_of_another_type_is_named(target_of, key, value):
    with pytest.raises(ConfigError, match=f"^{key}: expected .*, got "):
        target_of(flat_target() | {key: value})


@pytest.mark.parametrize("value", [4.0, "4", True, 0, -1, 10**9, 10**400], ids=str)
def test_a_layer_count_without_layer_types_is_checked(target_of, value):
    content = flat_target() | {"full_attention_interval": 1, "num_hidden_layers": value}
    del content["layer_types"]
    with pytest.raises(ConfigError, match="^num_hidden_layers: expected an integer in "):
        target_of(content)


@pytest.mark.parametrize("value", [0, 10**400, 1e300, 1e-60, "1", True, [1]], ids=str)
@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("rms_norm_eps", "norm_eps"),
        ("rope_theta", "rope.theta"),
        ("partial_rotary_factor", "rope.partial_factor"),
    ],
)
def test_a_number_that_float32_cannot_hold_is_named(target_of, key, field, value):
    content = flat_target()
    section = content["rope_parameters"]
    (section if key in section else content)[key] = value
    with pytest.raises(ConfigError, match=f"^{field}: expected a number finite and > 0"):
        target_of(content)


def test_absent_output_gate_means_gated(target_of):
    content = flat_target()
    del content["attn_output_gate"]
    assert target_of(content) == tiny_target(public_vocab=257)


def test_rope_parameters_win_over_the_top_level_factor(target_of):
    content = flat_target() | {"partial_rotary_factor": 0.5}
    assert target_of(content).rope.partial_factor == 0.25


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rope_scaling_is_refused_by_name(target_of, name):
    scaled = {name: {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}
    with pytest.raises(ConfigError, match=f"^{name}.rope_type: .*'yarn'"):
        target_of(flat_target() | scaled)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings", "short_factor"])
def test_scaling_keys_without_a_rope_type_are_refused_by_name(target_of, name, key):
    section = dict(flat_target()["rope_parameters"])
    del section["rope_type"]
    assert target_of(flat_target() | {name: section | {key: None}}).rope == tiny_target().rope
    with pytest.raises(ConfigError, match=f"^{name}.{key}: expected none without a rope_type"):
        target_of(flat_target() | {name: section | {key: 4.0}})


def test_layer_types_may_be_given_by_interval(target_of, caplog):
    content = flat_target() | {"full_attention_interval": 4}
    del content["layer_types"]
    with caplog.at_level(logging.INFO, "dflash_jax.weights"):
        assert target_of(content).full_layers == (3,)
    assert "layer_types absent" in caplog.text


def test_tying_of_the_top_level_decides(target_of, caplog):
    content = nested_target() | {"tie_word_embeddings": True}
    assert target_of(content).tie_embeddings
    assert "tie_word_embeddings" in caplog.text


def test_public_vocab_comes_from_caller_then_tokenizer_then_rows(target_of, tmp_path, caplog):
    caplog.set_level(logging.INFO, "dflash_jax.weights")
    assert target_of(flat_target()).public_vocab == 257
    assert "257 of 257 rows, from vocab_size" in caplog.text
    tokenizer = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 240}, {"id": 9}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert target_of(flat_target()).public_vocab == 241
    assert "241 of 257 rows, from tokenizer.json" in caplog.text
    assert target_of(flat_target(), public_vocab=200).public_vocab == 200
    assert "200 of 257 rows, from the caller" in caplog.text
    with pytest.raises(ConfigError, match="^public_vocab: "):
        target_of(flat_target(), public_vocab=258)


def test_unigram_vocabulary_counts_its_entries(target_of, tmp_path):
    tokenizer = {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert target_of(flat_target()).public_vocab == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model": {"vocab": {"a": "0"}}}, "integer ids"),
        ({"model": {"vocab": {"a": 0, "b": None}}}, "integer ids"),
        ({"model": {"vocab": {"a": True}}}, "integer ids"),
        ({"model": {"vocab": {"a": -1}}}, "integer ids"),
        ({"model": {"vocab": {"a": 2**31}}}, "integer ids"),
        ({"model": {"vocab": 5}}, "model.vocab to be an object or a list"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": "7"}]}, "integer ids"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{}]}, "integer ids"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [7]}, "added_tokens to be a list of obj"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": {"b": 7}}, "added_tokens to be a list"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": 7}, "added_tokens to be a list"),
        ({"model": {}, "added_tokens": []}, "a vocabulary"),
    ],
)
def test_a_tokenizer_without_proper_ids_is_named(target_of, tmp_path, content, expected):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"^tokenizer.json: expected {expected}"):
        target_of(flat_target())


def test_absent_or_broken_config_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="^config.json: "):
        read_target_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="^config.json: expected JSON"):
        read_target_config(tmp_path)
