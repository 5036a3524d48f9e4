"""Text that every Python carries: the sources of its standard library, docstrings included.

A file belongs to the held-out split by a hash of its name below the library's folder, so the split
is the same in every run and on every machine, whatever other files there are.
"""

import dataclasses
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
# Not the library's, or tables that no one wrote.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "encodings"}
)
HELD_OUT_SHARE = 0.05
LARGEST_FILE = 400_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """One file. name: path below its root, with forward slashes. text: its content."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return is_held_out(self.name)


def is_held_out(name: str) -> bool:
    """Whether a file of this name is kept from training: a fixed share, by SHA-256 of the name."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2.0**64


def standard_library() -> list[Document]:
    """Every Python source of the running interpreter's standard library, by name."""
    return read_documents(Path(sysconfig.get_path("stdlib")))


def read_documents(root: str | Path, suffix: str = ".py") -> list[Document]:
    """Text files below a folder, or one file, sorted by name; undecodable files are left out.

    Raises: ValueError if there is none.
    """
    root = Path(root)
    files = [root] if root.is_file() else sorted(root.rglob(f"*{suffix}"))
    documents = []
    for file in files:
        name = file.name if file == root else file.relative_to(root).as_posix()
        if SKIPPED_FOLDERS & set(Path(name).parts[:-1]) or not file.is_file():
            continue
        if not 0 < file.stat().st_size <= LARGEST_FILE:
            continue
        try:
            documents.append(Document(name=name, text=file.read_text("utf-8")))
        except UnicodeDecodeError:
            continue
    if not documents:
        raise ValueError(f"corpus: expected {suffix} files of text below {root}, got none")
    return documents


def train_tokenizer(documents: Iterable[Document], ids: int) -> Tokenizer:
    """A byte-level BPE of `ids` ids, `<|endoftext|>` the last, learned from training files only.

    Raises: ValueError for fewer ids than bytes and the special token need.
    """
    if ids < 257:
        raise ValueError(f"ids: expected at least 257 (every byte and {END_OF_TEXT}), got {ids}")
    tokenizer = Tokenizer(models.BPE())
    # Runs of white space stay whole: indentation is one token, not many.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ids - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        special_tokens=[],
    )
    texts = (document.text for document in documents if not document.held_out)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return tokenizer


def write_tokenizer(folder: str | Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json and its companions. The chat template joins the messages: a base model."""
    folder = Path(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
        },
        "generation_config.json": {"eos_token_id": end, "pad_token_id": end},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[np.ndarray]:
    """Ids of each document as uint16 or int32 arrays, an end of text behind each if there is one.

    Raises: ValueError when all documents are empty.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch_fast(
        [document.text for document in documents], add_special_tokens=False
    )
    tail = [] if end is None else [end]
    rows = [np.array(item.ids + tail, np.int32) for item in encoded]
    if not sum(len(row) for row in rows):
        raise ValueError("corpus: expected text, got empty documents")
    return rows


def stream(rows: Sequence[np.ndarray]) -> np.ndarray:
    """All documents behind one another, [tokens] int32."""
    return np.concatenate(rows).astype(np.int32)


def random_windows(tokens: np.ndarray, count: int, length: int, seed: int) -> np.ndarray:
    """[count, length] int32 stretches of a stream, at random places.

    Raises: ValueError if the stream is shorter than a stretch.
    """
    if len(tokens) < length:
        raise ValueError(f"corpus: expected at least {length} tokens, got {len(tokens)}")
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length + 1, count)
    return tokens[starts[:, None] + np.arange(length)]


def prompts_by_file(
    rows: Sequence[np.ndarray], count: int, length: int, seed: int
) -> list[list[int]]:
    """`count` prompts of `length` ids, spread over the documents that are long enough.

    Raises: ValueError if no document is.
    """
    long = [row for row in rows if len(row) > length]
    if not long:
        raise ValueError(f"prompts: expected a document of more than {length} tokens, got none")
    rng = np.random.default_rng(seed)
    chosen = [long[i % len(long)] for i in range(count)]
    starts = [int(rng.integers(0, len(row) - length)) for row in chosen]
    return [row[s : s + length].tolist() for row, s in zip(chosen, starts, strict=True)]
