"""DFlash and DFlash2 speculative decoding for Qwen3.5-family hybrid targets in JAX.

The public names, in the order in which a program meets them. `generate` runs the whole loop; the
steps below it are the same functions it calls, for programs that keep their own loop.
"""

# Geometry and run choices
from dflash_jax.config import (
    ConfigError,
    DraftConfig,
    DraftKind,
    DtypePolicy,
    LayerKind,
    RunConfig,
    TargetConfig,
    describe,
)

# Generation: a fixed batch, and an engine whose requests come and go
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.generate import generate, run_draft_tokens
from dflash_jax.engine.images import StateImage
from dflash_jax.engine.pages import CapacityError
from dflash_jax.engine.request import (
    Embeddings,
    FinishReason,
    Output,
    Piece,
    Request,
    Statistics,
    total_statistics,
)
from dflash_jax.engine.text import TextStream, TextTokenizer, eos_ids

# State between rounds
from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.sampling.presets import PRESETS, read_generation_config
from dflash_jax.state.decode import DecodeState, Rows

# Steps: prefill, then the round in its order
from dflash_jax.steps import (
    Admission,
    Models,
    Params,
    PrefillChunk,
    accept,
    accept_tree,
    advance,
    begin,
    build_tree,
    commit,
    draft_only,
    empty_scratch,
    first_token,
    judge,
    materialize,
    prefill_chunk,
    propose,
    speculate,
    verify,
)

# Hugging Face folders
from dflash_jax.weights import WeightsError, indexed_head, load_draft, load_target

__all__ = [
    # geometry and run choices
    "ConfigError",
    "DraftConfig",
    "DraftKind",
    "DtypePolicy",
    "LayerKind",
    "RunConfig",
    "TargetConfig",
    "describe",
    # Hugging Face folders
    "WeightsError",
    "indexed_head",
    "load_draft",
    "load_target",
    # a model pair
    "Models",
    "Params",
    # generation
    "CapacityError",
    "Embeddings",
    "Engine",
    "FinishReason",
    "Output",
    "Piece",
    "Request",
    "StateImage",
    "Statistics",
    "TextStream",
    "TextTokenizer",
    "eos_ids",
    "generate",
    "run_draft_tokens",
    "total_statistics",
    # state between rounds
    "DecodeState",
    "Rows",
    "PRESETS",
    "SamplingArrays",
    "SamplingParams",
    "read_generation_config",
    # prefill
    "Admission",
    "PrefillChunk",
    "begin",
    "first_token",
    "prefill_chunk",
    # the round, in its order
    "materialize",
    "propose",
    "build_tree",
    "verify",
    "accept",
    "accept_tree",
    "speculate",
    "draft_only",
    "judge",
    "commit",
    "advance",
    "empty_scratch",
]
