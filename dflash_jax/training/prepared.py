"""A corpus ready for training: tokenizer, training tokens, held-out documents; kept in a folder."""

import dataclasses
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dflash_jax.training.corpus import Document, encode, stream, train_tokenizer
from dflash_jax.training.results import replacing, seal, unseal

TOKENIZER, TOKENS = "tokenizer.json", "tokens.npz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Fields:
      tokenizer: of all ids.
      train: [tokens] int32, the training documents behind one another.
      held_out: ids of each held-out document.
      facts: files, bytes and tokens by split, and the Python they come from.
    """

    tokenizer: Tokenizer
    train: np.ndarray
    held_out: list[np.ndarray]
    facts: dict


def target_tokenizer(folder: Path, public_vocab: int) -> Tokenizer:
    """The tokenizer of a target's folder.

    Raises: ValueError if there is none, or if it has ids that the target may not emit.
    """
    file = folder / TOKENIZER
    if not file.is_file():
        raise ValueError(f"tokenizer: expected {file}, got no such file")
    tokenizer = Tokenizer.from_file(str(file))
    ids = tokenizer.get_vocab_size()
    if ids > public_vocab:
        raise ValueError(f"vocabulary: expected a tokenizer of at most {public_vocab} ids, as the "
                         f"target has, got {ids} in {file}")
    return tokenizer


def prepare(documents: Sequence[Document], tokenizer: Tokenizer | int) -> Prepared:
    """Splits and encodes documents.

    Args:
      tokenizer: a target's, or the number of ids of a new one learned from the training split.
    Raises: ValueError if a split is empty.
    """
    splits = {
        "train": [document for document in documents if not document.held_out],
        "held_out": [document for document in documents if document.held_out],
    }
    for name, part in splits.items():
        if not part:
            raise ValueError(f"corpus: expected files in the {name} split, got none of "
                             f"{len(documents)}")
    if isinstance(tokenizer, int):
        tokenizer = train_tokenizer(splits["train"], tokenizer)
    rows = {name: encode(tokenizer, part) for name, part in splits.items()}
    facts = {"python": platform.python_version(), "ids": tokenizer.get_vocab_size()}
    for name, part in splits.items():
        facts[name] = {
            "files": len(part),
            "bytes": sum(len(document.text.encode()) for document in part),
            "tokens": sum(len(row) for row in rows[name]),
        }
    return Prepared(
        tokenizer=tokenizer, train=stream(rows["train"]), held_out=rows["held_out"], facts=facts
    )


def save_prepared(folder: str | Path, prepared: Prepared) -> None:
    """Writes a folder that `load_prepared` reads."""
    held_out = stream(prepared.held_out)
    lengths = np.array([len(row) for row in prepared.held_out], np.int32)
    small = np.uint16 if prepared.facts["ids"] <= 1 << 16 else np.int32
    with replacing(folder, need_bytes=4 * (len(prepared.train) + len(held_out))) as partial:
        prepared.tokenizer.save(str(partial / TOKENIZER))
        np.savez_compressed(
            partial / TOKENS, train=prepared.train.astype(small),
            held_out=held_out.astype(small), lengths=lengths,
        )
        seal(partial, prepared.facts)


def load_prepared(folder: str | Path) -> Prepared:
    """Reads what `save_prepared` wrote.

    Raises: ValueError naming a file that is missing or damaged.
    """
    folder = Path(folder)
    facts = unseal(folder)
    with np.load(folder / TOKENS, allow_pickle=False) as stored:
        train, held_out = (stored[name].astype(np.int32) for name in ("train", "held_out"))
        ends = np.cumsum(stored["lengths"])[:-1]
    return Prepared(
        tokenizer=Tokenizer.from_file(str(folder / TOKENIZER)), train=train,
        held_out=np.split(held_out, ends), facts=facts,
    )
