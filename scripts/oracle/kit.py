"""Reads a parity kit: a folder of tiny checkpoints and of the arrays computed from them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np

# What the name of a golden file says. Draft names may hold single underscores, never two.
_PATTERNS = {
    "target": re.compile(r"target_(?P<target>.+)"),
    "greedy": re.compile(r"greedy_(?P<target>.+)"),
    "draft": re.compile(r"draft_(?P<target>.+?)__(?P<draft>.+)"),
    "e2e": re.compile(r"e2e_(?P<target>.+?)__(?P<draft>.+)__k(?P<k>\d+)"),
    "selector_ties": re.compile(r"selector_ties"),
    "dist": re.compile(r"dist_(?P<target>.+)"),
    "verify": re.compile(r"verify_(?P<target>.+?)__(?P<draft>.+)"),
}


class KitError(ValueError):
    """A kit does not hold what its own naming scheme promises."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    """One file of reference arrays: its kind, the models its name mentions, and the arrays."""

    stem: str
    kind: str  # a key of _PATTERNS, or "unknown"
    target: str | None
    draft: str | None
    arrays: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise KitError(f"{self.stem}: expected an array {name}, got {sorted(self.arrays)}")
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def scalar(self, name: str) -> int:
        """An integer input."""
        return int(self[name])


def read_golden(path: Path) -> Golden:
    """Reads one .npz file; a name outside the scheme gives the kind "unknown"."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for kind, pattern in _PATTERNS.items():
        match = pattern.fullmatch(path.stem)
        if match:
            names = match.groupdict()
            return Golden(
                stem=path.stem,
                kind=kind,
                target=names.get("target"),
                draft=names.get("draft"),
                arrays=arrays,
            )
    return Golden(stem=path.stem, kind="unknown", target=None, draft=None, arrays=arrays)


def golden_paths(kit: Path) -> list[Path]:
    """All reference files of a kit, in a fixed order; an empty kit is an error."""
    paths = sorted((kit / "golden").glob("*.npz"))
    if not paths:
        raise KitError(f"kit: expected files {kit}/golden/*.npz, got none")
    return paths
