"""An indexed proposal head: the head's rows of the tokens that occur, beside the draft.

A folder's `proposal_head.safetensors` holds `weight` [n, H], rows of the target's head, and
`token_ids` [n] int32, ascending, distinct and public. Proposals then come from these ids alone;
what is accepted is the target's business as before, so text does not change. Source: contracts 1.3.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dflash_jax.config import DraftConfig, DtypePolicy, TargetConfig
from dflash_jax.weights.converted import ConvertedFolder, is_converted, item_of
from dflash_jax.weights.files import WeightsError
from dflash_jax.weights.header import DTYPES, read_header
from dflash_jax.weights.heads import id_fault, indexed_head
from dflash_jax.weights.source import target_source

FILE = "proposal_head.safetensors"
_ROWS, _IDS = "weight", "token_ids"
_ROW_DTYPES = ("BF16", "F16", "F32")
# Rows compared with the target's head: other rows would cost acceptance and raise nothing.
_PROBES = 64


def choose_ids(
    counts: np.ndarray,
    *,
    rows: int | None = None,
    coverage: float | None = None,
    always: Iterable[int] = (),
) -> np.ndarray:
    """The ids of a head, by frequency; ties and ids that never occur go by id, lowest first.

    Args:
      counts: [V_pub] integers, occurrences of each public id in a corpus.
      rows: how many ids, `always` included; or
      coverage: the least share of the corpus that the ids cover, in (0, 1].
      always: ids that are in the head whatever their count: special and stop ids.
    Returns:
      [n] int32, ascending.
    Raises: ValueError naming `rows`, `coverage`, `always` or `counts`.
    """
    public = len(counts)
    kept = np.unique(np.fromiter(always, np.int64))
    if kept.size and (kept[0] < 0 or kept[-1] >= public):
        raise ValueError(f"always: expected ids in [0, {public}), got {kept[0]}..{kept[-1]}")
    if (rows is None) == (coverage is None):
        raise ValueError(f"rows: expected either rows or coverage, got {rows} and {coverage}")
    order = np.argsort(-counts.astype(np.int64), kind="stable")
    order = order[~np.isin(order, kept)]
    if rows is not None:
        if not max(1, kept.size) <= rows <= public:
            raise ValueError(
                f"rows: expected {max(1, kept.size)} (ids that are always kept) to {public} (the "
                f"vocabulary), got {rows}"
            )
        more = rows - kept.size
    else:
        if not 0 < coverage <= 1:
            raise ValueError(f"coverage: expected a share in (0, 1], got {coverage}")
        total = int(counts.sum())
        if total == 0:
            raise ValueError("counts: expected a corpus with tokens, got none")
        covered = counts[kept].sum() + np.concatenate([[0], np.cumsum(counts[order])])
        more = int(np.searchsorted(covered, int(np.ceil(coverage * total))))
    return np.sort(np.concatenate([kept, order[:more]])).astype(np.int32)


def coverage_of(ids: np.ndarray, tokens: np.ndarray) -> float:
    """The share of `tokens` that are among `ids`; nan of none."""
    return float(np.isin(tokens, ids).mean()) if len(tokens) else float("nan")


def head_rows(folder: str | Path, target: TargetConfig, ids: np.ndarray) -> np.ndarray:
    """Rows [n, H] of the head of a target folder of either kind, in the dtype it is stored in.

    Raises: WeightsError listing all faults of the folder.
    """
    path = ("embedding",) if target.tie_embeddings else ("head",)
    if is_converted(folder):
        return ConvertedFolder(folder, "target").read_item(item_of(path))["/".join(path)][ids]
    source = target_source(folder, target)
    source.check()
    entry = next(entry for entry in source.chosen if entry.leaf.path == path)
    dtype = DTYPES[source.files.dtype(source.stored[entry.layout[0].name])]
    return source.read(entry, dtype)[ids]


def save_proposal_head(
    folder: str | Path, rows: np.ndarray, ids: np.ndarray, target: TargetConfig
) -> Path:
    """Writes FOLDER/proposal_head.safetensors; whole, or the file that was there stays.

    Raises: ValueError for ids that are not ascending, distinct and public, or another shape.
    """
    if fault := _fault(ids, target.public_vocab):
        raise ValueError(f"token_ids: {fault}")
    if rows.shape != (len(ids), target.hidden):
        raise ValueError(f"rows: expected shape {(len(ids), target.hidden)}, got {rows.shape}")
    file = Path(folder) / FILE
    partial = file.with_name(f".{FILE}.partial-{os.getpid()}")
    try:
        save_file({_ROWS: np.ascontiguousarray(rows), _IDS: ids.astype(np.int32)}, partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def read_proposal_head(
    folder: str | Path, target: TargetConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n, H] as stored and token ids [n] int32 of a folder's proposal head.

    Raises: WeightsError listing the faults: no file, a damaged one, other tensors, shapes or
      dtypes, ids that are not ascending, distinct and public.
    """
    file = Path(folder) / FILE
    if not file.is_file():
        expected = "expected a proposal head (scripts/make_proposal_head.py), got no file"
        raise WeightsError(Path(folder), [f"{FILE}: {expected}"])
    header = read_header(file)
    faults, entries = list(header.faults), header.entries
    if not faults and entries.keys() != {_ROWS, _IDS}:
        faults.append(f"{FILE}: expected tensors {[_IDS, _ROWS]}, got {sorted(entries)}")
    if not faults:
        rows, ids = entries[_ROWS], entries[_IDS]
        count = ids.size
        if ids.dtype != "I32" or ids.shape != (count,):
            faults.append(f"{_IDS}: expected I32 of shape (n,), got {ids.dtype} {ids.shape}")
        if rows.dtype not in _ROW_DTYPES or rows.shape != (count, target.hidden):
            expected = f"{_ROW_DTYPES} of shape {(count, target.hidden)}"
            faults.append(f"{_ROWS}: expected {expected}, got {rows.dtype} {rows.shape}")
    if faults:
        raise WeightsError(Path(folder), faults)
    values = {
        name: np.fromfile(file, DTYPES[entry.dtype], entry.size, offset=entry.start)
        for name, entry in entries.items()
    }
    if fault := _fault(values[_IDS], target.public_vocab):
        raise WeightsError(Path(folder), [f"{_IDS}: {fault}"])
    return values[_ROWS].reshape(rows.shape), values[_IDS]


def use_proposal_head(
    folder: str | Path,
    target: TargetConfig,
    target_params: Mapping,
    draft: DraftConfig,
    draft_params: dict,
    policy: DtypePolicy,
) -> tuple[DraftConfig, dict]:
    """The draft with the proposal head of its folder.

    Args:
      folder: the draft's.
      target, target_params: as loaded; some rows are compared with its head.
      draft, draft_params: as returned by `load_draft`; not changed.
      policy: `param` is the dtype of the rows.
    Raises: WeightsError for a faulty file, or rows of another target's head; ValueError for a draft
      with a head of its own.
    """
    if draft.head_rows:
        raise ValueError(f"head_rows: expected a draft without a head, got {draft.head_rows} rows")
    rows, ids = read_proposal_head(folder, target)
    rows = rows.astype(policy.param_dtype)
    probes = np.unique(np.linspace(0, len(ids) - 1, _PROBES).astype(int))
    head = target_params["embedding" if target.tie_embeddings else "head"]
    if not np.array_equal(np.asarray(head[jnp.asarray(ids[probes])]), rows[probes]):
        raise WeightsError(Path(folder), [f"{_ROWS}: expected rows of the target's head"])
    return indexed_head(target, draft, draft_params, jax.device_put(rows), ids)


def _fault(ids: np.ndarray, public_vocab: int) -> str | None:
    if fault := id_fault(ids, public_vocab):
        return fault
    return None if (np.diff(ids) > 0).all() else "expected ascending token ids, got unsorted ones"
