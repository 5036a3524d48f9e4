"""A Hugging Face folder resolved against the tables of names: the parts of each leaf, all faults.

Strict both ways: each file tensor is used, ignored by an explicit prefix, or a fault; each leaf is
filled or a fault. Only headers are read, until `vector_faults` reads norms, other small vectors and
scales to find values that cannot be used. Source: `checkpoints.md` 3 and 4, contracts 1.3,
`pitfalls.md`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_jax.config import DraftConfig, DraftKind, Fp8Config, TargetConfig
from dflash_jax.config.folder import read_json
from dflash_jax.weights import block_scaled, names, quantised
from dflash_jax.weights.files import TensorFiles, WeightsError
from dflash_jax.weights.heads import OwnHead, plan_own_head
from dflash_jax.weights.leaves import PlannedLeaf, PlannedPart, Storage
from dflash_jax.weights.quantise import QuantisedFiles
from dflash_jax.weights.transforms import VIEWS, Sizes, fuse_rows

logger = logging.getLogger(__name__)

READABLE = ("BF16", "F16", "F32")
# By the storage of the leaf; F8_E8M0 scales are powers of two.
_DTYPES = {
    Storage.MATRIX: READABLE,
    Storage.VECTOR: READABLE,
    Storage.FP8: (block_scaled.FP8_DTYPE,),
    Storage.SCALE: (*READABLE, "F8_E8M0"),
}
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

    config: of a draft with `own_embedding` as the files have it, `head_rows` still 0; of a target
      with `fp8` as the files have it.
    stored: canonical name -> stored name.
    chosen: every leaf, an own head excepted.
    ignored: stored names skipped by prefix.
    head: a draft's own head, or None.
    faults: of files, names, shapes and dtypes; no value was read.
    """

    config: TargetConfig | DraftConfig
    files: TensorFiles | QuantisedFiles
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
        """Norms, decays, small kernels and scales with values that are not finite, and scales that
        are not positive; reads those alone."""
        faults = []
        for entry in self.chosen:
            storage = entry.leaf.storage
            if storage not in (Storage.VECTOR, Storage.SCALE) or entry.leaf.copy:
                continue
            for name in dict.fromkeys(self._readable(entry)):
                if name in self.files.derived:
                    continue  # sound by construction, and known only when the matrix is read
                values = self.files.read(name).astype(np.float32)
                if bad := int((~np.isfinite(values)).sum()):
                    faults.append(f"{name}: expected finite values, got {bad} that are not")
                elif storage is Storage.SCALE and (bad := int((values <= 0).sum())):
                    faults.append(f"{name}: expected positive scales, got {bad} that are not")
        return faults

    def nan_faults(self, entry: ChosenLeaf) -> list[str]:
        """The tensors of a float8 leaf that hold NaN; reads them."""
        faults = []
        for name in dict.fromkeys(self.stored[part.name] for part in entry.layout):
            if bad := sum(map(block_scaled.count_nan, self.files.pieces(name, PIECE))):
                faults.append(f"{name}: expected finite values, got {bad} that are not")
        return faults

    def read(self, entry: ChosenLeaf, dtype: np.dtype) -> np.ndarray:
        """The values of a leaf in host memory; beside them one piece or one tensor is held."""
        return fuse_rows(self._pieces(entry.layout), entry.leaf.shape, dtype)

    def _readable(self, entry: ChosenLeaf) -> Iterator[str]:
        """Stored names of the parts that are as they should be."""
        for part in entry.layout:
            name = self.stored.get(part.name)
            if name is None or not self.files.is_sound(name):
                continue
            dtypes = _DTYPES[entry.leaf.storage]
            if self.files.dtype(name) in dtypes and self.files.shape(name) == part.shape:
                yield name

    def _pieces(self, layout: tuple[PlannedPart, ...]) -> Iterator[np.ndarray]:
        """Views of the layout's tensors; neighbours that share a tensor read it once."""
        name, tensor = None, None
        for part in layout:
            if part.view == "whole" and part.blocks is None:
                yield from self.files.pieces(self.stored[part.name], PIECE)
                continue
            if part.name != name:
                name, tensor = part.name, self.files.read(self.stored[part.name])
            if part.blocks is None:
                yield VIEWS[part.view](tensor, self.sizes)
            else:
                yield block_scaled.scale_rows(tensor, part, self.sizes)


def target_source(
    folder: str | Path, config: TargetConfig, *, quantised_to_fp8: bool = False
) -> Source:
    """Resolves the tensors of a target, and which of its matrices are float8.

    Args:
      quantised_to_fp8: takes every dense matrix that may be float8 as if the files had it so.
    Raises: WeightsError if the folder has no files to resolve; ConfigError for the blocks that
      config.json states of float8 matrices.
    """
    files = _open(folder)
    table = _target_names(files)
    config = dataclasses.replace(config, fp8=None)
    block = _block(Path(folder), files)
    if quantised_to_fp8:
        dense = names.target_plan(config)[0]
        parts = map(table.stored.get, block_scaled.scalable_parts(dense, config))
        matrices = frozenset(n for n in parts if n is not None and files.dtype(n) in READABLE)
        files = QuantisedFiles(files, matrices, block)
        table = _target_names(files)
    config = _with_fp8(config, files, table, block)
    leaves, sizes = names.target_plan(config)
    chosen, faults = _match(files, table, leaves)
    return _source(config, files, table, chosen, sizes, None, faults)


def _target_names(files: TensorFiles | QuantisedFiles) -> _Names:
    known = (block_scaled.SUFFIX,)
    return _Names.of(files, _target_name, names.IGNORED_TARGET_PREFIXES, known)


def _block(folder: Path, files: TensorFiles) -> tuple[int, int]:
    """Rows and columns of a block; config.json is asked only of files that have blocks."""
    if all(files.dtype(name) != block_scaled.FP8_DTYPE for name in files.names):
        return block_scaled.DEFAULT_BLOCK
    return block_scaled.stated_block(read_json(folder / "config.json"))


def _with_fp8(
    config: TargetConfig,
    files: TensorFiles | QuantisedFiles,
    table: _Names,
    block: tuple[int, int],
) -> TargetConfig:
    dtypes = {canonical: files.dtype(name) for canonical, name in table.stored.items()}
    layers = block_scaled.scaled_matrices(names.target_plan(config)[0], config, dtypes)
    if not any(layers):
        return config
    fp8 = Fp8Config(block_rows=block[0], block_columns=block[1], layers=layers)
    logger.info("%d matrices in float8, blocks of %d x %d", fp8.count, *block)
    return dataclasses.replace(config, fp8=fp8)


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
    ignored = set(table.ignored)
    dtypes = {name: files.dtype(name) for name in files.names if name not in ignored}
    scheme = quantised.recognise(dtypes, block_scaled=isinstance(config, TargetConfig))
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
        cls,
        files: TensorFiles,
        rename: Callable[[str], str],
        prefixes: tuple[str, ...],
        known: tuple[str, ...] = (),
    ) -> _Names:
        """`known`: ends of names that belong to a scheme and that the table takes all the same."""
        stored, ignored, faults = {}, [], []
        for name in files.names:
            if name.startswith(prefixes):
                ignored.append(name)
            elif (canonical := rename(name)) in stored:
                faults.append(f"{name}: doubled, same tensor as {stored[canonical]}")
            elif name.endswith(known) or not name.endswith(quantised.SUFFIXES):
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
            faults += _part_faults(files, table, part, leaf)
        chosen.append(ChosenLeaf(leaf, layout))
    left = table.stored.keys() - used
    faults += [f"{table.stored[name]}: {_why_left(files, table, name)}" for name in left]
    return tuple(chosen), faults


def _why_left(files: TensorFiles, table: _Names, name: str) -> str:
    weight = name.removesuffix(block_scaled.SUFFIX)
    if weight == name:
        return "unmapped, no parameter takes it"
    if (stored := table.stored.get(weight)) is None:
        return "a scale without its weight"
    if (dtype := files.dtype(stored)) != block_scaled.FP8_DTYPE:
        return f"a scale of a weight in {dtype}, expected {block_scaled.FP8_DTYPE}"
    return "a scale of a weight that is kept dense"


def _part_faults(
    files: TensorFiles, table: _Names, part: PlannedPart, leaf: PlannedLeaf
) -> Iterator[str]:
    name = table.stored.get(part.name)
    if name is None:
        if part.name not in table.promised and not files.blind:
            yield f"{part.name}: missing"
        return
    if (shape := files.shape(name)) != part.shape:
        yield f"{name}: expected shape {part.shape}, got {shape}"
    if (dtype := files.dtype(name)) in (expected := _DTYPES[leaf.storage]):
        return
    if leaf.storage is Storage.FP8:
        beside = "/".join(leaf.path)
        yield f"{name}: expected dtype {expected[0]} as other parts of {beside}, got {dtype}"
    else:
        yield f"{name}: expected dtype out of {expected}, got {dtype} (quantised?)"


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
