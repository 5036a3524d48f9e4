"""Runs every golden of a kit and counts what agrees."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import jax

from .compare import Checks, Line, compare, failure
from .drafts import check_draft
from .kit import Golden, golden_paths, read_golden
from .loaded import LoadedKit
from .rounds import check_e2e, check_greedy
from .sampled import check_dist, check_verify
from .selector import check_ties
from .targets import check_target


def checks_of(golden: Golden, kit: LoadedKit) -> Checks:
    """Computes what one golden file asks for; an unknown kind of file has no checks."""
    with jax.default_matmul_precision("highest"):
        match golden.kind:
            case "target":
                return check_target(golden, *kit.target(golden.target))
            case "draft":
                return check_draft(golden, kit)
            case "greedy":
                return check_greedy(golden, kit)
            case "e2e":
                return check_e2e(golden, kit)
            case "selector_ties":
                return check_ties(golden)
            case "dist":
                return check_dist(golden, kit)
            case "verify":
                return check_verify(golden, kit)
            case _:
                return {}


def check_kit(
    folder: Path,
    *,
    targets: Collection[str] | None = None,
    drafts: Collection[str] | None = None,
) -> Iterator[Line]:
    """Yields the lines of all golden files, limited to some models when asked.

    A file that cannot be computed (a kit without what its names promise, a geometry the library
    refuses) gives one failed line and does not end the run.
    """
    kit = LoadedKit(folder)
    for path in golden_paths(folder):
        golden = read_golden(path)
        if targets is not None and golden.target is not None and golden.target not in targets:
            continue
        if drafts is not None and golden.draft is not None and golden.draft not in drafts:
            continue
        try:
            checks = checks_of(golden, kit)
        except (ValueError, NotImplementedError) as error:
            yield failure(golden.stem, f"{type(error).__name__}: {error}")
            continue
        yield from compare(golden, checks)
