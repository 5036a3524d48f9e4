"""The two tables of names: HF tensor <-> parameter leaf, with symbolic shapes.

One entry a leaf: its path and shape, and the file tensors it is made of, in row order. Entries with
several layouts accept several spellings of one content; exactly one of them must be in the file.
Shapes here come from `checkpoints.md` 3 and 4.2, never from the modules. `{i}` is a layer id,
`{e}` an expert; a layout with `{e}` is repeated over all experts, a leaf of `EVERY_LAYER` over all
layers.

Symbols: V H I Hq Hkv D (contracts 0.1); E experts, Im / Is routed / shared width; Hk Hv Dk Dv and
C channels of the GDN; F = n_tap * H, n = draft layers, g = groups, R = selector rank.
"""

from __future__ import annotations

import math

from dflash_jax.config import DraftConfig, DraftKind, TargetConfig
from dflash_jax.weights.block_scaled import scaled_plan
from dflash_jax.weights.leaves import Layers, Leaf, Part, PlannedLeaf, PlannedPart, Storage
from dflash_jax.weights.transforms import Sizes

# Not used by a text-only run with a DFlash draft: multi-token prediction and the vision tower.
IGNORED_TARGET_PREFIXES = (
    "mtp.",
    "model.mtp.",
    "language_model.mtp.",
    "model.visual.",
    "visual.",
    "vision_tower.",
)
# Longest first: "model." is a prefix of the first.
TARGET_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
TARGET_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
DRAFT_PREFIX = "model."
DRAFT_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
# Stored without ".weight" in released files; some exports add it.
BARE_SUFFIXES = ("base_kernel", "predecessor_codebook", "successor_codebook")
# Handled beside the table: a draft's own embedding and head with its id map.
OWN_HEAD, OWN_HEAD_OFFSETS, OWN_HEAD_FLAGS = "lm_head.weight", "d2t", "t2d"
OWN_EMBEDDING = "embed_tokens.weight"
DFLASH2_NAME_PARTS = ("attention_conv", "mlp_conv", "candidate_selector")


def _matrix(path: str, shape: str, *layouts, layers=Layers.ALL, copy=False) -> Leaf:
    parts = tuple(tuple(Part(*part) for part in layout) for layout in layouts)
    return Leaf(path, shape, parts, Storage.MATRIX, layers, copy)


def _vector(path: str, shape: str, *layouts, layers=Layers.ALL, copy=False) -> Leaf:
    parts = tuple(tuple(Part(*part) for part in layout) for layout in layouts)
    return Leaf(path, shape, parts, Storage.VECTOR, layers, copy)


_L = "layers_{i}/"
_ATTN, _GDN, _MLP = "layers.{i}.self_attn.", "layers.{i}.linear_attn.", "layers.{i}.mlp."
_EXPERT, _SHARED = _MLP + "experts.{e}.", _MLP + "shared_expert."

_NORMS = (
    _vector(_L + "input_norm/weight", "H", [("layers.{i}.input_layernorm.weight", "H")]),
    _vector(_L + "post_norm/weight", "H", [("layers.{i}.post_attention_layernorm.weight", "H")]),
    _vector("final_norm/weight", "H", [("norm.weight", "H")], layers=Layers.ONCE),
)
_DENSE_MLP = (
    _matrix(
        _L + "mlp/gate_up/kernel",
        "2*I,H",
        [(_MLP + "gate_proj.weight", "I,H"), (_MLP + "up_proj.weight", "I,H")],
    ),
    _matrix(_L + "mlp/down/kernel", "H,I", [(_MLP + "down_proj.weight", "H,I")]),
)
_TARGET_HEAD = _matrix("head", "V,H", [("lm_head.weight", "V,H")], layers=Layers.ONCE)
_TARGET_SHARED = (
    _matrix("embedding", "V,H", [("embed_tokens.weight", "V,H")], layers=Layers.ONCE),
    *_NORMS,
)
_TARGET_FULL = (
    _matrix(
        _L + "attention/qgkv/kernel",
        "2*Hq*D+2*Hkv*D,H",
        [
            (_ATTN + "q_proj.weight", "2*Hq*D,H", "query"),
            (_ATTN + "q_proj.weight", "2*Hq*D,H", "gate"),
            (_ATTN + "k_proj.weight", "Hkv*D,H"),
            (_ATTN + "v_proj.weight", "Hkv*D,H"),
        ],
        layers=Layers.FULL,
    ),
    _vector(
        _L + "attention/query_norm/weight",
        "D",
        [(_ATTN + "q_norm.weight", "D")],
        layers=Layers.FULL,
    ),
    _vector(
        _L + "attention/key_norm/weight", "D", [(_ATTN + "k_norm.weight", "D")], layers=Layers.FULL
    ),
    _matrix(
        _L + "attention/output/kernel",
        "H,Hq*D",
        [(_ATTN + "o_proj.weight", "H,Hq*D")],
        layers=Layers.FULL,
    ),
)
_TARGET_LINEAR = (
    _matrix(
        _L + "delta_net/in_proj/kernel",
        "C+Hv*Dv+2*Hv,H",
        [
            (_GDN + "in_proj_qkv.weight", "C,H"),
            (_GDN + "in_proj_z.weight", "Hv*Dv,H"),
            (_GDN + "in_proj_a.weight", "Hv,H"),
            (_GDN + "in_proj_b.weight", "Hv,H"),
        ],
        layers=Layers.LINEAR,
    ),
    _vector(
        _L + "delta_net/conv",
        "C,kernel",
        [(_GDN + "conv1d.weight", "C,1,kernel", "conv_taps")],
        layers=Layers.LINEAR,
    ),
    _vector(_L + "delta_net/A_log", "Hv", [(_GDN + "A_log", "Hv")], layers=Layers.LINEAR),
    _vector(_L + "delta_net/dt_bias", "Hv", [(_GDN + "dt_bias", "Hv")], layers=Layers.LINEAR),
    _vector(
        _L + "delta_net/norm/weight", "Dv", [(_GDN + "norm.weight", "Dv")], layers=Layers.LINEAR
    ),
    _matrix(
        _L + "delta_net/output/kernel",
        "H,Hv*Dv",
        [(_GDN + "out_proj.weight", "H,Hv*Dv")],
        layers=Layers.LINEAR,
    ),
)
_TARGET_MOE = (
    _matrix(
        _L + "moe/router/kernel",
        "E+1,H",
        [(_MLP + "gate.weight", "E,H"), (_MLP + "shared_expert_gate.weight", "1,H")],
    ),
    _matrix(
        _L + "moe/gate_up",
        "E,2*Im,H",
        [(_MLP + "experts.gate_up_proj", "E,2*Im,H")],
        [(_EXPERT + "gate_proj.weight", "Im,H"), (_EXPERT + "up_proj.weight", "Im,H")],
    ),
    _matrix(
        _L + "moe/down",
        "E,H,Im",
        [(_MLP + "experts.down_proj", "E,H,Im")],
        [(_EXPERT + "down_proj.weight", "H,Im")],
    ),
    _matrix(
        _L + "moe/shared/gate_up/kernel",
        "2*Is,H",
        [(_SHARED + "gate_proj.weight", "Is,H"), (_SHARED + "up_proj.weight", "Is,H")],
    ),
    _matrix(_L + "moe/shared/down/kernel", "H,Is", [(_SHARED + "down_proj.weight", "H,Is")]),
)

_QKV = "Hq*D+2*Hkv*D,H"
_DRAFT_SHARED = (
    _matrix("context/feature_projection/kernel", "H,F", [("fc.weight", "H,F")], layers=Layers.ONCE),
    _vector("context/norm/weight", "H", [("hidden_norm.weight", "H")], layers=Layers.ONCE),
    _matrix(
        "context/key_value/kernel",
        "n*2*Hkv*D,H",
        [(_ATTN + "k_proj.weight", "Hkv*D,H"), (_ATTN + "v_proj.weight", "Hkv*D,H")],
        [
            (_ATTN + "qkv_proj.weight", _QKV, "fused_key"),
            (_ATTN + "qkv_proj.weight", _QKV, "fused_value"),
        ],
        layers=Layers.EVERY_LAYER,
        copy=True,
    ),
    _vector(
        "context/key_norm",
        "n,D",
        [(_ATTN + "k_norm.weight", "D")],
        layers=Layers.EVERY_LAYER,
        copy=True,
    ),
    *_NORMS,
    _matrix(
        _L + "attention/qkv/kernel",
        _QKV,
        [
            (_ATTN + "q_proj.weight", "Hq*D,H"),
            (_ATTN + "k_proj.weight", "Hkv*D,H"),
            (_ATTN + "v_proj.weight", "Hkv*D,H"),
        ],
        [(_ATTN + "qkv_proj.weight", _QKV)],
    ),
    _vector(_L + "attention/query_norm/weight", "D", [(_ATTN + "q_norm.weight", "D")]),
    _vector(_L + "attention/key_norm/weight", "D", [(_ATTN + "k_norm.weight", "D")]),
    _matrix(_L + "attention/output/kernel", "H,Hq*D", [(_ATTN + "o_proj.weight", "H,Hq*D")]),
    *_DENSE_MLP,
)
_OWN_EMBEDDING = _matrix("embedding", "V,H", [(OWN_EMBEDDING, "V,H")], layers=Layers.ONCE)


def _grouped_conv(name: str) -> tuple[Leaf, ...]:
    source, path = "layers.{i}." + name + ".", _L + name
    return (
        _vector(path + "/base", "2,taps,H", [(source + "base_kernel", "2,taps,H")]),
        _matrix(
            path + "/projection/kernel",
            "2*taps*g,H",
            [(source + "kernel_projection.weight", "2*taps*g,H")],
        ),
    )


def _selector(path: str, name: str, shape: str) -> Leaf:
    source = "candidate_selector." + name
    return _matrix("selector/" + path, shape, [(source, shape)], layers=Layers.ONCE)


_DRAFT_SECOND = (
    *_grouped_conv("attention_conv"),
    *_grouped_conv("mlp_conv"),
    _selector("projection/kernel", "hidden_projection.weight", "R,H"),
    _selector("predecessor", "predecessor_codebook", "V,R"),
    _selector("successor", "successor_codebook", "V,R"),
)


def target_plan(config: TargetConfig) -> tuple[list[PlannedLeaf], Sizes]:
    """Every leaf of a target and the extents of all symbols."""
    leaves = _TARGET_SHARED + (() if config.tie_embeddings else (_TARGET_HEAD,))
    leaves += _TARGET_FULL + _TARGET_LINEAR + (_TARGET_MOE if config.moe else _DENSE_MLP)
    sizes = {
        "V": config.vocab_rows,
        "H": config.hidden,
        "Hq": config.query_heads,
        "Hkv": config.kv_heads,
        "D": config.head_dim,
    }
    if config.gdn is not None:
        gdn = config.gdn
        sizes |= {"Hv": gdn.value_heads, "Dv": gdn.value_dim}
        sizes |= {"C": gdn.channels, "kernel": gdn.conv_kernel}
    if config.moe is None:
        sizes["I"] = config.intermediate
    else:
        moe = config.moe
        sizes |= {"E": moe.num_experts, "Im": moe.intermediate, "Is": moe.shared_intermediate}
    layers = {
        Layers.ALL: range(config.num_layers),
        Layers.FULL: config.full_layers,
        Layers.LINEAR: config.linear_layers,
    }
    return scaled_plan(_plan(leaves, sizes, layers), sizes, config), sizes


def draft_plan(config: DraftConfig) -> tuple[list[PlannedLeaf], Sizes]:
    """Every leaf of a draft, an own head excepted, and the extents of all symbols."""
    leaves = _DRAFT_SHARED + ((_OWN_EMBEDDING,) if config.own_embedding else ())
    sizes = {
        "V": config.vocab_rows,
        "H": config.hidden,
        "I": config.intermediate,
        "Hq": config.query_heads,
        "Hkv": config.kv_heads,
        "D": config.head_dim,
        "F": config.feature_width,
        "n": config.draft_layers,
    }
    if config.kind is DraftKind.DFLASH2:
        leaves += _DRAFT_SECOND
        sizes |= {"taps": config.conv.taps, "R": config.selector.rank}
        sizes["g"] = config.hidden // config.conv.group_width
    return _plan(leaves, sizes, {Layers.ALL: range(config.draft_layers)}), sizes


def extents(shape: str, sizes: Sizes) -> tuple[int, ...]:
    """Evaluates a symbolic shape: sums of products of symbols and integers, by comma."""

    def factor(text: str) -> int:
        return int(text) if text.isdigit() else sizes[text]

    def extent(text: str) -> int:
        return sum(math.prod(map(factor, term.split("*"))) for term in text.split("+"))

    return tuple(extent(text) for text in shape.split(","))


def _plan(leaves: tuple[Leaf, ...], sizes: Sizes, layers: dict) -> list[PlannedLeaf]:
    planned = []
    for leaf in leaves:
        if leaf.layers in (Layers.ONCE, Layers.EVERY_LAYER):
            ids = range(sizes["n"]) if leaf.layers is Layers.EVERY_LAYER else (0,)
            planned.append(_planned(leaf, sizes, leaf.path, ids))
        else:
            for i in layers[leaf.layers]:
                planned.append(_planned(leaf, sizes, leaf.path.format(i=i), (i,)))
    return planned


def _planned(leaf: Leaf, sizes: Sizes, path: str, layer_ids) -> PlannedLeaf:
    layouts = []
    for layout in leaf.layouts:
        experts = range(sizes["E"]) if "{e}" in layout[0].name else (0,)
        parts = [
            PlannedPart(part.name.format(i=i, e=e), extents(part.shape, sizes), part.view)
            for i in layer_ids
            for e in experts
            for part in layout
        ]
        layouts.append(tuple(parts))
    shape = extents(leaf.shape, sizes)
    return PlannedLeaf(tuple(path.split("/")), shape, tuple(layouts), leaf.storage, leaf.copy)
