"""Geometry of a target and of a draft as frozen, hashable, validated dataclasses.

A config object states everything and guesses nothing: the loader (`weights/hf_config.py`) resolves
spellings and absent keys of files. Source: contracts 1.1, 1.4 and 2.

Letters (contracts 0.1): H hidden, I intermediate, Hq / Hkv / D attention heads and head size,
Hk / Hv / Dk / Dv GDN heads and head sizes, V vocabulary rows, V_pub public ids, S window,
R selector rank.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass

from dflash_jax.config.block_scaled import (
    DENSE_MATRICES,
    FULL_MATRICES,
    LINEAR_MATRICES,
    MOE_MATRICES,
    Fp8Config,
)
from dflash_jax.config.rules import (
    MAX_INT,
    divides,
    instance,
    is_int,
    positive_float,
    positive_ints,
    require,
)


class LayerKind(enum.StrEnum):
    """Mixer of one layer; the values are those of Hugging Face `layer_types`."""

    FULL = "full_attention"
    LINEAR = "linear_attention"
    SLIDING = "sliding_attention"


class DraftKind(enum.StrEnum):
    """Draft backend; the values are the architecture names of released files."""

    DFLASH = "DFlashDraftModel"
    DFLASH2 = "DFlash2DraftModel"


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Target rotation: half-split over part of the head, pairs interleaved over three axes."""

    theta: float
    partial_factor: float  # share of the head that rotates, (0, 1]
    mrope_section: tuple[int, int, int]  # pairs per axis: time, height, width

    def __post_init__(self):
        positive_float("rope.theta", self.theta)
        positive_float("rope.partial_factor", self.partial_factor)
        require(self.partial_factor <= 1, "rope.partial_factor", "at most 1", self.partial_factor)
        section = self.mrope_section
        legal = isinstance(section, tuple) and len(section) == 3
        legal = legal and all(is_int(n) and 0 <= n <= MAX_INT for n in section)
        require(legal, "rope.mrope_section", "a tuple of three counts", section)

    def rotary_dim(self, head_dim: int) -> int:
        """Number of rotated dimensions of a head of `head_dim` (floor of the product)."""
        return math.floor(head_dim * self.partial_factor)


@dataclass(frozen=True, kw_only=True)
class GdnConfig:
    """Gated DeltaNet layer: head counts, head sizes and the short convolution's width."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    def __post_init__(self):
        positive_ints(self, "gdn.", "key_heads value_heads key_dim value_dim conv_kernel")
        divides("gdn.value_heads", self.value_heads, "key_heads", self.key_heads)

    @property
    def channels(self) -> int:
        """Convolution channels: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Hv * Dv, the width of v, z and of the output projection's input."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Routed experts plus one gated shared expert."""

    num_experts: int
    experts_per_token: int
    intermediate: int
    shared_intermediate: int

    def __post_init__(self):
        names = "num_experts experts_per_token intermediate shared_intermediate"
        positive_ints(self, "moe.", names)
        limit = f"at most num_experts = {self.num_experts}"
        legal = self.experts_per_token <= self.num_experts
        require(legal, "moe.experts_per_token", limit, self.experts_per_token)


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Qwen3.5-family target: gated full attention and Gated DeltaNet layers, dense or MoE."""

    hidden: int
    vocab_rows: int  # V, rows of embedding and head
    public_vocab: int  # V_pub <= V; ids in [V_pub, V) are never proposed or emitted
    query_heads: int
    kv_heads: int
    head_dim: int
    layer_types: tuple[LayerKind, ...]
    norm_eps: float
    rope: RopeConfig
    gdn: GdnConfig | None  # given iff a layer is LINEAR
    intermediate: int | None  # dense FFN width; None for MoE
    moe: MoeConfig | None  # exactly one of intermediate and moe is given
    tie_embeddings: bool
    max_positions: int
    fp8: Fp8Config | None = None  # None: every matrix is dense

    def __post_init__(self):
        names = "hidden vocab_rows public_vocab query_heads kv_heads head_dim max_positions"
        positive_ints(self, "", names)
        limit = f"at most vocab_rows = {self.vocab_rows}"
        require(self.public_vocab <= self.vocab_rows, "public_vocab", limit, self.public_vocab)
        divides("query_heads", self.query_heads, "kv_heads", self.kv_heads)
        positive_float("norm_eps", self.norm_eps)
        _kinds("layer_types", self.layer_types, (LayerKind.FULL, LayerKind.LINEAR))
        instance("rope", self.rope, RopeConfig)
        self._check_rotation()
        if LayerKind.LINEAR in self.layer_types:
            instance("gdn", self.gdn, GdnConfig)
        else:
            require(self.gdn is None, "gdn", "None without a linear layer", self.gdn)
        if self.moe is None:
            positive_ints(self, "", "intermediate")
        else:
            instance("moe", self.moe, MoeConfig)
            dense = self.intermediate
            require(dense is None, "intermediate", "None beside moe", dense)
        instance("tie_embeddings", self.tie_embeddings, bool)
        if self.fp8 is not None:
            instance("fp8", self.fp8, Fp8Config)
            self.fp8.check(tuple(map(self.scalable, range(self.num_layers))))

    def _check_rotation(self):
        """Rotated width even and positive; sections fill it as the interleaved rule assigns."""
        rotary = self.rope.rotary_dim(self.head_dim)
        expected = f"a positive even rotary width of head_dim {self.head_dim}"
        require(rotary > 0 and rotary % 2 == 0, "rope.partial_factor", expected, rotary)
        half, section = rotary // 2, self.rope.mrope_section
        expected = f"sum {half} (half the rotary width)"
        require(sum(section) == half, "rope.mrope_section", expected, section)
        for axis in (1, 2):
            # Pairs axis, axis + 3, ... below 3 * section belong to the axis (contracts 6.3.3).
            assigned = len(range(axis, min(half, 3 * section[axis]), 3))
            expected = f"axis {axis} to fill its {section[axis]} interleaved pairs of {half}"
            require(assigned == section[axis], "rope.mrope_section", expected, section)

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Ids of the gated full-attention layers, ascending."""
        return _ids_of(self.layer_types, LayerKind.FULL)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Ids of the Gated DeltaNet layers, ascending."""
        return _ids_of(self.layer_types, LayerKind.LINEAR)

    def scalable(self, layer: int) -> tuple[str, ...]:
        """Names of a layer's matrices that may be block-scaled: those of official FP8 releases."""
        full = self.layer_types[layer] is LayerKind.FULL
        mixer = FULL_MATRICES if full else LINEAR_MATRICES
        return mixer + (DENSE_MATRICES if self.moe is None else MOE_MATRICES)

    def fp8_block(self, layer: int, matrix: str) -> tuple[int, int] | None:
        """Rows and columns of a block of a block-scaled matrix; None for a dense one."""
        if self.fp8 is None or matrix not in self.fp8.layers[layer]:
            return None
        return self.fp8.block_rows, self.fp8.block_columns

    def with_fp8(self, block_rows: int = 128, block_columns: int = 128) -> TargetConfig:
        """The same geometry with every matrix block-scaled that may be."""
        layers = tuple(map(self.scalable, range(self.num_layers)))
        fp8 = Fp8Config(block_rows=block_rows, block_columns=block_columns, layers=layers)
        return dataclasses.replace(self, fp8=fp8)


@dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """DFlash2 dynamic grouped convolution."""

    taps: int  # conv_kernel_size; tap 0 is the current column, any number >= 1
    group_width: int  # conv_group_size, channels that share one increment

    def __post_init__(self):
        positive_ints(self, "conv.", "taps group_width")


@dataclass(frozen=True, kw_only=True)
class SelectorConfig:
    """DFlash2 candidate selector."""

    rank: int  # selector_rank, codebook width R
    num_candidates: int  # selector_top_k, candidates per position

    def __post_init__(self):
        positive_ints(self, "selector.", "rank num_candidates")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """DFlash or DFlash2 draft. H and V are the target's; `check_pair` compares the two."""

    kind: DraftKind
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    layer_types: tuple[LayerKind, ...]
    window: int | None  # S; required iff a layer slides
    causal: tuple[bool, ...] = ()  # mask inside the block, per layer; () means all False
    target_layer_ids: tuple[int, ...]  # captured target blocks, recorded order
    mask_token_id: int  # in [0, V); may be a reserved row
    vocab_rows: int
    norm_eps: float
    rope_theta: float  # a draft rotates the full head with one scalar position
    max_positions: int
    conv: ConvConfig | None  # both given for DFlash2, both None for DFlash
    selector: SelectorConfig | None
    own_embedding: bool = False  # False: the target's embedding rows
    head_rows: int = 0  # 0: the target's head; else rows of an own or indexed head with an id map
    block_size: int | None = None  # the file's recommendation, K = block_size - 1

    def __post_init__(self):
        instance("kind", self.kind, DraftKind)
        names = "hidden intermediate query_heads kv_heads head_dim vocab_rows max_positions"
        positive_ints(self, "", names)
        divides("query_heads", self.query_heads, "kv_heads", self.kv_heads)
        require(self.head_dim % 2 == 0, "head_dim", "an even number", self.head_dim)
        positive_float("norm_eps", self.norm_eps)
        positive_float("rope_theta", self.rope_theta)
        _kinds("layer_types", self.layer_types, (LayerKind.FULL, LayerKind.SLIDING))
        if LayerKind.SLIDING in self.layer_types or self.window is not None:
            positive_ints(self, "", "window")
        self._check_causal()
        self._check_ids()
        self._check_backend()
        instance("own_embedding", self.own_embedding, bool)
        legal = is_int(self.head_rows) and 0 <= self.head_rows <= self.vocab_rows
        require(legal, "head_rows", f"0..{self.vocab_rows}", self.head_rows)
        if self.block_size is not None:
            positive_ints(self, "", "block_size")
            require(self.block_size >= 2, "block_size", "at least 2 (anchor + 1)", self.block_size)

    def _check_causal(self):
        if self.causal == ():
            object.__setattr__(self, "causal", (False,) * len(self.layer_types))
        legal = isinstance(self.causal, tuple) and len(self.causal) == len(self.layer_types)
        legal = legal and all(isinstance(flag, bool) for flag in self.causal)
        expected = f"a tuple of {len(self.layer_types)} bools, one per layer"
        require(legal, "causal", expected, self.causal)

    def _check_ids(self):
        ids = self.target_layer_ids
        legal = isinstance(ids, tuple) and len(ids) > 0
        legal = legal and all(is_int(i) and 0 <= i <= MAX_INT for i in ids)
        require(legal, "target_layer_ids", "a non-empty tuple of block ids >= 0", ids)
        require(len(set(ids)) == len(ids), "target_layer_ids", "no duplicates", ids)
        legal = is_int(self.mask_token_id) and 0 <= self.mask_token_id < self.vocab_rows
        require(legal, "mask_token_id", f"an id in [0, {self.vocab_rows})", self.mask_token_id)

    def _check_backend(self):
        if self.kind is DraftKind.DFLASH:
            require(self.conv is None, "conv", "None for DFlash", self.conv)
            require(self.selector is None, "selector", "None for DFlash", self.selector)
            return
        instance("conv", self.conv, ConvConfig)
        instance("selector", self.selector, SelectorConfig)
        divides("hidden", self.hidden, "conv.group_width", self.conv.group_width)

    @property
    def draft_layers(self) -> int:
        return len(self.layer_types)

    @property
    def local_layers(self) -> tuple[int, ...]:
        """Ids of the sliding layers; the place in this tuple is the compact ring index."""
        return _ids_of(self.layer_types, LayerKind.SLIDING)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Ids of the full layers; the place in this tuple is the compact page-pool index."""
        return _ids_of(self.layer_types, LayerKind.FULL)

    @property
    def feature_layers(self) -> int:
        return len(self.target_layer_ids)

    @property
    def feature_width(self) -> int:
        """n_tap * H, width of one concatenated feature."""
        return self.feature_layers * self.hidden


def _ids_of(layer_types: tuple[LayerKind, ...], kind: LayerKind) -> tuple[int, ...]:
    return tuple(i for i, entry in enumerate(layer_types) if entry is kind)


def _kinds(field: str, layer_types: object, legal: tuple[LayerKind, ...]) -> None:
    good = isinstance(layer_types, tuple) and len(layer_types) > 0
    good = good and all(isinstance(entry, LayerKind) and entry in legal for entry in layer_types)
    names = ", ".join(kind.value for kind in legal)
    require(good, field, f"a non-empty tuple of LayerKind out of {names}", layer_types)
