"""The forms in which a caller may give a prompt."""

from collections.abc import Iterable, Sequence

from dflash_jax.engine.checks import is_integer
from dflash_jax.engine.text import TextTokenizer

Prompt = str | Sequence[int] | Sequence[dict]


def prompt_ids(prompt: Prompt, tokenizer: TextTokenizer | None) -> tuple[int, ...]:
    """Token ids of a prompt: ids, text, or messages for the tokenizer's chat template.

    Raises: ValueError for text or messages without a tokenizer, or what it refuses.
    """
    items = prompt if isinstance(prompt, str) else tuple(prompt)
    if not isinstance(prompt, str) and not any(isinstance(item, dict) for item in items):
        return plain_ids(items)
    if tokenizer is None:
        raise ValueError("prompt: expected token ids without a tokenizer, got text")
    return tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(items))


def plain_ids(ids: Iterable) -> tuple:
    """The same with NumPy integers as Python's; what is no integer stays, to be refused by name."""
    return tuple(int(token) if is_integer(token) else token for token in ids)


def plain_stops(options: dict) -> dict:
    """The same options, with stop strings and sequences as the tuples that a request holds."""
    options = dict(options)
    if "stop_strings" in options:
        given = options["stop_strings"]
        options["stop_strings"] = (given,) if isinstance(given, str) else tuple(given)
    if "stop_sequences" in options:
        options["stop_sequences"] = tuple(map(plain_ids, options["stop_sequences"]))
    return options
