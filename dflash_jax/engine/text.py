"""Text in and out of a Hugging Face folder: tokenizer, chat template, streaming, EOS ids.

Reads `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json` and
`config.json`; nothing is downloaded and no code of the folder is run outside a sandbox.
"""

import contextlib
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from dflash_jax.config.folder import read_json, read_text
from dflash_jax.config.rules import MAX_INT, is_int

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextTokenizer:
    """Token ids of text, and back, as a folder's files define them.

    Attributes:
      vocab_size: number of ids the tokenizer owns, added tokens included.
      chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        specials: Mapping[str, str],
        chat_template: str | None,
    ):
        self._tokenizer = tokenizer
        self._specials = dict(specials)  # names out of `SPECIALS` that a template may read
        self.chat_template = chat_template

    @classmethod
    def load(cls, folder) -> "TextTokenizer":
        """Reads a folder.

        Raises:
          ValueError: there is no such folder or no `tokenizer.json` in it, or a file is not what it
            should be; names the file and the field.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not folder.is_dir():
            raise ValueError(f"target: expected a folder, got {folder}, which is none")
        if not file.is_file():
            raise ValueError(f"tokenizer: expected {file}, got no such file")
        text = read_text(file)
        with _failures_of("tokenizer.json: expected a tokenizer"):
            tokenizer = tokenizers.Tokenizer.from_str(text)
        settings = _optional_json(folder / "tokenizer_config.json")
        specials = {
            name: _token_text(name, settings[name])
            for name in SPECIALS
            if settings.get(name) is not None
        }
        return cls(tokenizer, specials, _chat_template(folder, settings))

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in the text are recognised.

        Raises:
          ValueError: the text holds half a surrogate pair, or the tokenizer has no id for it.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            got = f"{text[error.start]!a} at character {error.start}"
            raise ValueError(f"prompt: expected text that UTF-8 can hold, got {got}") from error
        with _failures_of("tokenizer.json: expected ids for every prompt"):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[dict], **variables) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Args:
          messages: dicts with `role` and `content`.
          variables: further names the template reads, e.g. `enable_thinking=False`.
        Raises:
          ValueError: no template, or the template refuses the messages or fails on them.
        """
        if self.chat_template is None:
            raise ValueError("chat_template: expected one in the folder, got none")
        names = {**self._specials, **variables, "messages": list(messages)}
        names["add_generation_prompt"] = True
        with _failures_of("chat_template: expected one that renders"):
            text = _environment().from_string(self.chat_template).render(names)
        return self.encode(text, add_special_tokens=False)


class TextStream:
    """Turns arriving token ids into pieces of text that join to the whole text.

    A piece is held back while the bytes so far end inside a character. Decoding restarts at the
    last boundary, with the ids of the previous piece before it, because a tokenizer may write an
    id differently at the start of a text.
    """

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # first id of the previous piece
        self._shown = 0  # ids whose text has been returned

    def push(self, ids: Sequence[int]) -> str:
        """Takes new ids; returns the text that is complete now, perhaps none."""
        self._ids.extend(ids)
        piece = self._piece()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return piece

    def finish(self) -> str:
        """Returns what is held back; an unfinished character comes out as U+FFFD."""
        piece = self._piece()
        self._context = self._shown = len(self._ids)
        return piece

    def _piece(self) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        return self._tokenizer.decode(self._ids[self._context :])[len(before) :]


def eos_ids(folder, *, vocab_rows: int | None = None) -> frozenset[int]:
    """Ids that end a text: of `generation_config.json`, else of `config.json` or its text part.

    Args:
      folder: a Hugging Face model folder.
      vocab_rows: V, to check that the ids are rows of the vocabulary.
    Returns:
      The ids; an empty set when no file names one.
    Raises:
      ValueError: a file is no JSON object, or names something else than ids; names file and field.
    """
    folder = Path(folder)
    generation = _optional_json(folder / "generation_config.json")
    config = _optional_json(folder / "config.json")
    text = config.get("text_config")
    if not isinstance(text, dict | None):
        raise ValueError(f"config.json: text_config: expected an object, got {text!r}")
    for place, section in (
        ("generation_config.json: eos_token_id", generation),
        ("config.json: eos_token_id", config),
        ("config.json: text_config.eos_token_id", text or {}),
    ):
        stated = section.get("eos_token_id")
        if stated is not None:
            return _ids(place, stated, MAX_INT if vocab_rows is None else vocab_rows)
    return frozenset()


def _ids(place: str, stated: object, bound: int) -> frozenset[int]:
    ids = stated if isinstance(stated, list) else [stated]
    if not all(is_int(token) and 0 <= token < bound for token in ids):
        raise ValueError(f"{place}: expected an id in [0, {bound}) or a list, got {stated!r}")
    return frozenset(ids)


@contextlib.contextmanager
def _failures_of(expectation: str) -> Iterator[None]:
    """Re-raises whatever a caller's file makes a library raise as a ValueError that says so.

    A chat template is a program of the caller and may fail in any way; `tokenizers` raises plain
    `Exception`. Wraps calls into those two alone.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{expectation}, got {type(error).__name__}: {error}") from error


def _optional_json(file: Path) -> dict:
    return read_json(file) if file.is_file() else {}


def _chat_template(folder: Path, settings: dict) -> str | None:
    """Source of the template; of several by name, the one named "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    stated = settings.get("chat_template")
    if isinstance(stated, str | None):
        return stated
    if not isinstance(stated, list) or not all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in stated
    ):
        expected = "chat_template: expected a string or a list of objects with name and template"
        raise ValueError(f"tokenizer_config.json: {expected}, got {stated!r}")
    return {entry["name"]: entry["template"] for entry in stated}.get("default")


def _token_text(name: str, token: object) -> str:
    """A special token's text: a string, or an object that holds it as `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        expected = "a string or an object with content"
        raise ValueError(f"tokenizer_config.json: {name}: expected {expected}, got {token!r}")
    return text


def _environment() -> jinja2.Environment:
    """The sandbox chat templates are written for: trimmed blocks and four helpers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)
