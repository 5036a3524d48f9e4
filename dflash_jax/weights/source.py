"""A Hugging Face folder resolved against the tables of names: the parts of each leaf, all faults.

Strict both ways: each file tensor is used, ignored by an explicit prefix, or a fault; each leaf is
filled or a fault. Only headers are read, until `vector_faults` reads norms and other small vectors
to find values that are not finite. Source: `checkpoints.md` 3 and 4, contracts 1.3, `pitfalls.md`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_jax.config import DraftConfig, DraftKind, TargetConfig
from dflash_jax.weights import names, quantised
from dflash_jax.weights.files import TensorFiles, WeightsError
from dflash_jax.weights.heads import OwnHead, plan_own_head
from dflash_jax.weights.names import PlannedLeaf, PlannedPart, Storage
from dflash_jax.weights.transforms import VIEWS, Sizes, fuse_rows

logger = logging.getLogger(__name__)

READABLE = ("BF16", "F16", "F32")
# Elements read at a time: 64 MiB of float32.
PIECE = 1 << 24


@dataclass(frozen=True)
class ChosenLeaf:
    """A leaf and the one layout of it that the files have."""

    leaf: PlannedLeaf
    layout: tuple[PlannedPart, ...]


@dataclass(frozen=True)
class Source:
    """A model folder, resolved.

    config: of a draft with `own_embedding` as the files have it; `head_rows` is still 0.
    stored: canonical name -> stored name.
    chosen: every leaf, an own head excepted.
    ignored: stored names skipped by prefix.
    head: a draft's own head, or None.
    faults: of files, names, shapes and dtypes; no value was read.
    """

    config: TargetConfig | DraftConfig
    files: TensorFiles
    stored: dict[str, str]
    chosen: tuple[ChosenLeaf, ...]
    sizes: Sizes
    ignored: tuple[str, ...]
    head: OwnHead | None
    faults: tuple[str, ...]

    def check(self) -> None:
        """Raises WeightsError listing every fault, those of the vectors' values included."""
        if faults := [*self.faults, *self.vector_faults()]:
            raise WeightsError(self.files.folder, sorted(faults))

    def vector_faults(self) -> list[str]:
        """Norms, decays and small kernels with values that are not finite; reads those alone."""
        faults = []
        for entry in self.chosen:
            if entry.leaf.storage is not Storage.VECTOR or entry.leaf.copy:
                continue
            for part in entry.layout:
                name = self.stored.get(part.name)
                if name is None or not self._readable(name, part):
                    continue
                bad = int((~np.isfinite(self.files.read(name).astype(np.float32))).sum())
                if bad:
                    faults.append(f"{name}: expected finite values, got {bad} that are not")
        return faults

    def read(self, entry: ChosenLeaf, dtype: np.dtype) -> np.ndarray:
        """The values of a leaf in host memory; beside them one piece or one tensor is held."""
        return fuse_rows(self._pieces(entry.layout), entry.leaf.shape, dtype)

    def _readable(self, name: str, part: PlannedPart) -> bool:
        sound = self.files.is_sound(name) and self.files.dtype(name) in READABLE
        return sound and self.files.shape(name) == part.shape

    def _pieces(self, layout: tuple[PlannedPart, ...]) -> Iterator[np.ndarray]:
        """Views of the layout's tensors; neighbours that share a tensor read it once."""
        name, tensor = None, None
        for part in layout:
            if part.view == "whole":
                yield from self.files.pieces(self.stored[part.name], PIECE)
                continue
            if part.name != name:
                name, tensor = part.name, self.files.read(self.stored[part.name])
            yield VIEWS[part.view](tensor, self.sizes)


def target_source(folder: str | Path, config: TargetConfig) -> Source:
    """Resolves the tensors of a target.

    Raises: WeightsError if the folder has no files to resolve.
    """
    files = _open(folder)
    table = _Names.of(files, _target_name, names.IGNORED_TARGET_PREFIXES)
    leaves, sizes = names.target_plan(config)
    chosen, faults = _match(files, table, leaves)
    return _source(config, files, table, chosen, sizes, None, faults)


def draft_source(folder: str | Path, config: DraftConfig, public_vocab: int) -> Source:
    """Resolves the tensors of a draft, those of its own embedding and head included.

    Raises: WeightsError if the folder has no files to resolve.
    """
    files = _open(folder)
    table = _Names.of(files, draft_name, ())
    head, faults = plan_own_head(files, table.stored, config, public_vocab)
    config = dataclasses.replace(config, own_embedding=names.OWN_EMBEDDING in table.stored)
    leaves, sizes = names.draft_plan(config)
    chosen, more = _match(files, table, leaves, () if head is None else head.names)
    faults += _second_backend(config, more)
    return _source(config, files, table, chosen, sizes, head, faults)


def _open(folder: str | Path) -> TensorFiles:
    folder = Path(folder)
    try:
        return TensorFiles(folder)
    except WeightsError as error:
        if fault := quantised.recognise_files(folder):
            raise WeightsError(folder, [*error.faults, fault]) from error
        raise


def _source(config, files, table, chosen, sizes, head, faults) -> Source:
    scheme = quantised.recognise({name: files.dtype(name) for name in files.names})
    if scheme is not None:
        # Missing and unmapped tensors follow from the scheme; a line for each would bury it.
        faults = [fault for fault in faults if "expected shape" in fault] + [scheme]
    if table.ignored:
        prefixes = ", ".join(names.IGNORED_TARGET_PREFIXES)
        logger.info("%d tensors ignored by prefix (%s)", len(table.ignored), prefixes)
    faults = (*files.faults, *table.faults, *faults)
    return Source(config, files, table.stored, chosen, sizes, table.ignored, head, faults)


def _target_name(name: str) -> str:
    if name in names.TARGET_HEAD_NAMES:
        return "lm_head.weight"
    for prefix in names.TARGET_PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def draft_name(name: str) -> str:
    bare = name.removeprefix(names.DRAFT_PREFIX)
    bare = names.DRAFT_ALIASES.get(bare, bare)
    stem = bare.removesuffix(".weight")
    return stem if stem.endswith(names.BARE_SUFFIXES) else bare


@dataclass(frozen=True)
class _Names:
    """Stored names by canonical ones; `promised` are canonical names whose file is faulty."""

    stored: dict[str, str]
    promised: frozenset[str]
    ignored: tuple[str, ...]
    faults: list[str]

    @classmethod
    def of(
        cls, files: TensorFiles, rename: Callable[[str], str], prefixes: tuple[str, ...]
    ) -> _Names:
        stored, ignored, faults = {}, [], []
        for name in files.names:
            if name.startswith(prefixes):
                ignored.append(name)
            elif (canonical := rename(name)) in stored:
                faults.append(f"{name}: doubled, same tensor as {stored[canonical]}")
            elif not name.endswith(quantised.SUFFIXES):
                stored[canonical] = name
        promised = frozenset(rename(name) for name in files.unreadable)
        return cls(stored, promised, tuple(ignored), faults)

    def has(self, part: PlannedPart) -> bool:
        return part.name in self.stored or part.name in self.promised


def _match(
    files: TensorFiles, table: _Names, leaves: list[PlannedLeaf], beside: tuple[str, ...] = ()
) -> tuple[tuple[ChosenLeaf, ...], list[str]]:
    """The layout of each leaf that the files have, and all faults of names, shapes and dtypes.

    Args:
      beside: canonical names that are used outside the table.
    """
    chosen, faults, used = [], [], set(beside)
    for leaf in leaves:
        present = [layout for layout in leaf.layouts if any(map(table.has, layout))]
        layout = (present or leaf.layouts)[0]
        for other in present[1:]:
            twice = [table.stored[part.name] for part in other if part.name in table.stored]
            faults += [f"{name}: doubled, another spelling is present too" for name in twice]
        used |= {part.name for other in present for part in other}
        for part in layout:
            faults += _part_faults(files, table, part)
        chosen.append(ChosenLeaf(leaf, layout))
    left = table.stored.keys() - used
    faults += [f"{table.stored[name]}: unmapped, no parameter takes it" for name in left]
    return tuple(chosen), faults


def _part_faults(files: TensorFiles, table: _Names, part: PlannedPart) -> Iterator[str]:
    name = table.stored.get(part.name)
    if name is None:
        if part.name not in table.promised and not files.blind:
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
