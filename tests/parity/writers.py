"""Writes random Qwen3.5-family targets and DFlash drafts as real checkpoint folders.

The models are the published PyTorch implementations (transformers, dflash). Every parameter is
drawn anew, because the default initialisation is so small, and its norms so neutral, that many
mistakes would hide below any tolerance. Folders are what `save_pretrained` leaves behind, except
that the DFlash2 codebooks get the names of released files.
"""

import copy
import json
from pathlib import Path

import dflash.model
import torch
import transformers
from safetensors.torch import save_file

from tests.parity.geometries import (
    ATTENTION,
    DRAFT_GEOMETRIES,
    MOE,
    MULTIMODAL,
    TAPS,
    TARGET_BASE,
    VISION,
)


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draws every parameter: matrices with unit gain, norms around their neutral value."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.copy_(0.5 * noise)
        elif name.endswith("dt_bias"):
            parameter.copy_(noise - 1.0)
        elif name.endswith("base_kernel"):
            parameter.copy_(0.4 * noise)
            parameter[:, 0] += 1.0
        elif name.endswith("kernel_projection.weight"):
            parameter.copy_(0.3 * noise / parameter.shape[-1] ** 0.5)
        elif parameter.ndim == 1:
            # Neutral is 0 for the offset norms of the target and 1 for every plain norm.
            parameter.copy_(parameter.mean().round() + 0.3 * noise)
        else:
            fan_in = 1 if "codebook" in name else parameter.shape[-1]
            parameter.copy_(noise / fan_in**0.5)


def make_target(geometry: str, *, moe: bool, seed: int = 0) -> torch.nn.Module:
    """A random float32 target of a named geometry, in evaluation mode."""
    text = {**TARGET_BASE, **copy.deepcopy(ATTENTION[geometry])}
    text["num_hidden_layers"] = len(text["layer_types"])
    if moe:
        text |= dict(moe_intermediate_size=24, shared_expert_intermediate_size=20, **MOE[geometry])
    else:
        text |= dict(intermediate_size=72)
    family = "Qwen3_5Moe" if moe else "Qwen3_5"
    if geometry in MULTIMODAL:
        config = getattr(transformers, f"{family}Config")(
            text_config=text,
            vision_config={**VISION, "out_hidden_size": text["hidden_size"]},
            tie_word_embeddings=text["tie_word_embeddings"],
        )
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    else:
        config = getattr(transformers, f"{family}TextConfig")(**text)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    model = model.to(torch.float32).eval()
    randomize(model, seed)
    return model


def write_target(folder: Path, geometry: str, *, moe: bool, seed: int = 0) -> torch.nn.Module:
    """Saves a random target to `folder` with `save_pretrained` and returns it."""
    model = make_target(geometry, moe=moe, seed=seed)
    model.save_pretrained(folder)
    return model


def make_draft(geometry: str, text_config, *, dflash2: bool, seed: int = 1) -> torch.nn.Module:
    """A random float32 draft of a named geometry for a target's text config."""
    values = copy.deepcopy(DRAFT_GEOMETRIES[geometry])
    section = dict(
        block_size=values.pop("block_size"),
        mask_token_id=text_config.vocab_size - 1,
        target_layer_ids=TAPS[text_config.num_hidden_layers],
    )
    extra = {
        name: values.pop(name)
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    }
    if dflash2:
        section |= extra
    config = transformers.Qwen3Config(
        hidden_size=text_config.hidden_size,
        vocab_size=text_config.vocab_size,
        num_hidden_layers=len(values["layer_types"]),
        use_sliding_window=values["sliding_window"] is not None,
        rope_parameters=dict(rope_type="default", rope_theta=values.pop("rope_theta")),
        max_position_embeddings=512,
        num_target_layers=text_config.num_hidden_layers,
        dflash_config=section,
        **values,
    )
    cls = dflash.model.DFlash2DraftModel if dflash2 else dflash.model.DFlashDraftModel
    model = cls(config).to(torch.float32).eval()
    randomize(model, seed)
    return model


def save_draft(folder: Path, model: torch.nn.Module) -> None:
    """Saves a draft under the tensor names of released files."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {
        name.replace("_codebook.weight", "_codebook"): tensor.contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_draft(
    folder: Path, geometry: str, text_config, *, dflash2: bool, seed: int = 1
) -> torch.nn.Module:
    """Saves a random draft to `folder` and returns it."""
    model = make_draft(geometry, text_config, dflash2=dflash2, seed=seed)
    save_draft(folder, model)
    return model
