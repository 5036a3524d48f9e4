"""Proposal heads with a token-id map: a draft file's own, or a shortlist given by the caller.

`head/kernel` [rows, H] scores `head/token_ids` [rows] int32, distinct ids in [0, V_pub). DFlash
breaks ties by head row, so its rows keep their order; DFlash2 breaks them by token id, so its rows
are sorted by id. Source: contracts 1.3, 5.7 and 5.8; `checkpoints.md` 2.1; `pitfalls.md` F1.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig, DraftKind, TargetConfig, check_pair
from dflash_jax.weights.files import TensorFiles
from dflash_jax.weights.names import OWN_HEAD, OWN_HEAD_FLAGS, OWN_HEAD_OFFSETS

_OFFSET_DTYPES, _FLAG_DTYPES = ("I64", "I32"), ("BOOL", "U8")
_FLOAT_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class OwnHead:
    """A draft file's own head: which rows of the stored matrix serve which ids, in this order."""

    names: tuple[str, ...]  # canonical names taken from the file
    stored: str  # stored name of the matrix
    rows: np.ndarray  # int64 [rows], row numbers of the matrix
    token_ids: np.ndarray  # int32 [rows]


def plan_own_head(
    files: TensorFiles, stored: dict[str, str], config: DraftConfig, public_vocab: int
) -> tuple[OwnHead | None, list[str]]:
    """Checks `lm_head.weight` with its maps `d2t` (offsets: id = row + d2t[row]) and `t2d`.

    Without a map the head has V rows, of which the public ones are used.

    Returns:
      The head, or None if the file has none, and the faults found. A head with faults still names
      its tensors; its rows are empty.
    """
    beside = tuple(n for n in (OWN_HEAD, OWN_HEAD_OFFSETS, OWN_HEAD_FLAGS) if n in stored)
    if not beside:
        return None, []
    if OWN_HEAD not in stored:
        faults = [f"{stored[name]}: an id map without {OWN_HEAD}" for name in beside]
    else:
        faults = _float_faults(files, stored[OWN_HEAD], config)
    if faults:
        return OwnHead(beside, "", np.empty(0, np.int64), np.empty(0, np.int32)), faults
    head = stored[OWN_HEAD]
    ids = _token_ids(files, stored, config, public_vocab, faults)
    if OWN_HEAD_FLAGS in stored and not faults:
        faults += _flag_faults(files, stored[OWN_HEAD_FLAGS], ids, config.vocab_rows)
    order = head_order(ids, config.kind)
    rows = order.astype(np.int64)
    return OwnHead(beside, head, rows, ids[order].astype(np.int32)), faults


def _float_faults(files: TensorFiles, head: str, config: DraftConfig) -> list[str]:
    shape, faults = files.shape(head), []
    if len(shape) != 2 or shape[1] != config.hidden:
        faults.append(f"{head}: expected shape (rows, {config.hidden}), got {shape}")
    if (dtype := files.dtype(head)) not in _FLOAT_DTYPES:
        faults.append(f"{head}: expected dtype out of {_FLOAT_DTYPES}, got {dtype} (quantised?)")
    return faults


def _token_ids(
    files: TensorFiles,
    stored: dict[str, str],
    config: DraftConfig,
    public_vocab: int,
    faults: list[str],
) -> np.ndarray:
    """Ids by head row; appends to `faults` what is wrong with the map."""
    head, rows = stored[OWN_HEAD], files.shape(stored[OWN_HEAD])[0]
    if OWN_HEAD_OFFSETS not in stored:
        if rows != config.vocab_rows:
            expected = f"{config.vocab_rows} rows without {OWN_HEAD_OFFSETS}"
            faults.append(f"{head}: expected {expected}, got {rows}")
        return np.arange(min(rows, public_vocab))
    name = stored[OWN_HEAD_OFFSETS]
    shape, dtype = files.shape(name), files.dtype(name)
    if shape != (rows,) or dtype not in _OFFSET_DTYPES:
        expected = f"{_OFFSET_DTYPES} of shape ({rows},)"
        faults.append(f"{name}: expected {expected}, got {dtype} {shape}")
        return np.arange(0)
    if not files.is_sound(name):
        return np.arange(0)  # a fault of the file already
    ids = np.arange(rows) + files.read(name).astype(np.int64)
    if fault := id_fault(ids, public_vocab):
        faults.append(f"{name}: {fault}")
    return ids


def _flag_faults(files: TensorFiles, name: str, ids: np.ndarray, vocab_rows: int) -> list[str]:
    shape, dtype = files.shape(name), files.dtype(name)
    if shape != (vocab_rows,) or dtype not in _FLAG_DTYPES:
        expected = f"{_FLAG_DTYPES} of shape ({vocab_rows},)"
        return [f"{name}: expected {expected}, got {dtype} {shape}"]
    if not files.is_sound(name):
        return []  # a fault of the file already
    flagged = np.flatnonzero(files.read(name))
    if np.array_equal(flagged, np.sort(ids)):
        return []
    return [f"{name}: expected a flag at the {len(ids)} mapped ids, got {len(flagged)} flags"]


def id_fault(ids: np.ndarray, public_vocab: int) -> str | None:
    """What is wrong with the ids of a head, or None."""
    if ids.ndim != 1 or ids.size == 0:
        return f"expected a non-empty list of token ids, got shape {ids.shape}"
    if ids.min() < 0 or ids.max() >= public_vocab:
        return f"expected token ids in [0, {public_vocab}), got {ids.min()}..{ids.max()}"
    if len(np.unique(ids)) != len(ids):
        return f"expected distinct token ids, got {len(ids) - len(np.unique(ids))} repeats"
    return None


def head_order(ids: np.ndarray, kind: DraftKind) -> np.ndarray:
    """Row order of a head: as given for DFlash, by token id for DFlash2."""
    return np.argsort(ids, kind="stable") if kind is DraftKind.DFLASH2 else np.arange(len(ids))


def read_own_head(
    files: TensorFiles, head: OwnHead, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Rows [rows, H] in `dtype` and their token ids [rows] int32."""
    return files.read(head.stored)[head.rows].astype(dtype, copy=False), head.token_ids


def indexed_head(
    target: TargetConfig,
    draft: DraftConfig,
    draft_params: dict,
    rows: np.ndarray,
    token_ids: np.ndarray,
) -> tuple[DraftConfig, dict]:
    """Gives a draft a reduced proposal head; replaces one it may have.

    Args:
      target: gives V_pub.
      draft, draft_params: as returned by `load_draft`; not changed.
      rows: [n, H], head rows in the dtype they should have.
      token_ids: [n] integers, the id of each row; distinct, in [0, V_pub).
    Returns:
      The config with `head_rows` = n and the parameters with `head/kernel` [n, H] and
      `head/token_ids` [n] int32 (sorted by id for DFlash2).
    Raises: ValueError naming `rows` or `token_ids`.
    """
    ids = np.asarray(token_ids)
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token_ids: expected integers, got {ids.dtype}")
    if fault := id_fault(ids, target.public_vocab):
        raise ValueError(f"token_ids: {fault}")
    if rows.shape != (len(ids), draft.hidden):
        raise ValueError(f"rows: expected shape {(len(ids), draft.hidden)}, got {rows.shape}")
    order = head_order(ids, draft.kind)
    config = dataclasses.replace(draft, head_rows=len(ids))
    check_pair(target, config)
    head = {
        "kernel": jnp.asarray(rows)[order],
        "token_ids": jnp.asarray(ids[order].astype(np.int32)),
    }
    return config, {**draft_params, "head": head}
