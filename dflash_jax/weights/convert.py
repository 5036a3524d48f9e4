"""Streams Hugging Face files into fused parameter leaves on the device.

Strict both ways: each file tensor is used, ignored by an explicit prefix, or a fault; each leaf is
filled or a fault. All faults of a file are raised together before anything is read. The host holds
one leaf and one file tensor at a time. Source: `checkpoints.md` 3 and 4, contracts 1.3,
`pitfalls.md` F.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import (
    DraftConfig,
    DraftKind,
    DtypePolicy,
    TargetConfig,
    check_pair,
)
from dflash_jax.weights import names
from dflash_jax.weights.files import TensorFiles, WeightsError
from dflash_jax.weights.heads import OwnHead, plan_own_head, read_own_head
from dflash_jax.weights.hf_config import read_target_config
from dflash_jax.weights.hf_draft_config import read_draft_config
from dflash_jax.weights.names import PlannedLeaf, PlannedPart, Storage
from dflash_jax.weights.transforms import VIEWS, Sizes, fuse_rows

logger = logging.getLogger(__name__)

READABLE = ("BF16", "F16", "F32")
# Layer norms of a target are stored as w of (1 + w); some exports have already added the one.
SUSPICIOUS_NORM_MEAN = 0.5


def load_target(
    folder: str | Path, policy: DtypePolicy, *, public_vocab: int | None = None
) -> tuple[TargetConfig, dict]:
    """Loads a Qwen3.5-family target.

    Args:
      folder: holds config.json and model.safetensors, or shards with their index.
      policy: `param` is the dtype of matrices; vectors and small kernels are float32.
      public_vocab: V_pub; None takes it from tokenizer.json, else the vocabulary rows.
    Returns:
      The config and the nested dict of parameters on the default device.
    Raises: ConfigError for config.json; WeightsError listing all faults of the tensors.
    """
    config = read_target_config(folder, public_vocab=public_vocab)
    leaves, sizes = names.target_plan(config)
    with TensorFiles(folder) as files:
        stored, faults = _canonical(files, _target_name, names.IGNORED_TARGET_PREFIXES)
        chosen, more = _match(files, stored, leaves)
        _raise_faults(files, faults + more)
        params = _build(files, stored, chosen, sizes, policy)
    _warn_about_norms(params, config)
    return config, params


def load_draft(
    folder: str | Path,
    target: TargetConfig,
    policy: DtypePolicy,
    *,
    causal: bool | Sequence[bool] | None = None,
) -> tuple[DraftConfig, dict]:
    """Loads a DFlash or DFlash2 draft for a target.

    An embedding or a head in the file is the draft's own and is used, also where it equals the
    target's (`pitfalls.md` F1, F2); the returned config says so.

    Args:
      folder: holds config.json and model.safetensors, or shards with their index.
      target: the target it proposes for.
      policy: `param` is the dtype of matrices; vectors and small kernels are float32.
      causal: overrides the file's mask flags, one for all layers or one per layer.
    Returns:
      The config and the nested dict of parameters on the default device.
    Raises: ConfigError for config.json; WeightsError listing all faults of the tensors.
    """
    config = read_draft_config(folder, target, causal=causal)
    with TensorFiles(folder) as files:
        stored, faults = _canonical(files, _draft_name, ())
        head, more = plan_own_head(files, stored, config, target.public_vocab)
        faults += more
        config = dataclasses.replace(config, own_embedding=names.OWN_EMBEDDING in stored)
        leaves, sizes = names.draft_plan(config)
        beside = () if head is None else head.names
        chosen, more = _match(files, stored, leaves, beside)
        _raise_faults(files, faults + _second_backend(config, more))
        params = _build(files, stored, chosen, sizes, policy)
        if head is not None:
            config = _add_head(config, params, files, head, policy)
    check_pair(target, config)
    return config, params


def _target_name(name: str) -> str:
    if name in names.TARGET_HEAD_NAMES:
        return "lm_head.weight"
    for prefix in names.TARGET_PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _draft_name(name: str) -> str:
    bare = name.removeprefix(names.DRAFT_PREFIX)
    bare = names.DRAFT_ALIASES.get(bare, bare)
    stem = bare.removesuffix(".weight")
    return stem if stem.endswith(names.BARE_SUFFIXES) else bare


def _canonical(
    files: TensorFiles, rename: Callable[[str], str], ignored: tuple[str, ...]
) -> tuple[dict[str, str], list[str]]:
    """Canonical name -> stored name, without ignored tensors, and the faults on the way."""
    stored, faults, skipped = {}, [], 0
    for name in files.names:
        if name.startswith(ignored):
            skipped += 1
            continue
        if name.endswith(names.QUANTISED_SUFFIXES):
            faults.append(f"{name}: quantised weights are not implemented")
            continue
        canonical = rename(name)
        if canonical in stored:
            faults.append(f"{name}: doubled, same tensor as {stored[canonical]}")
            continue
        stored[canonical] = name
    if skipped:
        logger.info("%d tensors ignored by prefix (%s)", skipped, ", ".join(ignored))
    return stored, faults


def _match(
    files: TensorFiles,
    stored: dict[str, str],
    leaves: list[PlannedLeaf],
    beside: tuple[str, ...] = (),
) -> tuple[list[tuple[PlannedLeaf, tuple[PlannedPart, ...]]], list[str]]:
    """The layout of each leaf that the file has, and all faults of names, shapes and dtypes.

    Args:
      beside: canonical names that are used outside the table.
    """
    chosen, faults, used = [], [], set(beside)
    for leaf in leaves:
        present = [layout for layout in leaf.layouts if any(part.name in stored for part in layout)]
        layout = (present or leaf.layouts)[0]
        for other in present[1:]:
            twice = [stored[part.name] for part in other if part.name in stored]
            faults += [f"{name}: doubled, another spelling is present too" for name in twice]
        used |= {part.name for other in present for part in other}
        for part in layout:
            faults += _part_faults(files, stored, part)
        chosen.append((leaf, layout))
    faults += [f"{stored[name]}: unmapped, no parameter takes it" for name in stored.keys() - used]
    return chosen, faults


def _part_faults(files: TensorFiles, stored: dict[str, str], part: PlannedPart) -> Iterator[str]:
    name = stored.get(part.name)
    if name is None:
        yield f"{part.name}: missing"
        return
    if (shape := files.shape(name)) != part.shape:
        yield f"{name}: expected shape {part.shape}, got {shape}"
    if (dtype := files.dtype(name)) not in READABLE:
        yield f"{name}: expected dtype out of {READABLE}, got {dtype} (quantised?)"


def _second_backend(config: DraftConfig, faults: list[str]) -> list[str]:
    """Says where DFlash2 tensors came in under a DFlash architecture."""
    if config.kind is DraftKind.DFLASH2:
        return faults
    return [
        f"{fault} (a DFlash2 tensor under {config.kind.value})"
        if any(part in fault for part in names.DFLASH2_NAME_PARTS)
        else fault
        for fault in faults
    ]


def _raise_faults(files: TensorFiles, faults: list[str]) -> None:
    if faults:
        raise WeightsError(files.folder, sorted(faults))


def _build(
    files: TensorFiles,
    stored: dict[str, str],
    chosen: list[tuple[PlannedLeaf, tuple[PlannedPart, ...]]],
    sizes: Sizes,
    policy: DtypePolicy,
) -> dict:
    """Reads, fuses and places leaf after leaf."""
    params = {}
    for leaf, layout in chosen:
        dtype = policy.param_dtype if leaf.storage is Storage.MATRIX else jnp.dtype("float32")
        pieces = _pieces(files, stored, layout, sizes)
        insert(params, leaf.path, place(fuse_rows(pieces, leaf.shape, dtype)))
    return params


def _pieces(
    files: TensorFiles, stored: dict[str, str], layout: tuple[PlannedPart, ...], sizes: Sizes
) -> Iterator[np.ndarray]:
    """Views of the layout's tensors; neighbours that share a tensor read it once."""
    name, tensor = None, None
    for part in layout:
        if part.name != name:
            name, tensor = part.name, files.read(stored[part.name])
        yield VIEWS[part.view](tensor, sizes)


def place(array: np.ndarray) -> jax.Array:
    """Copies to the default device and waits, so that the host copy can be freed."""
    return jax.block_until_ready(jax.device_put(array))


def insert(params: dict, path: tuple[str, ...], leaf: object) -> None:
    """Sets a leaf of a nested dict, making the dicts on the way."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = leaf


def _add_head(
    config: DraftConfig, params: dict, files: TensorFiles, head: OwnHead, policy: DtypePolicy
) -> DraftConfig:
    rows, token_ids = read_own_head(files, head, policy.param_dtype)
    insert(params, ("head", "kernel"), place(rows))
    insert(params, ("head", "token_ids"), place(token_ids))
    logger.info("the draft's own head: %d rows", len(token_ids))
    return dataclasses.replace(config, head_rows=len(token_ids))


def _warn_about_norms(params: dict, config: TargetConfig) -> None:
    means = [params[f"layers_{i}"]["input_norm"]["weight"].mean() for i in range(config.num_layers)]
    mean = float(jnp.stack(means).mean())
    if mean > SUSPICIOUS_NORM_MEAN:
        message = "input norms average %.2f: the file may hold 1 + w where w is expected"
        logger.warning(message, mean)
