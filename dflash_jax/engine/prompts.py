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
