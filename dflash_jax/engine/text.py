"""Text in and out of a Hugging Face folder: tokenizer, chat template, streaming, EOS ids.

Reads `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json` and
`config.json`; nothing is downloaded and no code of the folder is run outside a sandbox.
"""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextTokenizer:
    """Token ids of text, and back, as a folder's files define them.

    Attributes:
      vocab_size: number of ids the tokenizer owns, added tokens included.
      chat_template: Jinja source, or None.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, settings: dict, chat_template: str | None):
        self._tokenizer = tokenizer
        self._settings = settings
        self.chat_template = chat_template

    @classmethod
    def load(cls, folder) -> "TextTokenizer":
        """Reads a folder.

        Raises:
          ValueError: there is no `tokenizer.json`, or a file is not what it should be.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"tokenizer: expected {file}, got no such file")
        tokenizer = tokenizers.Tokenizer.from_str(file.read_text("utf-8"))
        settings = _read_json(folder / "tokenizer_config.json")
        return cls(tokenizer, settings, _chat_template(folder, settings))

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in the text are recognised."""
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
          ValueError: no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("chat_template: expected one in the folder, got none")
        specials = {
            name: _token_text(self._settings[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if self._settings.get(name) is not None
        }
        try:
            template = _environment().from_string(self.chat_template)
            text = template.render(
                messages=list(messages), add_generation_prompt=True, **specials, **variables
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat_template: {error}") from error
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


def eos_ids(folder) -> frozenset[int]:
    """Ids that end a text: of `generation_config.json`, else of `config.json` or its text part.

    Returns an empty set when no file names one.
    """
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    for source in (generation, config, config.get("text_config") or {}):
        ids = source.get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def _read_json(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file.name}: expected JSON, got {error}") from error


def _chat_template(folder: Path, settings: dict) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template


def _token_text(token) -> str:
    return token["content"] if isinstance(token, dict) else token


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
