"""Params -> Hugging Face files: the exact inverse of the loader, by the same tables.

One field has no place in these files, `TargetConfig.public_vocab`: a folder's tokenizer gives it,
or the caller of `load_target`.

Targets are written as text-only models (`Qwen3_5ForCausalLM`, prefix `model.`), drafts with the
bare names of released files. Matrices keep their dtype; vectors and small kernels are written in
float32, so a round trip loses nothing. Source: `checkpoints.md` 2-4.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dflash_jax.config import DraftConfig, DraftKind, LayerKind, TargetConfig
from dflash_jax.weights import names
from dflash_jax.weights.leaves import PlannedLeaf
from dflash_jax.weights.transforms import VIEWS, Sizes, split_rows


def save_target(folder: str | Path, config: TargetConfig, params: Mapping) -> None:
    """Writes FOLDER/config.json and FOLDER/model.safetensors of a target.

    `config.public_vocab` is not stored. Loading takes it from a tokenizer.json put beside these
    files, else from its `public_vocab` argument, else it is the vocabulary rows.

    Raises: ValueError for a config with float8 matrices: a file's blocks may have been joined.
    """
    if config.fp8 is not None:
        raise ValueError(f"fp8: expected none, got {config.fp8.count} matrices")
    leaves, sizes = names.target_plan(config)
    tensors = {
        name if name == "lm_head.weight" else f"model.{name}": tensor
        for name, tensor in _tensors(leaves, sizes, params)
    }
    _write(folder, target_json(config), tensors)


def save_draft(
    folder: str | Path, config: DraftConfig, params: Mapping, *, target_layers: int | None = None
) -> None:
    """Writes FOLDER/config.json and FOLDER/model.safetensors of a draft, an own head included.

    Args:
      target_layers: depth of its target. The PyTorch package does not load a draft without it.
    Raises: ValueError if no key of config.json can express the causality of the layers.
    """
    leaves, sizes = names.draft_plan(config)
    tensors = dict(_tensors(leaves, sizes, params))
    if config.head_rows:
        ids = np.asarray(params["head"]["token_ids"]).astype(np.int64)
        tensors[names.OWN_HEAD] = np.asarray(params["head"]["kernel"])
        tensors[names.OWN_HEAD_OFFSETS] = ids - np.arange(len(ids))
    _write(folder, draft_json(config, target_layers), tensors)


def _write(folder: str | Path, config: dict, tensors: dict[str, np.ndarray]) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _tensors(
    leaves: list[PlannedLeaf], sizes: Sizes, params: Mapping
) -> Iterator[tuple[str, np.ndarray]]:
    """File tensors in the first layout of each leaf; leaves that are copies give none."""
    for leaf in leaves:
        if leaf.copy:
            continue
        value = params
        for key in leaf.path:
            value = value[key]
        array = np.asarray(value)
        if array.shape != leaf.shape:
            name = "/".join(leaf.path)
            raise ValueError(f"{name}: expected shape {leaf.shape}, got {array.shape}")
        parts = leaf.layouts[0]
        tensors = {part.name: np.empty(part.shape, array.dtype) for part in parts}
        split_rows(array, (VIEWS[part.view](tensors[part.name], sizes) for part in parts))
        yield from tensors.items()


def target_json(config: TargetConfig) -> dict:
    """config.json of a text-only target; `public_vocab` is not part of it."""
    family, model_type = "Qwen3_5", "qwen3_5_text"
    content = {
        "hidden_size": config.hidden,
        "vocab_size": config.vocab_rows,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "layer_types": [kind.value for kind in config.layer_types],
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "attention_bias": False,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope.theta,
            "partial_rotary_factor": config.rope.partial_factor,
            "mrope_section": list(config.rope.mrope_section),
            "mrope_interleaved": True,
        },
    }
    if config.gdn is not None:
        content |= {
            "linear_num_key_heads": config.gdn.key_heads,
            "linear_num_value_heads": config.gdn.value_heads,
            "linear_key_head_dim": config.gdn.key_dim,
            "linear_value_head_dim": config.gdn.value_dim,
            "linear_conv_kernel_dim": config.gdn.conv_kernel,
        }
    if config.moe is None:
        content["intermediate_size"] = config.intermediate
    else:
        family, model_type = "Qwen3_5Moe", "qwen3_5_moe_text"
        content |= {
            "num_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.experts_per_token,
            "moe_intermediate_size": config.moe.intermediate,
            "shared_expert_intermediate_size": config.moe.shared_intermediate,
        }
    return {"architectures": [f"{family}ForCausalLM"], "model_type": model_type, **content}


def draft_json(config: DraftConfig, target_layers: int | None = None) -> dict:
    """config.json of a draft, with the keys of released files."""
    depth = {} if target_layers is None else {"num_target_layers": target_layers}
    section = {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
    }
    if config.block_size is not None:
        section["block_size"] = config.block_size
    if config.kind is DraftKind.DFLASH2:
        section |= {
            "conv_kernel_size": config.conv.taps,
            "conv_group_size": config.conv.group_width,
            "selector_rank": config.selector.rank,
            "selector_top_k": config.selector.num_candidates,
        }
    return {
        "architectures": [config.kind.value],
        "model_type": "qwen3",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.draft_layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "layer_types": [kind.value for kind in config.layer_types],
        "sliding_window": config.window,
        "use_sliding_window": bool(config.local_layers),
        "vocab_size": config.vocab_rows,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **depth,
        "dflash_config": section,
        **_causal_key(config),
    }


def _causal_key(config: DraftConfig) -> dict:
    """`is_causal` where one flag serves all layers; none where the layer kinds imply the flags."""
    if len(set(config.causal)) == 1:
        return {"is_causal": config.causal[0]}
    if config.causal == tuple(kind is LayerKind.SLIDING for kind in config.layer_types):
        return {}
    raise ValueError(f"causal: expected flags that config.json can express, got {config.causal}")
