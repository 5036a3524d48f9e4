"""The Qwen3.5 hybrid target: gated attention and Gated DeltaNet layers, dense or MoE."""

from dflash_jax.target.model import Target, TargetColumns, TargetOutput

__all__ = ["Target", "TargetColumns", "TargetOutput"]
