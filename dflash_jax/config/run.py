"""Run choices and dtypes of a process: everything static that is not geometry.

Source: contracts 11; architecture 6 (dtypes).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax.numpy as jnp

from dflash_jax.config.rules import MAX_INT, instance, is_int, positive_ints, require

DTYPE_NAMES = ("bfloat16", "float16", "float32")
IMPLEMENTATIONS = ("auto", "xla", "pallas", "interpret")
MAX_TREE = 32  # columns of a tree
MAX_PATHS = 8  # its leaves


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """Dtype of each named boundary, by name; the properties give the jnp dtype."""

    activation: str = "bfloat16"  # residual, projections, K, records
    context_value: str = "float16"  # stored draft context V
    param: str = "bfloat16"  # matrices, embedding, head, codebooks
    logits: str = "bfloat16"  # verify and DFlash head logits

    def __post_init__(self):
        for name in ("activation", "context_value", "param", "logits"):
            value = getattr(self, name)
            require(value in DTYPE_NAMES, f"dtypes.{name}", f"one of {DTYPE_NAMES}", value)

    @classmethod
    def exact(cls) -> DtypePolicy:
        """Every boundary in float32, for exactness tests."""
        return cls(activation="float32", context_value="float32", param="float32", logits="float32")

    @property
    def activation_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.activation)

    @property
    def context_value_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.context_value)

    @property
    def param_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.param)

    @property
    def logits_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.logits)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Start-up choices: everything static that is not geometry."""

    draft_tokens: int  # K; 0 only without a draft
    batch: int  # B, rows of the compact batch
    max_context: int  # capacity: positions one request may occupy
    lanes: int | None = None  # live requests; None means batch
    slots: int | None = None  # state images on the device; None means lanes
    page_size: int = 64
    pool_pages: int | None = None  # pages of each pool; None means every lane at full length
    chunk: int = 1024  # prefill columns per call
    dtypes: DtypePolicy = field(default_factory=DtypePolicy)
    implementation: str = "auto"  # of ops with kernels: in prefill the delta rule, draft context
    max_candidates: int = 0  # cap on the target's sampling candidates; 0 none, 20 reference engine
    tree_nodes: int = 0  # W_t, columns of a tree round, K + 2..32; 0 verifies the chain alone
    tree_paths: int = 8  # leaves of a tree, 2..8; not read without a tree

    def __post_init__(self):
        legal = is_int(self.draft_tokens) and 0 <= self.draft_tokens < MAX_INT
        require(legal, "draft_tokens", "a count >= 0", self.draft_tokens)
        positive_ints(self, "", "batch max_context page_size chunk")
        if self.lanes is None:
            object.__setattr__(self, "lanes", self.batch)
        if self.slots is None:
            object.__setattr__(self, "slots", self.lanes)
        positive_ints(self, "", "lanes slots")
        require(self.lanes >= self.batch, "lanes", f"at least batch = {self.batch}", self.lanes)
        require(self.slots >= self.lanes, "slots", f"at least lanes = {self.lanes}", self.slots)
        if self.pool_pages is not None:
            positive_ints(self, "", "pool_pages")
        instance("dtypes", self.dtypes, DtypePolicy)
        legal = is_int(self.max_candidates) and self.max_candidates >= 0
        require(legal, "max_candidates", "a count >= 0", self.max_candidates)
        least = self.draft_tokens + 2
        legal = is_int(self.tree_nodes) and self.tree_nodes in (0, *range(least, MAX_TREE + 1))
        expected = f"0 or K + 2 = {least}..{MAX_TREE}"
        require(legal, "tree_nodes", expected, self.tree_nodes)
        legal = is_int(self.tree_paths) and 2 <= self.tree_paths <= MAX_PATHS
        require(legal, "tree_paths", f"2..{MAX_PATHS}", self.tree_paths)
        legal = self.implementation in IMPLEMENTATIONS
        require(legal, "implementation", f"one of {IMPLEMENTATIONS}", self.implementation)

    @property
    def block_width(self) -> int:
        """W = K + 1: the anchor and K masks."""
        return self.draft_tokens + 1

    @property
    def max_pages(self) -> int:
        """Pages that one request may hold."""
        return -(-self.max_context // self.page_size)

    @property
    def pages(self) -> int:
        """Pages of a pool: as stated, else enough for every lane at full length."""
        return self.lanes * self.max_pages if self.pool_pages is None else self.pool_pages
