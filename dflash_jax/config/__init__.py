"""Geometry and run choices as frozen, hashable, validated dataclasses.

Every failed rule raises `ConfigError("field: expected ..., got ...")` before any device work.
`geometry` holds target and draft, `block_scaled` which matrices are float8, `run` the run choices
and dtypes, `pairing` the rules between them and `describe`, `presets` the published and tiny
geometries (tests and benches only), `folder` reads the text and JSON files of a model folder.
"""

from dflash_jax.config.block_scaled import Fp8Config
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
from dflash_jax.config.pairing import check_pair, check_run, describe
from dflash_jax.config.presets import (
    dflash2_27b,
    dflash2_35b_a3b,
    dflash_27b,
    dflash_35b_a3b,
    qwen35_4b,
    qwen35_9b,
    qwen35_27b,
    qwen35_35b_a3b,
    tiny_draft,
    tiny_target,
)
from dflash_jax.config.rules import ConfigError
from dflash_jax.config.run import DtypePolicy, RunConfig

__all__ = [
    "ConfigError",
    "ConvConfig",
    "DraftConfig",
    "DraftKind",
    "DtypePolicy",
    "Fp8Config",
    "GdnConfig",
    "LayerKind",
    "MoeConfig",
    "RopeConfig",
    "RunConfig",
    "SelectorConfig",
    "TargetConfig",
    "check_pair",
    "check_run",
    "describe",
    "dflash2_27b",
    "dflash2_35b_a3b",
    "dflash_27b",
    "dflash_35b_a3b",
    "qwen35_27b",
    "qwen35_35b_a3b",
    "qwen35_4b",
    "qwen35_9b",
    "tiny_draft",
    "tiny_target",
]
