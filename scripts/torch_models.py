"""The published torch models at our geometries, with random weights made where they will run.

Needs torch, transformers and the `dflash` package; `add_package` serves a bare copy of the latter,
of which `dflash/__init__.py` and `dflash/model.py` are enough.
"""

import importlib
import sys
from pathlib import Path

import torch
import transformers
from torch import nn

from dflash_jax.config import DraftConfig, DraftKind, TargetConfig
from dflash_jax.weights.export import draft_json, target_json

# Norms of the target scale by 1 + w; every other norm scales by w.
OFFSET_NORMS = ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")


def add_package(folder: str | None) -> None:
    """Looks for modules in `folder` first, before transformers looks for kernels.

    Raises: ValueError if `dflash` does not lie there.
    """
    if folder is None:
        return
    if not (Path(folder) / "dflash" / "model.py").is_file():
        raise ValueError(f"--package-path: expected a folder that holds dflash/, got {folder!r}")
    sys.path.insert(0, str(Path(folder).resolve()))


def dflash_model():
    """The module of the published drafts and of their loop."""
    return importlib.import_module("dflash.model")


def make_target(config: TargetConfig, device: str, seed: int) -> nn.Module:
    """The published target, bfloat16, attention through SDPA as the package loads it."""
    family = "Qwen3_5" if config.moe is None else "Qwen3_5Moe"
    cls = getattr(transformers, f"{family}ForCausalLM")
    return _built(cls, target_config(config), device, seed)


def target_config(config: TargetConfig) -> transformers.PretrainedConfig:
    """The published config of the same geometry."""
    cls = transformers.Qwen3_5TextConfig if config.moe is None else (
        transformers.Qwen3_5MoeTextConfig
    )
    return cls.from_dict(target_json(config))


def make_draft(config: DraftConfig, target: TargetConfig, device: str, seed: int) -> nn.Module:
    """The published draft, bfloat16. Raises ValueError as `draft_config` does."""
    name = "DFlash2DraftModel" if config.kind is DraftKind.DFLASH2 else "DFlashDraftModel"
    return _built(getattr(dflash_model(), name), draft_config(config, target), device, seed)


def draft_config(config: DraftConfig, target: TargetConfig) -> transformers.Qwen3Config:
    """The published config of the same geometry; raises ValueError as `draft_json` does."""
    return transformers.Qwen3Config.from_dict(draft_json(config, target.num_layers))


def _built(cls, config, device: str, seed: int) -> nn.Module:
    """A model of `cls` in bfloat16 whose memory is taken, and filled, on the device only."""
    config._attn_implementation = "sdpa"
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = cls(config)
    model = model.to(torch.bfloat16).to_empty(device=device)
    model.tie_weights()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "inv_freq"):
                # Its frequencies come from the config, not from a checkpoint.
                setattr(parent, name, type(child)(child.config).to(device))
    strays = [name for name, _ in model.named_buffers() if not name.endswith("inv_freq")]
    if strays:
        raise ValueError(f"buffers: expected rotary frequencies only, got {strays}")
    fill(model, seed)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Draws every parameter: matrices with unit gain, norms around their neutral value."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for module in model.modules():
        norm = type(module).__name__
        neutral = float("Norm" in norm and norm not in OFFSET_NORMS)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 1:
                mean = -1.0 if name == "dt_bias" else neutral
                parameter.normal_(mean, 0.1, generator=generator)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)


def kernels_in_use(target: nn.Module) -> str:
    """Which optional kernels the models find, and which attention and experts they run."""
    found = []
    # The modules that transformers looks into.
    for name in ("fla.ops.gated_delta_rule", "causal_conv1d"):
        package = name.partition(".")[0]
        try:
            importlib.import_module(name)
        except ImportError as fault:
            found.append(f"{package} absent ({fault})")
        else:
            found.append(f"{package} {getattr(sys.modules[package], '__version__', 'present')}")
    experts = getattr(target.config, "_experts_implementation", None)
    return f"{', '.join(found)}; attention {target.config._attn_implementation}, experts {experts}"
