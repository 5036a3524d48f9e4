"""Streams Hugging Face files into fused parameter leaves on the device.

`source.py` resolves the files; all faults of a folder are raised together before anything is
placed. The host holds one leaf and one piece of a file at a time, the device one copy.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig, DtypePolicy, TargetConfig, check_pair
from dflash_jax.weights.heads import read_own_head
from dflash_jax.weights.hf_config import read_target_config
from dflash_jax.weights.hf_draft_config import read_draft_config
from dflash_jax.weights.names import Storage
from dflash_jax.weights.source import Source, draft_source, target_source

logger = logging.getLogger(__name__)

# Path and shape of a leaf -> where it goes; None is the default device.
Shardings = Callable[[tuple[str, ...], tuple[int, ...]], jax.sharding.Sharding | None]
# Layer norms of a target are stored as w of (1 + w); some exports have already added the one.
SUSPICIOUS_NORM_MEAN = 0.5


def load_target(
    folder: str | Path,
    policy: DtypePolicy,
    *,
    public_vocab: int | None = None,
    shardings: Shardings | None = None,
) -> tuple[TargetConfig, dict]:
    """Loads a Qwen3.5-family target.

    Args:
      folder: holds config.json and model.safetensors, or shards with their index.
      policy: `param` is the dtype of matrices; vectors and small kernels are float32.
      public_vocab: V_pub; None takes it from tokenizer.json, else the vocabulary rows.
      shardings: of each leaf, by its path and shape; None puts all on the default device.
    Returns:
      The config and the nested dict of parameters.
    Raises: ConfigError for config.json; WeightsError listing all faults of the tensors.
    """
    config = read_target_config(folder, public_vocab=public_vocab)
    source = target_source(folder, config)
    source.check()
    params = _build(source, policy, shardings)
    _warn_about_norms(params, config)
    return config, params


def load_draft(
    folder: str | Path,
    target: TargetConfig,
    policy: DtypePolicy,
    *,
    causal: bool | Sequence[bool] | None = None,
    shardings: Shardings | None = None,
) -> tuple[DraftConfig, dict]:
    """Loads a DFlash or DFlash2 draft for a target.

    An embedding or a head in the file is the draft's own and is used, also where it equals the
    target's (`pitfalls.md` F1, F2); the returned config says so.

    Args:
      folder: holds config.json and model.safetensors, or shards with their index.
      target: the target it proposes for.
      policy: `param` is the dtype of matrices; vectors and small kernels are float32.
      causal: overrides the file's mask flags, one for all layers or one per layer.
      shardings: of each leaf, by its path and shape; None puts all on the default device.
    Returns:
      The config and the nested dict of parameters.
    Raises: ConfigError for config.json; WeightsError listing all faults of the tensors.
    """
    config = read_draft_config(folder, target, causal=causal)
    source = draft_source(folder, config, target.public_vocab)
    source.check()
    config = source.config
    params = _build(source, policy, shardings)
    if source.head is not None:
        rows, token_ids = read_own_head(source.files, source.head, policy.param_dtype)
        config = add_head(config, params, rows, token_ids, shardings)
    check_pair(target, config)
    return config, params


def _build(source: Source, policy: DtypePolicy, shardings: Shardings | None) -> dict:
    """Reads, fuses and places leaf after leaf."""
    params = {}
    for entry in source.chosen:
        dtype = leaf_dtype(entry.leaf.storage, policy)
        insert(params, entry.leaf.path, source.read(entry, dtype), shardings)
    return params


def leaf_dtype(storage: Storage, policy: DtypePolicy) -> np.dtype:
    """Dtype of a leaf: `policy.param` for matrices, float32 for vectors."""
    return policy.param_dtype if storage is Storage.MATRIX else jnp.dtype("float32")


def place(array: np.ndarray, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """Copies to the device or devices and waits, so that the host copy can be freed."""
    return jax.block_until_ready(jax.device_put(array, sharding))


def insert(
    params: dict, path: tuple[str, ...], values: np.ndarray, shardings: Shardings | None = None
) -> None:
    """Places a leaf and sets it in a nested dict, making the dicts on the way."""
    sharding = None if shardings is None else shardings(path, values.shape)
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = place(values, sharding)


def add_head(
    config: DraftConfig,
    params: dict,
    rows: np.ndarray,
    token_ids: np.ndarray,
    shardings: Shardings | None,
) -> DraftConfig:
    """Sets a draft's own head and says so in the config."""
    insert(params, ("head", "kernel"), rows, shardings)
    insert(params, ("head", "token_ids"), token_ids, shardings)
    logger.info("the draft's own head: %d rows", len(token_ids))
    return dataclasses.replace(config, head_rows=len(token_ids))


def _warn_about_norms(params: dict, config: TargetConfig) -> None:
    means = [params[f"layers_{i}"]["input_norm"]["weight"].mean() for i in range(config.num_layers)]
    mean = float(jnp.stack(means).mean())
    if mean > SUSPICIOUS_NORM_MEAN:
        message = "input norms average %.2f: the file may hold 1 + w where w is expected"
        logger.warning(message, mean)
