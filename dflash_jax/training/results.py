"""Sealed folders: a manifest tells whether a folder is whole."""

import hashlib
import json
from pathlib import Path

from dflash_jax.config.folder import check_space, replacing, write_text

__all__ = ["MANIFEST", "check_space", "replacing", "seal", "unseal", "write_text"]

MANIFEST = "manifest.json"


def seal(folder: Path, facts: dict) -> None:
    """Writes `manifest.json`: the facts, and size and SHA-256 of every file of the folder."""
    files = {str(file.relative_to(folder)): _fingerprint(file) for file in _files(folder)}
    content = {"facts": facts, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def unseal(folder: Path) -> dict:
    """The facts of a sealed folder, after every file has been compared with the manifest.

    Raises: ValueError naming the first file that is missing or differs.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ValueError(f"{manifest}: expected the manifest of a checkpoint, got no file")
    try:
        content = json.loads(manifest.read_text("utf-8"))
        facts, files = content["facts"], content["files"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{manifest}: expected a manifest, got a damaged file") from error
    for name, expected in files.items():
        file = folder / name
        got = _fingerprint(file) if file.is_file() else "no file"
        if got != expected:
            raise ValueError(f"{file}: expected {expected}, got {got} (damaged checkpoint)")
    return facts


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST)


def _fingerprint(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return f"{file.stat().st_size} bytes, sha256 {digest}"
