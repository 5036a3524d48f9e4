"""What a command line that names no target means: the shipped pair and a built-in prompt."""

import argparse
from collections.abc import Callable
from pathlib import Path

from dflash_jax.assets import DRAFTS, tiny_pair_path

NO_DRAFT = "none"
NEW_TOKENS = 160
# About as many tokens a round as held-out text has on average.
PROMPT = '''class Parser:
    """Parse a sequence of tokens into a tree."""

    def __init__(self, tokens):
        self.tokens = tokens

    def
'''


def with_defaults(
    arguments: argparse.Namespace, fail: Callable[[str], None]
) -> argparse.Namespace:
    """The arguments of ``generate`` with every choice made.

    Without ``--target`` they get the shipped target, its DFlash2 draft (``--draft`` may name one of
    `DRAFTS`, ``none``, or a folder), float32, the built-in prompt unless one is given, a budget,
    and the comparison with plain decoding. With it, only the defaults of every run.

    Args:
      fail: called with a message when an argument is missing; does not return.
    """
    shipped = arguments.target is None
    values = dict(vars(arguments), built_in=False)
    if shipped:
        values |= _shipped(arguments)
    else:
        if arguments.prompt is None and arguments.prompt_ids is None:
            fail("one of the arguments --prompt --prompt-ids is required with --target")
        if arguments.max_new_tokens is None:
            fail("the argument --max-new-tokens is required with --target")
        values["draft"] = None if arguments.draft is None else Path(arguments.draft)
    chosen = arguments.dtype or ("float32" if shipped else "bfloat16")
    if arguments.compare is None:
        values["compare"] = shipped and values["draft"] is not None and not arguments.quiet
    return argparse.Namespace(**values | {"dtype": chosen})


def _shipped(arguments: argparse.Namespace) -> dict:
    """What the shipped pair decides: the fields that differ from `arguments`."""
    draft = arguments.draft or DRAFTS[0]
    if draft in DRAFTS:
        folder = tiny_pair_path(draft)
    else:
        folder = None if draft == NO_DRAFT else Path(draft)
    values = {"target": tiny_pair_path("target"), "draft": folder}
    if arguments.max_new_tokens is None:
        values["max_new_tokens"] = NEW_TOKENS
    if arguments.prompt_ids is None:
        built_in = arguments.prompt is None
        values |= {"prompt": PROMPT if built_in else arguments.prompt, "built_in": built_in}
        values["raw"] = True  # it continues text and knows no messages
    return values
