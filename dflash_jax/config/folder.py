"""Text and JSON files of a model folder, and files and folders that are either whole or absent.

Every failure names the file. What is written gets a temporary name first and is then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError

from dflash_jax.config.rules import ConfigError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises: ConfigError if the file is absent or not UTF-8.
    """
    if not path.is_file():
        raise ConfigError(f"{path.name}: expected a file in {path.parent}, got none")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name}: expected UTF-8, got {error}") from error


def read_json(path: Path) -> dict:
    """The object in a JSON file.

    Raises: ConfigError if the file is absent, not UTF-8, no JSON that can be read, or no object.
    """
    text = read_text(path)
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{path.name}: expected JSON, got one nested too deeply") from error
    except ValueError as error:  # also numbers with more digits than Python converts
        raise ConfigError(f"{path.name}: expected JSON, got {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name}: expected an object, got {type(content).__name__}")
    return content


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
    """A UTF-8 file that is either whole or as it was."""
    write_files({file: text.encode("utf-8")})


def write_files(files: Mapping[Path, bytes]) -> None:
    """Files that are each whole or as it was; none is touched before all of them are on the disk.

    They take their places in order, so of several the last one tells that the others are there.
    """
    partials = {
        file: file.with_name(f".{file.name}.partial-{os.getpid()}") for file in files
    }
    try:
        for file, partial in partials.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(files[file])
        for file, partial in partials.items():
            partial.replace(file)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)


def _swap(partial: Path, folder: Path) -> None:
    if not folder.exists():
        partial.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old)
