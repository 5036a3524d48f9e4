"""The forms in which a caller may give a request, made plain; a wrong one is refused by name."""

from collections.abc import Collection, Sequence

from dflash_jax.engine.checks import is_integer, listed, plain_ids
from dflash_jax.engine.text import TextTokenizer

Prompt = str | Sequence[int] | Sequence[dict]
# What a copy of a request may have otherwise than the original.
CHANGES = (
    "max_new_tokens", "eos_ids", "stop_strings", "stop_sequences", "sampling", "on_tokens",
)


def prompt_ids(prompt: Prompt, tokenizer: TextTokenizer | None) -> tuple[int, ...]:
    """Token ids of a prompt: ids, text, or messages for the tokenizer's chat template.

    Raises: ValueError for anything else, text or messages without a tokenizer, or what it refuses.
    """
    items = prompt
    if not isinstance(prompt, str):
        items = listed("prompt", "token ids or messages, or text", prompt)
        if not any(isinstance(item, dict) for item in items):
            return plain_ids("prompt", items)
    if tokenizer is None:
        raise ValueError("prompt: expected token ids without a tokenizer, got text")
    return tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(items))


def plain_options(options: dict, eos_ids: Collection[int]) -> dict:
    """The same options in the types that a `Request` holds.

    Args:
      options: some of `CHANGES`.
      eos_ids: those of a request that gives None.
    Raises: ValueError for another option, or one that holds something else than its name says; ids
      and numbers themselves are checked with the whole request.
    """
    unknown = sorted(options.keys() - set(CHANGES))
    if unknown:
        raise ValueError(f"changes: expected some of {', '.join(CHANGES)}, got {unknown}")
    plain = dict(options)
    if "max_new_tokens" in options and is_integer(options["max_new_tokens"]):
        plain["max_new_tokens"] = int(options["max_new_tokens"])
    if "eos_ids" in options:
        given = options["eos_ids"]
        plain["eos_ids"] = eos_ids if given is None else _id_set(given)
    if "stop_strings" in options:
        plain["stop_strings"] = listed("stop_strings", "strings", options["stop_strings"])
    if "stop_sequences" in options:
        given = listed("stop_sequences", "lists of token ids", options["stop_sequences"])
        plain["stop_sequences"] = tuple(
            plain_ids(f"stop_sequences[{place}]", ids) for place, ids in enumerate(given)
        )
    return plain


def _id_set(given) -> frozenset:
    ids = plain_ids("eos_ids", given)
    for token in ids:
        if not is_integer(token):
            raise ValueError(f"eos_ids: expected token ids, got {token!r}")
    return frozenset(ids)
