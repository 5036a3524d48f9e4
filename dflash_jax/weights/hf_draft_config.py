"""config.json of a DFlash or DFlash2 draft -> `DraftConfig`.

Flat, nested (`dflash_config`), mixed and "speculators" files are read; nested wins over flat. A key
that is needed and absent is an error that names it; a key that would change the computation and is
not implemented is refused by name. Source: `checkpoints.md` 1 and 2, contracts 1.1 and 2.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_jax.config import (
    ConfigError,
    ConvConfig,
    DraftConfig,
    DraftKind,
    LayerKind,
    RopeConfig,
    SelectorConfig,
    TargetConfig,
    check_pair,
)
from dflash_jax.config.folder import read_json
from dflash_jax.config.rules import is_int
from dflash_jax.weights.hf_config import layer_kinds
from dflash_jax.weights.keys import (
    MAX_LAYERS,
    NEUTRAL,
    Keys,
    architecture,
    choice,
    rope_sections,
    subsection,
)
from dflash_jax.weights.speculators import flatten_speculators

logger = logging.getLogger(__name__)

_ARCHITECTURES = {
    "DFlashDraftModel": DraftKind.DFLASH,
    "DFlash2DraftModel": DraftKind.DFLASH2,
    "Qwen3DFlash2Model": DraftKind.DFLASH2,
}
_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SECTION_KEYS = {
    "target_layer_ids",
    "aux_hidden_state_layer_ids",
    "mask_token_id",
    "mask_token",
    "block_size",
    "num_target_layers",
    "causal",
    "use_swa",
    "swa_window_size",
    "projector_type",
    *_DFLASH2_KEYS,
    *NEUTRAL,
}
# A draft always rotates its full head with one position, whatever it inherited from a target.
_TARGET_ROPE_KEYS = (
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    "rotary_dim",
    "rope_dim",
)


@dataclass(frozen=True)
class Causality:
    """Resolved mask flags, one per layer, and the step of the rule that decided them."""

    flags: tuple[bool, ...]
    reason: str


def read_draft_config(
    folder: str | Path,
    target: TargetConfig,
    *,
    causal: bool | Sequence[bool] | None = None,
) -> DraftConfig:
    """Reads FOLDER/config.json of a draft for this target.

    Args:
      folder: a Hugging Face model folder.
      target: the target it will propose for; gives V and the number of blocks.
      causal: overrides the file's mask flags, one for all layers or one per layer.
    Returns:
      The config without knowledge of the tensors: `own_embedding` and `head_rows` are set by
      `load_draft`, which sees the file.
    Raises: ConfigError naming the key or field at fault.
    """
    return draft_config(read_json(Path(folder) / "config.json"), target, causal=causal)


def draft_config(
    raw: Mapping, target: TargetConfig, *, causal: bool | Sequence[bool] | None = None
) -> DraftConfig:
    """`DraftConfig` of a parsed config.json; see `read_draft_config`."""
    raw, keys = _draft_keys(raw)
    keys.refuse_unimplemented()
    kind = _kind(raw, keys)
    layer_types, window, windowed = _layers(keys)
    causality = resolve_causal(keys, layer_types, windowed=windowed, override=causal)
    logger.info("causal = %s, decided by %s", list(causality.flags), causality.reason)
    config = DraftConfig(
        kind=kind,
        hidden=keys.required("hidden_size"),
        intermediate=keys.required("intermediate_size"),
        query_heads=keys.required("num_attention_heads"),
        kv_heads=keys.required("num_key_value_heads"),
        head_dim=keys.required("head_dim"),
        layer_types=layer_types,
        window=window,
        causal=causality.flags,
        target_layer_ids=_target_layer_ids(keys, target, len(layer_types)),
        mask_token_id=keys.required("mask_token_id"),
        vocab_rows=_agreed(keys, "vocab_size", target.vocab_rows),
        norm_eps=keys.required("rms_norm_eps"),
        rope_theta=_rope_theta(raw),
        max_positions=keys.required("max_position_embeddings"),
        conv=_conv(keys, kind),
        selector=_selector(keys, kind),
        block_size=keys.given("block_size"),
    )
    check_pair(target, config)
    return config


def is_draft(raw: Mapping) -> bool:
    """Whether a parsed config.json is meant for a draft, readable or not."""
    names = raw.get("architectures")
    named = isinstance(names, list) and any("DFlash" in str(name) for name in names)
    return named or "speculators_model_type" in raw or "dflash_config" in raw


def draft_causality(raw: Mapping, causal: bool | Sequence[bool] | None = None) -> Causality:
    """The mask flags of a parsed config.json of a draft and what decided them."""
    _, keys = _draft_keys(raw)
    layer_types, _, windowed = _layers(keys)
    return resolve_causal(keys, layer_types, windowed=windowed, override=causal)


def stated_target(raw: Mapping) -> TargetConfig:
    """A stand-in with what a draft's config.json says of its target: width, rows, block count.

    For looking at a draft alone; nothing else of it means anything.

    Raises: ConfigError naming a key without which the target must be given.
    """
    _, keys = _draft_keys(raw)
    ids = keys.given("target_layer_ids", "aux_hidden_state_layer_ids")
    count = keys.given("num_target_layers")
    if count is None and isinstance(ids, list) and all(is_int(i) for i in ids) and ids:
        count = max(ids) + 1
    if not is_int(count) or not 1 <= count <= MAX_LAYERS:
        expected = f"an integer in 1..{MAX_LAYERS} (or give the target)"
        raise ConfigError(f"num_target_layers: expected {expected}, got {count!r}")
    rows = keys.required("vocab_size")
    return TargetConfig(
        hidden=keys.required("hidden_size"),
        vocab_rows=rows,
        public_vocab=rows,
        query_heads=1,
        kv_heads=1,
        head_dim=6,
        layer_types=(LayerKind.FULL,) * count,
        norm_eps=1.0,
        rope=RopeConfig(theta=1.0, partial_factor=1.0, mrope_section=(1, 1, 1)),
        gdn=None,
        intermediate=1,
        moe=None,
        tie_embeddings=False,
        max_positions=1,
    )


def _draft_keys(raw: Mapping) -> tuple[Mapping, Keys]:
    """The flat keys in released spelling, and all keys with the nested section first."""
    if "speculators_model_type" in raw:
        raw = flatten_speculators(raw)
    section = subsection(raw, "dflash_config") or {}
    if unknown := sorted(set(section) - _SECTION_KEYS):
        raise ConfigError(f"dflash_config: expected known keys, got {unknown}")
    return raw, Keys((section, raw))


def resolve_causal(
    keys: Keys,
    layer_types: tuple[LayerKind, ...],
    *,
    windowed: bool,
    override: bool | Sequence[bool] | None,
) -> Causality:
    """The published rule for the mask inside the block, per layer (contracts 2).

    In order: the caller's override; top-level `is_causal`; `dflash_config.causal`; the exporter's
    `sliding_window_non_causal`; `layer_types` present: sliding layers causal, full ones not;
    otherwise no layer is causal.

    Args:
      keys: the `dflash_config` section, then the flat keys.
      layer_types: resolved kinds.
      windowed: the layers slide because of `use_swa`, not of `layer_types`.
      override: the caller's flag or flags.
    Raises: ConfigError for a flag that is no bool or a list of another length.
    """
    count, flat = len(layer_types), keys.sections[-1]
    if override is not None:
        each = isinstance(override, Sequence)
        flags = tuple(override) if each else (override,) * count
        return Causality(_bools("causal", flags, count), "the caller's override")
    for name, value in (
        ("is_causal", flat.get("is_causal")),
        ("dflash_config.causal", keys.given("causal")),
    ):
        if value is not None:
            return Causality(_bools(name, (value,) * count, count), name)
    sliding = tuple(entry is LayerKind.SLIDING for entry in layer_types)
    if (symmetric := flat.get("sliding_window_non_causal")) is not None:
        name = "sliding_window_non_causal"
        _bools(name, (symmetric,), 1)
        return Causality(tuple(entry and not symmetric for entry in sliding), name)
    if windowed:
        raise ConfigError("causal: expected a flag beside use_swa, got none")
    if flat.get("layer_types") is not None:
        return Causality(sliding, "layer_types (is_causal absent: sliding layers are causal)")
    return Causality((False,) * count, "the absence of is_causal and layer_types")


def _bools(name: str, flags: tuple, count: int) -> tuple[bool, ...]:
    if len(flags) != count or not all(isinstance(flag, bool) for flag in flags):
        raise ConfigError(f"{name}: expected a bool, or {count} of them, got {flags!r}")
    return flags


def _kind(raw: Mapping, keys: Keys) -> DraftKind:
    kind = _ARCHITECTURES[architecture(raw, _ARCHITECTURES)]
    choice("model_type", raw.get("model_type"), ("qwen3",))
    projector = keys.given("projector_type")
    expected = "dflash" if kind is DraftKind.DFLASH else "dflash2"
    if projector not in (None, expected):
        raise ConfigError(f"projector_type: expected {expected!r} or none, got {projector!r}")
    return kind


def _layers(keys: Keys) -> tuple[tuple[LayerKind, ...], int | None, bool]:
    """Layer kinds, window, and whether the window came from `use_swa`.

    `use_sliding_window` decides nothing: published code drops the window when it is false.
    """
    count, names = keys.layer_count(), keys.given("layer_types")
    if names is None:
        logger.info("layer_types absent: all %d layers are full attention", count)
        names = [LayerKind.FULL.value] * count
    kinds, window = layer_kinds(names, count), keys.given("sliding_window")
    swa_window = keys.given("swa_window_size")
    if not keys.given("use_swa"):
        return kinds, window, False
    if LayerKind.SLIDING in kinds:
        if swa_window not in (None, window):
            raise ConfigError(
                f"swa_window_size: expected sliding_window {window}, got {swa_window}"
            )
        return kinds, window, False
    swa_window = keys.required("swa_window_size")
    logger.info("use_swa: all %d layers slide with window %s", count, swa_window)
    return (LayerKind.SLIDING,) * len(kinds), swa_window, True


def _target_layer_ids(keys: Keys, target: TargetConfig, draft_layers: int) -> tuple[int, ...]:
    """Captured block ids, from either spelling, or from the old formula with a log line."""
    layers = _agreed(keys, "num_target_layers", target.num_layers)
    ids, shifted = keys.given("target_layer_ids"), keys.given("aux_hidden_state_layer_ids")
    for name, value in (("target_layer_ids", ids), ("aux_hidden_state_layer_ids", shifted)):
        if value is None:
            continue
        if not isinstance(value, list) or not all(is_int(i) for i in value):
            raise ConfigError(f"{name}: expected a list of block ids, got {value!r}")
    if shifted is not None:
        # Entry 0 of a hidden-state list is the embedding, so this spelling counts from 1.
        from_shifted = tuple(i - 1 for i in shifted)
        if ids is not None and tuple(ids) != from_shifted:
            raise ConfigError(f"target_layer_ids: expected {list(from_shifted)}, got {ids}")
        return from_shifted
    if ids is not None:
        return tuple(ids)
    if draft_layers == 1:
        formula = (layers // 2,)
    else:
        formula = tuple(
            round(1 + i * (layers - 4) / (draft_layers - 1)) for i in range(draft_layers)
        )
    logger.warning("target_layer_ids absent: %s from the old formula", list(formula))
    return formula


def _agreed(keys: Keys, name: str, of_target: int) -> int:
    """The target's value; a file that states another one is refused."""
    stated = keys.given(name)
    if stated not in (None, of_target):
        raise ConfigError(f"{name}: expected the target's {of_target}, got {stated!r}")
    return of_target


def _rope_theta(raw: Mapping) -> float:
    keys = rope_sections(raw)
    dropped = [name for name in _TARGET_ROPE_KEYS if keys.given(name) is not None]
    if dropped:
        logger.info("dropped %s: a draft rotates the full head", ", ".join(dropped))
    return keys.required("rope_theta")


def _conv(keys: Keys, kind: DraftKind) -> ConvConfig | None:
    if kind is DraftKind.DFLASH:
        for name in _DFLASH2_KEYS:
            if (value := keys.given(name)) is not None:
                raise ConfigError(f"{name}: expected none in a DFlash config, got {value!r}")
        return None
    return ConvConfig(
        taps=keys.required("conv_kernel_size"), group_width=keys.required("conv_group_size")
    )


def _selector(keys: Keys, kind: DraftKind) -> SelectorConfig | None:
    if kind is DraftKind.DFLASH:
        return None
    return SelectorConfig(
        rank=keys.required("selector_rank"), num_candidates=keys.required("selector_top_k")
    )
