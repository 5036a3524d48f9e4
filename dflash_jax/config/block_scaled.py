"""Which matrices of a target are float8 with one scale a block, and how large a block is.

Source: `checkpoints.md` 4.3 (FP8 block).
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_jax.config.rules import positive_ints, require

# Matrices of a layer that may be block-scaled, by the place of the layer that has them. Embedding,
# head, router, the a and b rows of the delta net and everything small stay dense.
FULL_MATRICES = ("attention/qgkv", "attention/output")
LINEAR_MATRICES = ("delta_net/in_proj", "delta_net/output")
DENSE_MATRICES = ("mlp/gate_up", "mlp/down")
MOE_MATRICES = ("moe/gate_up", "moe/down", "moe/shared/gate_up", "moe/shared/down")


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Block-scaled float8_e4m3fn matrices: a weight is its float8 value times its block's scale."""

    block_rows: int
    block_columns: int
    layers: tuple[tuple[str, ...], ...]  # per layer, the names of its block-scaled matrices

    def __post_init__(self):
        positive_ints(self, "fp8.", "block_rows block_columns")
        legal = isinstance(self.layers, tuple) and all(
            isinstance(names, tuple) and all(isinstance(name, str) for name in names)
            for names in self.layers
        )
        require(legal, "fp8.layers", "a tuple of names for each layer", self.layers)

    @property
    def count(self) -> int:
        """Block-scaled matrices of all layers."""
        return sum(map(len, self.layers))

    def check(self, scalable: tuple[tuple[str, ...], ...]) -> None:
        """Raises ConfigError for layers or matrices that the model has not.

        Args:
          scalable: per layer, the names that may be block-scaled.
        """
        expected = f"{len(scalable)} layers"
        require(len(self.layers) == len(scalable), "fp8.layers", expected, len(self.layers))
        for layer, (names, known) in enumerate(zip(self.layers, scalable, strict=True)):
            legal = set(names) <= set(known) and len(set(names)) == len(names)
            require(legal, f"fp8.layers[{layer}]", f"distinct names out of {known}", names)
