"""Config files of "speculators" exports, rewritten with the keys of released drafts.

Source: `checkpoints.md` 2.1: geometry inside `transformer_layer_config`, block ids stored plus one,
the mask of sliding layers as `sliding_window_non_causal`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dflash_jax.config import ConfigError
from dflash_jax.weights.keys import choice, subsection

logger = logging.getLogger(__name__)

# Type -> (architecture, the exporter's class default of sliding_window_non_causal).
_TYPES = {"dflash": ("DFlashDraftModel", False), "dflash2": ("DFlash2DraftModel", True)}


def flatten_speculators(raw: Mapping) -> dict:
    """The same config with flat keys of a released draft.

    The ids stay under `aux_hidden_state_layer_ids`; its reader subtracts one.

    Raises: ConfigError for another `speculators_model_type`, missing geometry, or ids under a name
      whose counting would be a guess.
    """
    kind = choice("speculators_model_type", raw["speculators_model_type"], _TYPES)
    geometry = subsection(raw, "transformer_layer_config")
    if geometry is None:
        raise ConfigError("transformer_layer_config: expected an object, got none")
    if raw.get("aux_hidden_state_layer_ids") is None:
        raise ConfigError("aux_hidden_state_layer_ids: expected a list, got none")
    name, symmetric = _TYPES[kind]
    # The geometry's own class name says nothing about the draft; the model type is checked.
    flat = {**geometry, **raw, "architectures": [name], "model_type": geometry.get("model_type")}
    if flat.get("sliding_window_non_causal") is None:
        logger.info("sliding_window_non_causal absent: the exporter's default %s", symmetric)
        flat["sliding_window_non_causal"] = symmetric
    return flat
