"""The shipped pair's geometry and the sizes and budgets of its recipe."""

import dataclasses
from collections.abc import Sequence

from dflash_jax.config import (
    ConvConfig,
    DraftConfig,
    DraftKind,
    DtypePolicy,
    GdnConfig,
    LayerKind,
    RopeConfig,
    SelectorConfig,
    TargetConfig,
)
from dflash_jax.steps import Models
from dflash_jax.training.continuations import continuation_models
from dflash_jax.training.fit import FitConfig
from dflash_jax.training.forward import training_dtypes
from dflash_jax.training.stages import DraftObjective, TargetObjective

RESERVED = 8  # rows above the tokenizer's ids; the last is the mask
DRAFT_TOKENS = 7
DRAFTS = {"dflash": DraftKind.DFLASH, "dflash2": DraftKind.DFLASH2}
SERVING = DtypePolicy()


def pair_target(public_vocab: int) -> TargetConfig:
    """Eight layers, 3 Gated DeltaNet : 1 gated attention, head tied to the embedding."""
    return TargetConfig(
        hidden=224,
        vocab_rows=public_vocab + RESERVED,
        public_vocab=public_vocab,
        query_heads=4,
        kv_heads=2,
        head_dim=64,
        layer_types=((LayerKind.LINEAR,) * 3 + (LayerKind.FULL,)) * 2,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e4, partial_factor=0.25, mrope_section=(3, 3, 2)),
        gdn=GdnConfig(key_heads=2, value_heads=4, key_dim=64, value_dim=64, conv_kernel=4),
        intermediate=512,
        moe=None,
        tie_embeddings=True,
        max_positions=4096,
    )


def smoke_target(public_vocab: int) -> TargetConfig:
    """A quarter of it in every direction, to run the recipe on a CPU."""
    return dataclasses.replace(
        pair_target(public_vocab), hidden=64, head_dim=32, intermediate=96,
        layer_types=(LayerKind.LINEAR,) * 3 + (LayerKind.FULL,),
        rope=RopeConfig(theta=1e4, partial_factor=0.25, mrope_section=(2, 1, 1)),
        gdn=GdnConfig(key_heads=2, value_heads=4, key_dim=16, value_dim=16, conv_kernel=4),
    )


def pair_draft(
    target: TargetConfig, kind: DraftKind, *,
    layer_ids: Sequence[int] | None = None, mask_token_id: int | None = None,
) -> DraftConfig:
    """Three layers: DFlash two local and one full, DFlash2 all local.

    Args:
      layer_ids: captured blocks; by default the ends of the four quarters of the target.
      mask_token_id: by default the last row of the vocabulary.
    """
    second = kind is DraftKind.DFLASH2
    local = LayerKind.SLIDING
    depth = target.num_layers
    quarters = {depth // 4 - 1, depth // 2 - 1, 3 * depth // 4 - 1, depth - 1} - {-1}
    return DraftConfig(
        kind=kind,
        hidden=target.hidden,
        intermediate=2 * target.hidden - target.hidden % 64,
        query_heads=4,
        kv_heads=2,
        head_dim=64 if target.hidden > 128 else 32,
        layer_types=(local, local, local if second else LayerKind.FULL),
        window=64,
        target_layer_ids=tuple(sorted(quarters) if layer_ids is None else layer_ids),
        mask_token_id=target.vocab_rows - 1 if mask_token_id is None else mask_token_id,
        vocab_rows=target.vocab_rows,
        norm_eps=1e-6,
        rope_theta=1e4,
        max_positions=target.max_positions,
        conv=ConvConfig(taps=2, group_width=16) if second else None,
        selector=SelectorConfig(rank=64, num_candidates=16) if second else None,
        block_size=DRAFT_TOKENS + 1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and budgets of a run.

    target, draft: how each is fitted; both drafts get the same budget.
    compute: dtype of training passes, masters stay float32.
    target_batch, target_length: stretches per step of the target.
    prompt, new_tokens: lengths of the sequences that the target writes for its drafts.
    temperatures: one per batch of such sequences. sequences: sequences per batch.
    draft_batch, blocks: sequences per step of a draft, anchors in each.
    shorter: share of a DFlash draft's blocks with fewer masks than K.
    held_out_prompts, held_out_tokens: of the validation; prompts have `prompt` tokens.
    """

    target: FitConfig
    draft: FitConfig
    compute: str = "bfloat16"
    target_batch: int = 32
    target_length: int = 512
    prompt: int = 64
    new_tokens: int = 192
    temperatures: tuple[float, ...] = (0.0, 0.0, 1.0) * 6
    sequences: int = 4096
    capture_batch: int = 256
    draft_batch: int = 64
    blocks: int = 24
    gamma: float = 4.0
    shorter: float = 0.25
    held_out_prompts: int = 128
    held_out_tokens: int = 128
    seed: int = 0

    @property
    def dtypes(self) -> DtypePolicy:
        return training_dtypes(self.compute)

    def target_objective(self, config: TargetConfig) -> TargetObjective:
        return TargetObjective(
            config=config, dtypes=self.dtypes, batch=self.target_batch, length=self.target_length
        )

    def draft_objective(self, target: TargetConfig, draft: DraftConfig) -> DraftObjective:
        return DraftObjective(
            target=target, draft=draft, dtypes=self.dtypes, draft_tokens=DRAFT_TOKENS,
            batch=self.draft_batch, blocks=self.blocks, prompt=self.prompt, gamma=self.gamma,
            shorter=self.shorter,
        )

    def writer(self, config: TargetConfig) -> Models:
        return continuation_models(
            config, SERVING, batch=self.sequences, prompt=self.prompt, new_tokens=self.new_tokens
        )
