"""A conversation's state image on disk: ``image.safetensors`` and ``image.json``.

The JSON file holds the ids, the request as it stood, and what the state depends on: format, models,
dtypes, page size and weights. It comes last and holds the digest of both, so a folder that was
written halfway or changed is never loaded.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy before safetensors reads
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dflash_jax.config.folder import read_json, write_files
from dflash_jax.engine.lanes import Replica
from dflash_jax.engine.request import Embeddings, Piece, Request
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models

FORMAT = 2
TENSORS, HEADER = "image.safetensors", "image.json"
_EMBEDDINGS = ("rows", "index", "positions")
_WATCH = ("tail", "recent", "shown", "held")  # what of it does not follow from the request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """What a folder holds: the tokens, the request as it stood, and every array."""

    tokens: tuple[int, ...]
    origin: Request
    replica: Replica


def identity(models: Models, weights: str) -> dict:
    """What a state depends on, as plain JSON values.

    Args:
      weights: `fingerprint` of the parameters.
    """
    draft = None if models.draft is None else dataclasses.asdict(models.draft)
    stated = {
        "format": FORMAT,
        "target": dataclasses.asdict(models.target),
        "draft": draft,
        "dtypes": dataclasses.asdict(models.run.dtypes),
        "page_size": models.run.page_size,
        "weights": weights,
    }
    return json.loads(json.dumps(stated))


def save_image(folder, saved: Saved, identity: dict) -> None:
    """Writes a folder; an image that it holds stays until the new one is whole.

    Raises: ValueError for what is no path, OSError for what cannot be written.
    """
    folder = _path(folder)
    tensors = {f"state/{name}": leaf for name, leaf in _leaves(saved.replica)}
    origin = saved.origin
    if origin.embeddings is not None:
        given = origin.embeddings
        tensors |= {
            f"embeddings/{name}": np.ascontiguousarray(getattr(given, name))
            for name in _EMBEDDINGS
        }
    content = save(tensors)
    header = {"tokens": list(saved.tokens), "request": _plain_request(origin)}
    header = json.loads(json.dumps(header, default=lambda number: number.item()))
    header |= {"identity": identity, "digest": _digest(content, header)}
    text = json.dumps(header, indent=1) + "\n"
    write_files({folder / TENSORS: content, folder / HEADER: text.encode()})


def _path(folder) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"folder: expected a path, got {folder!r}")
    return Path(folder)


def _plain_request(origin: Request) -> dict:
    sampling = dataclasses.asdict(origin.sampling)
    sampling["logit_bias"] = {int(token): b for token, b in origin.sampling.logit_bias.items()}
    return {
        "row": origin.row,
        "prompt": list(origin.prompt),
        "max_new_tokens": origin.max_new_tokens,
        "eos_ids": sorted(int(token) for token in origin.eos_ids),
        "stop_sequences": [list(sequence) for sequence in origin.stop_sequences],
        "stop_strings": list(origin.stop_strings),
        "sampling": sampling,
        "tokens": list(origin.tokens),
        "text": origin.text,
        "watch": {name: getattr(origin.watch, name) for name in _WATCH},
        "rope_delta": origin.embeddings and origin.embeddings.rope_delta,
    }


def _digest(content: bytes, header: dict) -> str:
    """SHA-256 of the tensors' file, the ids and the request."""
    stated = {name: header.get(name) for name in ("tokens", "request")}
    return hashlib.sha256(content + json.dumps(stated, sort_keys=True).encode()).hexdigest()


def load_image(folder, identity: dict, like: Callable[[int], Replica], decode) -> Saved:
    """Reads a folder.

    Args:
      identity: of this process.
      like: gives shapes and dtypes of a replica of so many tokens.
      decode: text of ids, or None.
    Raises:
      ValueError: the folder is incomplete or damaged, or was made with another format, model,
        dtype, page size or other weights; says which.
    """
    folder = _path(folder)
    header = read_json(folder / HEADER)
    stated = header.get("identity") if isinstance(header, dict) else None
    if not isinstance(stated, dict):
        raise ValueError(f"{HEADER}: identity: expected an object, got {_short(stated)}")
    for name, expected in identity.items():
        if stated.get(name) != expected:
            raise ValueError(
                f"{HEADER}: {name}: expected {_short(expected)}, got {_short(stated.get(name))}"
            )
    if not (folder / TENSORS).is_file():
        raise ValueError(f"{TENSORS}: expected a file beside {HEADER}, got none")
    content = (folder / TENSORS).read_bytes()
    if _digest(content, header) != header.get("digest"):
        raise ValueError(f"{TENSORS}, {HEADER}: expected the digest in {HEADER}, got another")
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ValueError(f"{TENSORS}: expected safetensors, got {error}") from error
    tokens = tuple(header["tokens"])
    return Saved(
        tokens=tokens, origin=_request(header["request"], tensors, decode),
        replica=_replica(tensors, like(len(tokens))),
    )


def _request(fields: dict, tensors: dict, decode) -> Request:
    embeddings = None
    if fields["rope_delta"] is not None:
        arrays = {name: tensors[f"embeddings/{name}"] for name in _EMBEDDINGS}
        embeddings = Embeddings(**arrays, rope_delta=fields["rope_delta"])
    sampling = dict(fields["sampling"])
    sampling["logit_bias"] = {int(token): b for token, b in sampling["logit_bias"].items()}
    request = Request(
        row=fields["row"],
        prompt=tuple(fields["prompt"]),
        max_new_tokens=fields["max_new_tokens"],
        eos_ids=frozenset(fields["eos_ids"]),
        stop_sequences=tuple(map(tuple, fields["stop_sequences"])),
        stop_strings=tuple(fields["stop_strings"]),
        decode=decode,
        sampling=SamplingParams(**sampling),
        embeddings=embeddings,
        tokens=list(fields["tokens"]),
    )
    if request.tokens:
        request.pieces.append(Piece(tokens=tuple(request.tokens), text=fields["text"]))
    seen = fields["watch"]
    request.watch = dataclasses.replace(
        request.watch, tail=tuple(seen["tail"]), recent=tuple(seen["recent"]),
        shown=seen["shown"], held=seen["held"],
    )
    return request


def _leaves(tree):
    for path, leaf in jax.tree.leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def _replica(tensors: dict, like: Replica) -> Replica:
    names = [f"state/{name}" for name, _ in _leaves(like)]
    for name, (_, expected) in zip(names, _leaves(like), strict=True):
        leaf = tensors.get(name)
        if leaf is None or (leaf.shape, leaf.dtype) != (expected.shape, expected.dtype):
            got = "none" if leaf is None else f"{leaf.shape} {leaf.dtype}"
            raise ValueError(
                f"{TENSORS}: {name}: expected {expected.shape} {expected.dtype}, got {got}"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [tensors[name] for name in names])


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
