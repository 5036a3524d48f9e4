"""Streams Hugging Face files, or converted weights, into fused parameter leaves on the device.

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
from dflash_jax.weights import names
from dflash_jax.weights.converted import ConvertedFolder, StoredTensors, is_converted
from dflash_jax.weights.files import WeightsError
from dflash_jax.weights.heads import OwnHead, plan_own_head, read_own_head
from dflash_jax.weights.hf_config import read_target_config
from dflash_jax.weights.hf_draft_config import read_draft_config
from dflash_jax.weights.leaves import PlannedLeaf, Storage
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
      folder: holds config.json and model.safetensors, or shards with their index; or converted
        weights (`scripts/convert_weights.py`).
      policy: `param` is the dtype of dense matrices; vectors and small kernels are float32, and
        block-scaled matrices stay float8 beside float32 scales.
      public_vocab: V_pub; None takes it from tokenizer.json, else the vocabulary rows.
      shardings: of each leaf, by its path and shape; None puts all on the default device.
    Returns:
      The config and the nested dict of parameters.
    Raises: ConfigError for config.json; WeightsError listing all faults of the tensors.
    """
    config = read_target_config(folder, public_vocab=public_vocab)
    if is_converted(folder):
        stored = ConvertedFolder(folder, "target")
        config = stored.with_fp8(config)
        params = _restore(stored, names.target_plan(config)[0], policy, shardings)
    else:
        source = target_source(folder, config)
        source.check()
        config, params = source.config, _build(source, policy, shardings)
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
      folder: holds config.json and model.safetensors, or shards with their index; or converted
        weights (`scripts/convert_weights.py`).
      target: the target it proposes for.
      policy: `param` is the dtype of matrices; vectors and small kernels are float32.
      causal: overrides the file's mask flags, one for all layers or one per layer.
      shardings: of each leaf, by its path and shape; None puts all on the default device.
    Returns:
      The config and the nested dict of parameters.
    Raises: ConfigError for config.json; WeightsError listing all faults of the tensors.
    """
    config = read_draft_config(folder, target, causal=causal)
    if is_converted(folder):
        stored = ConvertedFolder(folder, "draft")
        config = dataclasses.replace(config, own_embedding=stored.has("embedding"))
        if causal is None:
            stored.check_causality(config.causal)
        params = _restore(stored, names.draft_plan(config)[0], policy, shardings)
        files = stored.own_head()
        head = None if files is None else _stored_head(stored, files, config, target)
    else:
        source = draft_source(folder, config, target.public_vocab)
        source.check()
        config, files, head = source.config, source.files, source.head
        params = _build(source, policy, shardings)
    if head is not None:
        rows, token_ids = read_own_head(files, head, policy.param_dtype)
        config = add_head(config, params, rows, token_ids, shardings)
    check_pair(target, config)
    return config, params


def _restore(
    stored: ConvertedFolder,
    leaves: list[PlannedLeaf],
    policy: DtypePolicy,
    shardings: Shardings | None,
) -> dict:
    """Reads and places converted leaves, item after item."""
    stored.check(leaves, policy.param_dtype)
    storage, params = {leaf.path: leaf.storage for leaf in leaves}, {}
    for path, values in stored.read():
        dtype = leaf_dtype(storage[path], policy)
        put(params, path, values.astype(dtype, copy=False), shardings)
    return params


def _stored_head(
    stored: ConvertedFolder, files: StoredTensors, config: DraftConfig, target: TargetConfig
) -> OwnHead:
    table = {name: name for name in files.names}
    head, faults = plan_own_head(files, table, config, target.public_vocab)
    if faults:
        raise WeightsError(stored.folder, faults)
    return head


def _build(source: Source, policy: DtypePolicy, shardings: Shardings | None) -> dict:
    """Reads, fuses and places leaf after leaf."""
    params = {}
    for entry in source.chosen:
        dtype = leaf_dtype(entry.leaf.storage, policy)
        put(params, entry.leaf.path, source.read(entry, dtype), shardings)
    return params


def leaf_dtype(storage: Storage, policy: DtypePolicy) -> np.dtype:
    """Dtype of a leaf: `policy.param` for dense matrices, float8 for block-scaled ones, float32 for
    vectors and scales."""
    if storage is Storage.FP8:
        return jnp.dtype("float8_e4m3fn")
    return policy.param_dtype if storage is Storage.MATRIX else jnp.dtype("float32")


def place(array: np.ndarray, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """Copies to the device or devices and waits, so that the host copy can be freed."""
    return jax.block_until_ready(jax.device_put(array, sharding))


def insert(params: dict, path: tuple[str, ...], leaf: object) -> None:
    """Sets a leaf of a nested dict, making the dicts on the way."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = leaf


def put(
    params: dict, path: tuple[str, ...], values: np.ndarray, shardings: Shardings | None
) -> None:
    """Places a leaf where `shardings` says and sets it in a nested dict."""
    sharding = None if shardings is None else shardings(path, values.shape)
    insert(params, path, place(values, sharding))


def add_head(
    config: DraftConfig,
    params: dict,
    rows: np.ndarray,
    token_ids: np.ndarray,
    shardings: Shardings | None,
) -> DraftConfig:
    """Sets a draft's own head and says so in the config."""
    put(params, ("head", "kernel"), rows, shardings)
    put(params, ("head", "token_ids"), token_ids, shardings)
    logger.info("the draft's own head: %d rows", len(token_ids))
    return dataclasses.replace(config, head_rows=len(token_ids))


def _warn_about_norms(params: dict, config: TargetConfig) -> None:
    means = [params[f"layers_{i}"]["input_norm"]["weight"].mean() for i in range(config.num_layers)]
    mean = float(jnp.stack(means).mean())
    if mean > SUSPICIOUS_NORM_MEAN:
        message = "input norms average %.2f: the file may hold 1 + w where w is expected"
        logger.warning(message, mean)
