"""What the tables of names are made of: leaves, file tensors, and both of one model.

Source: `checkpoints.md` 3 and 4.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Storage(enum.Enum):
    """Dtype class of a leaf."""

    MATRIX = "matrix"  # DtypePolicy.param: matrices, embedding, head, codebooks
    VECTOR = "vector"  # float32: norms, gates' constants, small kernels
    FP8 = "fp8"  # float8_e4m3fn: block-scaled matrices
    SCALE = "scale"  # float32: their scales


class Layers(enum.Enum):
    """How often an entry applies."""

    ONCE = "once"
    ALL = "all layers"
    FULL = "full-attention layers"
    LINEAR = "linear-attention layers"
    EVERY_LAYER = "one leaf made of a piece of every layer"


@dataclass(frozen=True)
class Part:
    """A file tensor, or a view of it, that becomes consecutive elements of a leaf."""

    name: str
    shape: str
    view: str = "whole"


@dataclass(frozen=True)
class Leaf:
    """One parameter: where it goes and what it is made of."""

    path: str
    shape: str
    layouts: tuple[tuple[Part, ...], ...]
    storage: Storage
    layers: Layers
    copy: bool = False  # holds file tensors that another leaf holds as well


@dataclass(frozen=True)
class PlannedLeaf:
    """A `Leaf` of one model, every symbol replaced."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    layouts: tuple[tuple[PlannedPart, ...], ...]
    storage: Storage
    copy: bool


@dataclass(frozen=True)
class Blocks:
    """How scales of a file's blocks become those of a leaf, whose blocks may have fewer rows.

    repeat: rows of the leaf for one of the file.
    rows:   of them, those that exist; the file's last block may be cut.
    head:   of them, those of one attention head, for views that go by heads; 0 elsewhere.
    """

    repeat: int
    rows: int
    head: int


@dataclass(frozen=True)
class PlannedPart:
    """A `Part` of one model, every symbol replaced."""

    name: str
    shape: tuple[int, ...]
    view: str
    blocks: Blocks | None = None  # of scales alone
