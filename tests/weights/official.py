"""Model folders with the names, shapes and dtypes of official releases, and without their bytes.

Written out from checkpoints.md 2.2, 3, 4.1 and 4.2, not from the library's tables. The files are
sparse: a header, then a hole of the right length, which reads as zeros.
"""

import json
import math

VOCAB = 248320
_ITEM = {"BF16": 2, "F32": 4, "F16": 2, "F8_E4M3": 1, "U8": 1, "I32": 4, "U32": 4, "I64": 8}
# hidden, layers, query heads, kv heads, GDN value heads, dense MLP width or None for experts.
_TARGETS = {
    "4B": (2560, 32, 16, 4, 32, 9216),
    "9B": (4096, 32, 16, 4, 32, 12288),
    "27B": (5120, 64, 24, 4, 48, 17408),
    "35B-A3B": (2048, 40, 16, 2, 32, None),
}
_EXPERTS, _EXPERT = 256, 512


def _attention(hidden, heads, kv_heads, dim, gated):
    return {
        "self_attn.q_proj.weight": ((2 if gated else 1) * heads * dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def _linear(hidden, heads):
    return {
        "linear_attn.in_proj_qkv.weight": (2 * 16 * 128 + heads * 128, hidden),
        "linear_attn.in_proj_z.weight": (heads * 128, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (2 * 16 * 128 + heads * 128, 1, 4),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (128,),
        "linear_attn.out_proj.weight": (hidden, heads * 128),
    }


def _mlp(hidden, width, stem="mlp."):
    return {
        stem + "gate_proj.weight": (width, hidden),
        stem + "up_proj.weight": (width, hidden),
        stem + "down_proj.weight": (hidden, width),
    }


def _experts(hidden, each):
    routed = {
        "mlp.experts.gate_up_proj": (_EXPERTS, 2 * _EXPERT, hidden),
        "mlp.experts.down_proj": (_EXPERTS, hidden, _EXPERT),
    }
    if each:
        routed = {}
        for e in range(_EXPERTS):
            routed |= _mlp(hidden, _EXPERT, f"mlp.experts.{e}.")
    return {
        "mlp.gate.weight": (_EXPERTS, hidden),
        "mlp.shared_expert_gate.weight": (1, hidden),
        **routed,
        **_mlp(hidden, _EXPERT, "mlp.shared_expert."),
    }


def _norms(hidden):
    return {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _vision(out):
    """27 blocks of width 1152: 333 tensors."""
    width, mlp = 1152, 4304
    block = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
    block |= {"mlp.linear_fc1": (mlp, width), "mlp.linear_fc2": (width, mlp)}
    tensors = {"patch_embed.proj.weight": (width, 3, 2, 16, 16), "patch_embed.proj.bias": (width,)}
    tensors |= {"pos_embed.weight": (2304, width), "merger.norm.weight": (width,)}
    tensors |= {"merger.norm.bias": (width,)}
    for name, shape in (("1", (4 * width, 4 * width)), ("2", (out, 4 * width))):
        tensors[f"merger.linear_fc{name}.weight"] = shape
        tensors[f"merger.linear_fc{name}.bias"] = shape[:1]
    for i in range(27):
        for name, shape in block.items():
            tensors[f"blocks.{i}.{name}.weight"] = shape
            tensors[f"blocks.{i}.{name}.bias"] = shape[:1]
        for norm in ("norm1", "norm2"):
            tensors |= {f"blocks.{i}.{norm}.{part}": (width,) for part in ("weight", "bias")}
    return {f"model.visual.{name}": shape for name, shape in tensors.items()}


def target_shapes(size, *, each=False, prefix="model.language_model.", whole=True):
    """Tensors of a release: text, and with `whole` the vision tower and the MTP layer too."""
    hidden, layers, heads, kv_heads, value_heads, width = _TARGETS[size]
    mlp = _experts(hidden, each) if width is None else _mlp(hidden, width)
    full = _attention(hidden, heads, kv_heads, 256, gated=True) | mlp | _norms(hidden)
    linear = _linear(hidden, value_heads) | mlp | _norms(hidden)
    text = {"embed_tokens.weight": (VOCAB, hidden), "norm.weight": (hidden,)}
    for i in range(layers):
        layer = full if i % 4 == 3 else linear
        text |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes = {prefix + name: shape for name, shape in text.items()}
    if size != "4B":
        shapes["lm_head.weight"] = (VOCAB, hidden)
    if whole:
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            shapes[f"mtp.{name}.weight"] = (hidden,)
        shapes |= {f"mtp.layers.0.{name}": shape for name, shape in full.items()}
        shapes |= _vision(hidden)
    return shapes


def target_config(size):
    """config.json of a release: a multimodal wrapper around the text model."""
    hidden, layers, heads, kv_heads, value_heads, width = _TARGETS[size]
    name, kind = ("Qwen3_5", "qwen3_5") if width else ("Qwen3_5Moe", "qwen3_5_moe")
    text = {
        "model_type": f"{kind}_text", "attention_bias": False, "attn_output_gate": True,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": 256, "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 262144, "vocab_size": VOCAB,
        "eos_token_id": 248044, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        },
    }  # fmt: skip
    if width:
        text["intermediate_size"] = width
    else:
        text |= {
            "num_experts": _EXPERTS, "num_experts_per_tok": 8, "moe_intermediate_size": _EXPERT,
            "shared_expert_intermediate_size": _EXPERT, "router_aux_loss_coef": 0.001,
        }  # fmt: skip
    return {
        "architectures": [f"{name}ForConditionalGeneration"], "model_type": kind,
        "text_config": text, "vision_config": {"depth": 27}, "tie_word_embeddings": size == "4B",
        "image_token_id": 248056, "video_token_id": 248057,
    }  # fmt: skip


def draft_shapes(hidden, width, layers, taps, second):
    """Tensors of a release with 32 / 8 heads of 128; DFlash2: 2 taps, groups of 16, rank 256."""
    layer = _attention(hidden, 32, 8, 128, gated=False) | _mlp(hidden, width) | _norms(hidden)
    shapes = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,)}
    shapes["norm.weight"] = (hidden,)
    if second:
        for conv in ("attention_conv", "mlp_conv"):
            layer[f"{conv}.base_kernel"] = (2, 2, hidden)
            layer[f"{conv}.kernel_projection.weight"] = (2 * 2 * hidden // 16, hidden)
        shapes["candidate_selector.hidden_projection.weight"] = (256, hidden)
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{name}"] = (VOCAB, 256)
    for i in range(layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def draft_config(release):
    """config.json of "27B-DFlash2", "35B-A3B-DFlash" or "27B-DFlash" (the original)."""
    common = {
        "model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": VOCAB, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "attention_bias": False, "hidden_act": "silu", "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    rope = {"rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}}
    if release == "27B-DFlash2":
        return common | rope | {
            "architectures": ["DFlash2DraftModel"], "hidden_size": 5120,
            "intermediate_size": 17408, "num_hidden_layers": 5, "num_target_layers": 64,
            "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "is_causal": False,
            "dflash_config": {
                "target_layer_ids": [5, 19, 33, 47, 61], "mask_token_id": 248070, "block_size": 8,
                "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
                "selector_top_k": 16,
            },
        }  # fmt: skip
    if release == "35B-A3B-DFlash":
        return common | rope | {
            "architectures": ["DFlashDraftModel"], "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 6, "num_target_layers": 40, "sliding_window": 4096,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "dflash_config": {
                "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37], "mask_token_id": 248077,
                "block_size": 16,
            },
        }  # fmt: skip
    return common | {
        "architectures": ["DFlashDraftModel"], "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 5, "num_target_layers": 64, "block_size": 16, "rope_theta": 1e7,
        "rope_scaling": None, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": {"target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 248070},
    }  # fmt: skip


DRAFTS = {
    "27B-DFlash2": ("27B", draft_shapes(5120, 17408, 5, 5, second=True)),
    "27B-DFlash": ("27B", draft_shapes(5120, 17408, 5, 5, second=False)),
    "35B-A3B-DFlash": ("35B-A3B", draft_shapes(2048, 6144, 6, 8, second=False)),
}


def count(shapes):
    return sum(math.prod(shape) for shape in shapes.values())


def write_header(path, shapes, dtypes=None):
    """A sparse safetensors file; `dtypes` by name, BF16 otherwise. Returns its size."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "BF16")
        size = math.prod(shape) * _ITEM[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return 8 + len(text) + end


def write_folder(folder, config, shapes, dtypes=None, shards=1):
    """A model folder of sparse files, with an index where there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_header(folder / "model.safetensors", shapes, dtypes)
        return folder
    names, weight_map = list(shapes), {}
    each = -(-len(names) // shards)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * each : (shard + 1) * each]
        write_header(folder / file, {name: shapes[name] for name in part}, dtypes)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 2 * count(shapes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
