"""Folders that are either whole or absent: written under a temporary name, then renamed."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

MANIFEST = "manifest.json"


@contextlib.contextmanager
def replacing(folder: str | Path, *, need_bytes: int = 0) -> Iterator[Path]:
    """Yields an empty folder beside `folder` that takes its place when the block ends.

    A block that raises leaves the old folder as it was, and nothing else.

    Args:
      need_bytes: about what will be written; less free space is refused before anything is.
    Raises: OSError with ENOSPC, naming the folder, when the disk is too full or becomes so.
    """
    folder = Path(folder).absolute()
    check_space(folder, need_bytes)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        _swap(partial, folder)
    except (ValueError, SafetensorError) as error:
        # What orbax and safetensors make of a failed write: the number is in the text alone.
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise OSError(errno.ENOSPC, f"disk full: {error}", str(folder)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_space(folder: str | Path, need_bytes: int) -> None:
    """Makes the folder's parent, and raises OSError naming the folder if it is too full."""
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < need_bytes:
        raise OSError(
            errno.ENOSPC, f"disk full: expected {need_bytes} bytes free, got {free}", str(folder)
        )


def write_text(file: Path, text: str) -> None:
    """A file that is either whole or as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


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


def _swap(partial: Path, folder: Path) -> None:
    if not folder.exists():
        partial.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST)


def _fingerprint(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return f"{file.stat().st_size} bytes, sha256 {digest}"
