"""Text and JSON files of a model folder; every failure names the file."""

from __future__ import annotations

import json
from pathlib import Path

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
