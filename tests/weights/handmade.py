"""Tensors of tiny files with names and shapes written out by hand (checkpoints.md 3 and 4.2).

Nothing here reads the library's tables. Values are random, kept in float32 after rounding to
bfloat16, so every file dtype but float16 holds them exactly.
"""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.oracles import block_scaled_linear as blocks

# tiny_target: H 64, V 257, Hq 4, Hkv 2, D 32, I 96; GDN Hk 2, Hv 4, Dk = Dv = 16, kernel 4.
_FULL = {
    "self_attn.q_proj.weight": (256, 64),
    "self_attn.k_proj.weight": (64, 64),
    "self_attn.v_proj.weight": (64, 64),
    "self_attn.o_proj.weight": (64, 128),
    "self_attn.q_norm.weight": (32,),
    "self_attn.k_norm.weight": (32,),
}
_LINEAR = {
    "linear_attn.in_proj_qkv.weight": (128, 64),
    "linear_attn.in_proj_z.weight": (64, 64),
    "linear_attn.in_proj_a.weight": (4, 64),
    "linear_attn.in_proj_b.weight": (4, 64),
    "linear_attn.conv1d.weight": (128, 1, 4),
    "linear_attn.A_log": (4,),
    "linear_attn.dt_bias": (4,),
    "linear_attn.norm.weight": (16,),
    "linear_attn.out_proj.weight": (64, 64),
}
_NORMS = {"input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,)}
_DENSE = {
    "mlp.gate_proj.weight": (96, 64),
    "mlp.up_proj.weight": (96, 64),
    "mlp.down_proj.weight": (64, 96),
}
_MOE = {
    "mlp.gate.weight": (8, 64),
    "mlp.shared_expert_gate.weight": (1, 64),
    "mlp.experts.gate_up_proj": (8, 32, 64),
    "mlp.experts.down_proj": (8, 64, 16),
    "mlp.shared_expert.gate_proj.weight": (40, 64),
    "mlp.shared_expert.up_proj.weight": (40, 64),
    "mlp.shared_expert.down_proj.weight": (64, 40),
}
# tiny_draft: H 64, I 96, Hq 4, Hkv 2, D 32, three captured blocks; taps 2, 4 groups, rank 8.
_DRAFT = {
    "self_attn.q_proj.weight": (128, 64),
    "self_attn.k_proj.weight": (64, 64),
    "self_attn.v_proj.weight": (64, 64),
    "self_attn.o_proj.weight": (64, 128),
    "self_attn.q_norm.weight": (32,),
    "self_attn.k_norm.weight": (32,),
}
_CONV = {
    "attention_conv.base_kernel": (2, 2, 64),
    "attention_conv.kernel_projection.weight": (16, 64),
    "mlp_conv.base_kernel": (2, 2, 64),
    "mlp_conv.kernel_projection.weight": (16, 64),
}
_SELECTOR = {
    "candidate_selector.hidden_projection.weight": (8, 64),
    "candidate_selector.predecessor_codebook": (257, 8),
    "candidate_selector.successor_codebook": (257, 8),
}


def values(shapes, seed=0):
    """Random float32 tensors that bfloat16 holds exactly."""
    rng = np.random.default_rng(seed)
    draw = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return {name: a.astype(ml_dtypes.bfloat16).astype(np.float32) for name, a in draw.items()}


def target_tensors(moe=False, prefix="model.language_model."):
    """Tensors of `tiny_target(moe)`, layers linear, linear, linear, full, by stored name."""
    shapes = {"embed_tokens.weight": (257, 64), "norm.weight": (64,)}
    for i in range(4):
        layer = _NORMS | (_FULL if i == 3 else _LINEAR) | (_MOE if moe else _DENSE)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes = {prefix + name: shape for name, shape in shapes.items()}
    return values(shapes | {"lm_head.weight": (257, 64)})


# What official FP8 releases store in float8; everything else stays as it is.
_FP8 = (
    "in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight", "q_proj.weight", "k_proj.weight",
    "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight",
    "experts.gate_up_proj", "experts.down_proj",
)  # fmt: skip


def in_fp8(tensors, rows, columns, dense=()):
    """The tensors with float8 matrices and their scales, which bfloat16 holds exactly.

    dense: parts of names that stay as they are.
    """
    stored = {}
    for name, tensor in tensors.items():
        if not name.endswith(_FP8) or any(part in name for part in dense):
            stored[name] = tensor
            continue
        matrices = tensor.reshape(-1, *tensor.shape[-2:])
        pairs = [_quantised(matrix, rows, columns) for matrix in matrices]
        values, scale = (np.stack(part) for part in zip(*pairs, strict=True))
        stored[name] = values.reshape(tensor.shape)
        stored[f"{name}_scale_inv"] = scale.reshape(*tensor.shape[:-2], *scale.shape[-2:])
    return stored


def _quantised(matrix, rows, columns):
    _, scale = blocks.quantise(matrix, rows, columns)
    scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
    wide = np.repeat(np.repeat(scale, rows, 0), columns, 1)[: matrix.shape[0], : matrix.shape[1]]
    return np.clip(matrix / wide, -448, 448).astype(ml_dtypes.float8_e4m3fn), scale


def dequantised(tensors, rows, columns):
    """The dense tensors of the same values in float64, by the formula, scales left out."""
    dense = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            pairs = zip(
                tensor.reshape(-1, *tensor.shape[-2:]), scale.reshape(-1, *scale.shape[-2:]),
                strict=True,
            )  # fmt: skip
            exact = [blocks.dequantise(values, s, rows, columns) for values, s in pairs]
            dense[name] = np.reshape(exact, tensor.shape)
        elif not name.endswith("_scale_inv"):
            dense[name] = tensor
    return dense


def draft_tensors(second=False):
    """Tensors of `tiny_draft`, by the names of released files."""
    shapes = {"fc.weight": (64, 192), "hidden_norm.weight": (64,), "norm.weight": (64,)}
    for i in range(2):
        layer = _NORMS | _DRAFT | _DENSE | (_CONV if second else {})
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return values(shapes | (_SELECTOR if second else {}), seed=1)


def write(folder, config, tensors, dtype="bfloat16", shards=1):
    """Writes a model folder; with several shards also their index. Only float32 arrays are cast."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    cast = {name: a.astype(dtype) if a.dtype == np.float32 else a for name, a in tensors.items()}
    if shards == 1:
        save_file(cast, folder / "model.safetensors")
        return folder
    weight_map, names = {}, sorted(cast)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: cast[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
