"""What is in a model folder, from config.json and file headers alone: seconds, also for 70 GB.

`inspect_folder` answers what the loaders would do: target or draft, geometry, causality and what
decided it, dtypes and sizes, what would be ignored, and every fault that would refuse the folder.
Values are not read, so norms that are not finite are found by loading only.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401  names bfloat16 to NumPy
import numpy as np

from dflash_jax.config import ConfigError, DraftConfig, TargetConfig, describe
from dflash_jax.config.folder import read_json
from dflash_jax.config.pairing import describe_draft
from dflash_jax.weights.converted import ConvertedFolder, is_converted
from dflash_jax.weights.files import TensorFiles, WeightsError
from dflash_jax.weights.hf_config import read_target_config
from dflash_jax.weights.hf_draft_config import (
    draft_causality,
    draft_config,
    is_draft,
    stated_target,
)
from dflash_jax.weights.names import IGNORED_TARGET_PREFIXES, draft_plan, target_plan
from dflash_jax.weights.quantised import recognise_files
from dflash_jax.weights.source import Source, draft_source, target_source

GB = 1e9


@dataclass(frozen=True)
class Report:
    """lines: what was found, one fact a line; faults: why a loader would refuse the folder."""

    lines: tuple[str, ...]
    faults: tuple[str, ...]

    def __str__(self) -> str:
        if not self.faults:
            return "\n".join([*self.lines, "faults: none"])
        count = f"faults: {len(self.faults)}, would be refused"
        return "\n".join([*self.lines, count, *(f"  {fault}" for fault in self.faults)])


def inspect_folder(
    folder: str | Path,
    target: str | Path | None = None,
    *,
    causal: bool | None = None,
    public_vocab: int | None = None,
) -> Report:
    """Looks at a folder of a target or a draft, Hugging Face files or converted weights.

    Args:
      folder: the folder.
      target: of a draft, the folder of its target; without one, what the draft's own config.json
        says of it is believed.
      causal, public_vocab: as for `load_draft` and `load_target`.
    Returns:
      What was found; a fault of config.json leaves the table of the files.
    Raises: ConfigError if there is no such folder, no config.json in it, or a fault of `target`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: expected a folder, got none")
    foreign = None if (folder / "config.json").is_file() else recognise_files(folder)
    if foreign is not None:
        return Report((f"{folder}: no config.json",), (foreign,))
    raw = read_json(folder / "config.json")
    of_draft = is_draft(raw)
    stored = is_converted(folder)
    lines, faults = [f"{folder}: {'draft' if of_draft else 'target'}"], []
    reference = None if target is None else read_target_config(target)
    try:
        if of_draft:
            lines += _draft_lines(raw, reference, causal)
            found = reference or stated_target(raw)
            config = draft_config(raw, found, causal=causal)
            if not stored:
                source = draft_source(folder, config, found.public_vocab)
        else:
            config = read_target_config(folder, public_vocab=public_vocab)
            lines += describe(config).splitlines()[1:]
            if not stored:
                source = target_source(folder, config)
                lines[1:] = describe(source.config).splitlines()[1:]
        if stored:
            return _converted(folder, config, lines)
    except ConfigError as error:
        faults.append(f"config.json: {error}")
        lines += _files_alone(folder, faults)
    except WeightsError as error:
        faults += error.faults
    else:
        lines += [*_file_lines(source.files), *_use_lines(source)]
        faults += source.faults
    return Report(tuple(lines), tuple(sorted(dict.fromkeys(faults))))


def _converted(folder: Path, config: TargetConfig | DraftConfig, lines: list[str]) -> Report:
    """Of converted weights: what the manifest says, and how the folder differs from it."""
    of_draft = isinstance(config, DraftConfig)
    opened = ConvertedFolder(folder, "draft" if of_draft else "target")
    if of_draft:
        config = dataclasses.replace(config, own_embedding=opened.has("embedding"))
    else:
        config = opened.with_fp8(config)
        lines = [lines[0], *describe(config).splitlines()[1:]]
    leaves, _ = draft_plan(config) if of_draft else target_plan(config)
    manifest, faults = opened.manifest, ()
    try:
        opened.check(leaves, np.dtype(manifest["dtype"]))
    except WeightsError as error:
        faults = error.faults
    items = manifest["items"].values()
    entries = [entry for item in items for entry in item.values()]
    size = sum(math.prod(e["shape"]) * np.dtype(e["dtype"]).itemsize for e in entries) / GB
    rounded = ", rounded from wider ones" if manifest["rounded"] else ""
    if quantised := manifest.get("quantised"):
        rounded += f", {quantised} tensors quantised to float8"
    return Report(
        (
            *lines,
            f"converted by {manifest.get('library')}: {len(items)} items, {len(entries)} leaves, "
            f"{size:.3f} GB, matrices {manifest['dtype']}{rounded}",
        ),
        faults,
    )


def _draft_lines(raw: Mapping, target: TargetConfig | None, causal: bool | None) -> list[str]:
    believed = target or stated_target(raw)
    lines = describe_draft(draft_config(raw, believed, causal=causal)).splitlines()[1:]
    causality = draft_causality(raw, causal)
    if target is None:
        lines.append("  not compared with a target: give one to do so")
    return [*lines, f"causality: {list(causality.flags)}, decided by {causality.reason}"]


def _files_alone(folder: Path, faults: list[str]) -> list[str]:
    try:
        files = TensorFiles(folder)
    except WeightsError as error:
        faults += error.faults
        return []
    faults += files.faults
    return _file_lines(files)


def _file_lines(files: TensorFiles) -> list[str]:
    """Files, and tensors, elements and bytes by dtype."""
    tensors, num_bytes = collections.Counter(), collections.Counter()
    for name in files.names:
        tensors[files.dtype(name)] += 1
        num_bytes[files.dtype(name)] += files.num_bytes(name)
    total = sum(num_bytes.values()) / GB
    lines = [f"files: {len(files.headers)}, {len(files.names)} tensors, {total:.3f} GB"]
    for dtype in sorted(tensors, key=lambda dtype: -num_bytes[dtype]):
        lines.append(f"  {dtype}: {tensors[dtype]} tensors, {num_bytes[dtype] / GB:.3f} GB")
    return lines


def _use_lines(source: Source) -> list[str]:
    """What would be loaded and what ignored."""
    files = source.files
    used = {
        source.stored[part.name]
        for entry in source.chosen
        for part in entry.layout
        if part.name in source.stored
    }
    if source.head is not None:
        used |= {source.stored[name] for name in source.head.names}
    elements = sum(files.num_elements(name) for name in used)
    size = sum(files.num_bytes(name) for name in used) / GB
    lines = [f"loaded: {len(used)} tensors, {elements:,} parameters, {size:.3f} GB"]
    if source.head is not None:
        lines.append(f"  with a head of its own, {len(source.head.token_ids)} rows")
    size = sum(files.num_bytes(name) for name in source.ignored) / GB
    lines.append(f"ignored: {len(source.ignored)} tensors, {size:.3f} GB")
    for prefix in IGNORED_TARGET_PREFIXES:
        if count := sum(name.startswith(prefix) for name in source.ignored):
            lines.append(f"  {prefix}*: {count}")
    return lines
