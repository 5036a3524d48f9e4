"""Published geometries, and tiny ones, for tests and benches. Files decide real geometry.

Source: `checkpoints.md` 2.2, 2.3 and 4.1. Block sizes and causality as recorded there; the 4B and
9B tables are of low and medium confidence.
"""

from __future__ import annotations

from dflash_jax.config.geometry import (
    ConvConfig,
    DraftConfig,
    DraftKind,
    GdnConfig,
    LayerKind,
    MoeConfig,
    RopeConfig,
    SelectorConfig,
    TargetConfig,
)

_PATTERN = (LayerKind.LINEAR,) * 3 + (LayerKind.FULL,)
_LOCAL, _FULL = LayerKind.SLIDING, LayerKind.FULL


def _qwen35(*, layers: int, value_heads: int, **fields) -> TargetConfig:
    """What all published Qwen3.5-family targets share."""
    shared = dict(
        vocab_rows=248320,
        public_vocab=248077,
        head_dim=256,
        layer_types=_PATTERN * (layers // 4),
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e7, partial_factor=0.25, mrope_section=(11, 11, 10)),
        gdn=GdnConfig(
            key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128, conv_kernel=4
        ),
        intermediate=None,
        moe=None,
        tie_embeddings=False,
        max_positions=262144,
    )
    return TargetConfig(**(shared | fields))


def qwen35_4b() -> TargetConfig:
    """Qwen3.5-4B (tied; low confidence)."""
    return _qwen35(
        hidden=2560,
        layers=32,
        query_heads=16,
        kv_heads=4,
        value_heads=32,
        intermediate=9216,
        tie_embeddings=True,
    )


def qwen35_9b() -> TargetConfig:
    """Qwen3.5-9B (medium confidence)."""
    return _qwen35(
        hidden=4096, layers=32, query_heads=16, kv_heads=4, value_heads=32, intermediate=12288
    )


def qwen35_27b() -> TargetConfig:
    """The dense 27B of 3.5, 3.6 and 3.8."""
    return _qwen35(
        hidden=5120, layers=64, query_heads=24, kv_heads=4, value_heads=48, intermediate=17408
    )


def qwen35_35b_a3b() -> TargetConfig:
    """The 35B-A3B mixture of experts of 3.5 and 3.6."""
    moe = MoeConfig(num_experts=256, experts_per_token=8, intermediate=512, shared_intermediate=512)
    return _qwen35(hidden=2048, layers=40, query_heads=16, kv_heads=2, value_heads=32, moe=moe)


def _released(kind: DraftKind, **fields) -> DraftConfig:
    """What the published drafts of the Qwen3.5 family share."""
    shared = dict(
        kind=kind,
        query_heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_rows=248320,
        norm_eps=1e-6,
        rope_theta=1e7,
        max_positions=262144,
        conv=None,
        selector=None,
    )
    if kind is DraftKind.DFLASH2:
        shared["conv"] = ConvConfig(taps=2, group_width=16)
        shared["selector"] = SelectorConfig(rank=256, num_candidates=16)
    return DraftConfig(**(shared | fields))


def dflash2_27b() -> DraftConfig:
    """Qwen3.8-27B-DFlash2: five bidirectional local layers."""
    return _released(
        DraftKind.DFLASH2,
        hidden=5120,
        intermediate=17408,
        layer_types=(_LOCAL,) * 5,
        window=2048,
        target_layer_ids=(5, 19, 33, 47, 61),
        mask_token_id=248070,
        block_size=8,
    )


def dflash_35b_a3b() -> DraftConfig:
    """Qwen3.6-35B-A3B-DFlash, causal in its local layers by the published rule."""
    return _released(
        DraftKind.DFLASH,
        hidden=2048,
        intermediate=6144,
        layer_types=(_LOCAL,) * 5 + (_FULL,),
        window=4096,
        causal=(True,) * 5 + (False,),
        target_layer_ids=(1, 6, 11, 16, 22, 27, 32, 37),
        mask_token_id=248077,
        block_size=16,
    )


def dflash_27b() -> DraftConfig:
    """The original 27B DFlash draft: five full layers (medium confidence)."""
    return _released(
        DraftKind.DFLASH,
        hidden=5120,
        intermediate=17408,
        layer_types=(_FULL,) * 5,
        window=None,
        target_layer_ids=(1, 16, 31, 46, 61),
        mask_token_id=248070,
        block_size=16,
    )


def dflash2_35b_a3b() -> DraftConfig:
    """Qwen3.6-35B-A3B-DFlash2; layer kinds and window were not seen, six local layers assumed."""
    return _released(
        DraftKind.DFLASH2,
        hidden=2048,
        intermediate=6144,
        layer_types=(_LOCAL,) * 6,
        window=2048,
        target_layer_ids=(1, 6, 11, 16, 22, 27, 32, 37),
        mask_token_id=248077,
        block_size=8,
    )


def tiny_target(moe: bool = False, **overrides) -> TargetConfig:
    """A four-layer target for tests; `overrides` replace fields."""
    experts = MoeConfig(num_experts=8, experts_per_token=2, intermediate=16, shared_intermediate=40)
    fields = dict(
        hidden=64,
        vocab_rows=257,
        public_vocab=250,
        query_heads=4,
        kv_heads=2,
        head_dim=32,
        layer_types=_PATTERN,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e4, partial_factor=0.25, mrope_section=(2, 1, 1)),
        gdn=GdnConfig(key_heads=2, value_heads=4, key_dim=16, value_dim=16, conv_kernel=4),
        intermediate=None if moe else 96,
        moe=experts if moe else None,
        tie_embeddings=False,
        max_positions=4096,
    )
    return TargetConfig(**(fields | overrides))


def tiny_draft(kind: DraftKind, **overrides) -> DraftConfig:
    """A two-layer draft over `tiny_target`; the mask id is a reserved row on purpose."""
    second = kind is DraftKind.DFLASH2
    fields = dict(
        kind=kind,
        hidden=64,
        intermediate=96,
        query_heads=4,
        kv_heads=2,
        head_dim=32,
        layer_types=(_LOCAL, _LOCAL if second else _FULL),
        window=12,
        target_layer_ids=(1, 3, 0),
        mask_token_id=256,
        vocab_rows=257,
        norm_eps=1e-6,
        rope_theta=1e4,
        max_positions=4096,
        conv=ConvConfig(taps=2, group_width=16) if second else None,
        selector=SelectorConfig(rank=8, num_candidates=8) if second else None,
    )
    return DraftConfig(**(fields | overrides))
