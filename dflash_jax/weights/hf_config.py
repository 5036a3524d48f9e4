"""config.json of a Qwen3.5-family target -> `TargetConfig`.

Nested files (`text_config`, multimodal exports) and flat ones (text-only exports) are read; a key
that is needed and absent is an error that names it. Source: `checkpoints.md` 4.1, contracts 1.1 and
1.4. Drafts are read by `hf_draft_config.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from dflash_jax.config import ConfigError, GdnConfig, LayerKind, MoeConfig, RopeConfig, TargetConfig
from dflash_jax.config.folder import read_json
from dflash_jax.config.rules import MAX_INT, is_int
from dflash_jax.weights.keys import (
    Keys,
    architecture,
    choice,
    rope_sections,
    subsection,
)

logger = logging.getLogger(__name__)

_DENSE, _MOE = "dense", "moe"
_ARCHITECTURES = {
    "Qwen3_5ForConditionalGeneration": _DENSE,
    "Qwen3_5ForCausalLM": _DENSE,
    "Qwen3_5MoeForConditionalGeneration": _MOE,
    "Qwen3_5MoeForCausalLM": _MOE,
}
_MODEL_TYPES = {
    _DENSE: ("qwen3_5", "qwen3_5_text"),
    _MOE: ("qwen3_5_moe", "qwen3_5_moe_text"),
}
_MOE_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def read_target_config(folder: str | Path, *, public_vocab: int | None = None) -> TargetConfig:
    """Reads FOLDER/config.json, and the tokenizer's size when `public_vocab` is not given.

    Args:
      folder: a Hugging Face model folder.
      public_vocab: V_pub, the ids that may be emitted; None takes 1 + the largest id of
        FOLDER/tokenizer.json, or the vocabulary rows without such a file. Logged with its source.
    Raises: ConfigError naming the key or field at fault.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    if public_vocab is None:
        public_vocab = tokenizer_vocab(folder)
        source = "tokenizer.json" if public_vocab is not None else "vocab_size"
    else:
        source = "the caller"
    return target_config(raw, public_vocab=public_vocab, source=source)


def tokenizer_vocab(folder: Path) -> int | None:
    """1 + the largest id in FOLDER/tokenizer.json (vocabulary and added tokens), None without it.

    Raises: ConfigError if the file holds no ids, or something else where ids belong.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    content = read_json(path)
    vocab = (subsection(content, "model") or {}).get("vocab")
    added = content.get("added_tokens")
    if not isinstance(added, list | None) or not all(isinstance(e, Mapping) for e in added or ()):
        expected = "added_tokens to be a list of objects"
        raise ConfigError(f"tokenizer.json: expected {expected}, got {added!r}")
    ids = [entry.get("id") for entry in added or ()]
    if isinstance(vocab, Mapping):
        ids += vocab.values()
    elif isinstance(vocab, list):
        # Unigram files list (piece, score) pairs in id order.
        ids += range(len(vocab))
    elif vocab is not None:
        expected = "model.vocab to be an object or a list"
        raise ConfigError(f"tokenizer.json: expected {expected}, got {vocab!r}")
    for token in ids:
        if not is_int(token) or not 0 <= token < MAX_INT:
            raise ConfigError(f"tokenizer.json: expected integer ids >= 0, got {token!r}")
    if not ids:
        raise ConfigError("tokenizer.json: expected a vocabulary, got no ids")
    return 1 + max(ids)


def target_config(raw: Mapping, *, public_vocab: int | None, source: str) -> TargetConfig:
    """`TargetConfig` of a parsed config.json; see `read_target_config`.

    Args:
      raw: the parsed file.
      public_vocab: V_pub, or None for the vocabulary rows.
      source: where V_pub came from, for the log.
    """
    family = _ARCHITECTURES[architecture(raw, _ARCHITECTURES)]
    nested = subsection(raw, "text_config")
    text = raw if nested is None else nested
    for section in (raw, text):
        choice("model_type", section.get("model_type"), _MODEL_TYPES[family])
    keys = Keys((text, raw))
    keys.refuse_unimplemented()
    rows = keys.required("vocab_size")
    public = rows if public_vocab is None else public_vocab
    layer_types = _layer_types(keys)
    config = TargetConfig(
        hidden=keys.required("hidden_size"),
        vocab_rows=rows,
        public_vocab=public,
        query_heads=keys.required("num_attention_heads"),
        kv_heads=keys.required("num_key_value_heads"),
        head_dim=keys.required("head_dim"),
        layer_types=layer_types,
        norm_eps=keys.required("rms_norm_eps"),
        rope=_rope(text),
        gdn=_gdn(keys) if LayerKind.LINEAR in layer_types else None,
        intermediate=_intermediate(keys, family),
        moe=_moe(keys, family),
        tie_embeddings=_tied(raw, text),
        max_positions=keys.required("max_position_embeddings"),
    )
    logger.info("public_vocab = %d of %d rows, from %s", public, rows, source)
    return config


def _layer_types(keys: Keys) -> tuple[LayerKind, ...]:
    count = keys.layer_count()
    names = keys.given("layer_types")
    if names is None:
        interval = keys.given("full_attention_interval")
        if not is_int(interval) or interval < 1:
            raise ConfigError("layer_types: expected a list in config.json, got none")
        logger.info("layer_types absent: every %d-th layer is full attention", interval)
        full, linear = LayerKind.FULL.value, LayerKind.LINEAR.value
        names = [full if (i + 1) % interval == 0 else linear for i in range(count)]
    return layer_kinds(names, count)


def layer_kinds(names: object, count: int) -> tuple[LayerKind, ...]:
    """The entries of a `layer_types` list of `count` layers.

    Raises: ConfigError for another length or an unknown entry.
    """
    if not isinstance(names, list) or len(names) != count:
        raise ConfigError(f"layer_types: expected a list of {count} entries, got {names!r}")
    known = {kind.value: kind for kind in LayerKind}
    return tuple(known[choice("layer_types", name, known)] for name in names)


def _rope(text: Mapping) -> RopeConfig:
    keys = rope_sections(text)
    keys.refuse_unimplemented()
    section = keys.required("mrope_section")
    return RopeConfig(
        theta=keys.required("rope_theta"),
        partial_factor=keys.required("partial_rotary_factor"),
        mrope_section=tuple(section) if isinstance(section, list) else section,
    )


def _gdn(keys: Keys) -> GdnConfig:
    return GdnConfig(
        key_heads=keys.required("linear_num_key_heads"),
        value_heads=keys.required("linear_num_value_heads"),
        key_dim=keys.required("linear_key_head_dim"),
        value_dim=keys.required("linear_value_head_dim"),
        conv_kernel=keys.required("linear_conv_kernel_dim"),
    )


def _intermediate(keys: Keys, family: str) -> int | None:
    if family == _DENSE:
        return keys.required("intermediate_size")
    dense = keys.given("intermediate_size")
    if dense is not None:
        raise ConfigError(f"intermediate_size: expected none in a MoE config, got {dense!r}")
    return None


def _moe(keys: Keys, family: str) -> MoeConfig | None:
    if family == _MOE:
        experts, per_token, routed, shared = (keys.required(name) for name in _MOE_KEYS)
        return MoeConfig(
            num_experts=experts,
            experts_per_token=per_token,
            intermediate=routed,
            shared_intermediate=shared,
        )
    for name in _MOE_KEYS:
        if keys.given(name) is not None:
            raise ConfigError(f"{name}: expected none in a dense config, got {keys.given(name)!r}")
    return None


def _tied(raw: Mapping, text: Mapping) -> bool:
    """The top level decides; a `text_config` that says something else is logged."""
    tied, inner = Keys((raw, text)).required("tie_word_embeddings"), text.get("tie_word_embeddings")
    if inner not in (None, tied):
        message = "tie_word_embeddings: %s at the top level, %s in text_config; the former is used"
        logger.warning(message, tied, inner)
    return tied
