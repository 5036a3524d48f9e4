"""A model pair: the static half that a jit closes over, and the array half."""

from dataclasses import dataclass, replace
from typing import Any

from flax import struct

from dflash_jax.config import (
    ConfigError,
    DraftConfig,
    DraftKind,
    RunConfig,
    TargetConfig,
    check_pair,
    check_run,
)
from dflash_jax.draft import DFlash, DFlash2, build_draft
from dflash_jax.state.decode import DecodeState
from dflash_jax.state.scratch import RoundExtent
from dflash_jax.state.sequence import SequenceState, round_extent
from dflash_jax.target import Target


@dataclass(frozen=True)
class Models:
    """Geometry and run choices; hashable, so a static argument of every step.

    draft is None for plain autoregressive decoding (W = 1).
    Raises: ConfigError when the three do not fit one another.
    """

    target: TargetConfig
    draft: DraftConfig | None
    run: RunConfig

    def __post_init__(self):
        fields = {"target": TargetConfig, "draft": DraftConfig | None, "run": RunConfig}
        for name, kind in fields.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ConfigError(f"{name}: expected {kind}, got {type(value).__name__}")
        if self.draft is not None:
            check_pair(self.target, self.draft)
        check_run(self.target, self.draft, self.run)

    @property
    def target_module(self) -> Target:
        capture = self.draft.target_layer_ids if self.draft is not None else ()
        return Target(self.target, self.run.dtypes, capture, self.run.implementation)

    @property
    def draft_module(self) -> DFlash | DFlash2:
        return build_draft(self.draft, self.run.dtypes, self.run.implementation)

    @property
    def whole_block(self) -> bool:
        """DFlash2 proposes all W columns even where fewer can be verified."""
        return self.draft is not None and self.draft.kind == DraftKind.DFLASH2

    def with_tree(self, nodes: int) -> "Models":
        """The same pair with rounds of that many columns, 0 for chains; a state serves them all.

        Raises: ConfigError for a width that does not fit.
        """
        if nodes == self.run.tree_nodes:
            return self
        return replace(self, run=replace(self.run, tree_nodes=nodes))

    def zeros(self) -> DecodeState:
        """An empty state for this pair."""
        return DecodeState.zeros(self.target, self.draft, self.run)

    def extent(self, sequence: SequenceState) -> RoundExtent:
        """Extents of the next round from per-row numbers."""
        return round_extent(
            sequence, draft_tokens=self.run.draft_tokens, whole_block=self.whole_block,
            tree_nodes=self.run.tree_nodes,
        )


@struct.dataclass
class Params:
    """Parameters of the pair.

    target: nested dict of the target's variables.
    draft:  nested dict of the draft's; empty without a draft.
    """

    target: dict[str, Any]
    draft: dict[str, Any]


def target_call(models: Models, params: Params, method: str, *args):
    """Applies a method of the target module."""
    return models.target_module.apply({"params": params.target}, *args, method=method)


def draft_call(models: Models, params: Params, method: str, *args):
    """Applies a method of the draft module."""
    return models.draft_module.apply({"params": params.draft}, *args, method=method)
