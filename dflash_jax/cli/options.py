"""The options of ``dflash-jax generate``, and which of them mean something together."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from dflash_jax import chat
from dflash_jax.assets import DRAFTS
from dflash_jax.cli import inspect
from dflash_jax.cli.plot import check_plot
from dflash_jax.cli.shipped import NEW_TOKENS, NO_DRAFT
from dflash_jax.config import DtypePolicy
from dflash_jax.sampling.presets import PRESETS

PROGRAM = "dflash-jax"
DTYPES = {"bfloat16": DtypePolicy(), "float32": DtypePolicy.exact()}
DEFAULT_CONTEXT = 2048
NUMBER = re.compile("[0-9]{1,18}")
SAMPLING_OPTIONS = {
    "temperature": float, "top_k": int, "top_p": float, "min_p": float,
    "presence_penalty": float, "frequency_penalty": float, "repetition_penalty": float,
    "seed": int,
}


def build_parser() -> argparse.ArgumentParser:
    """The options; a wrong one is reported in one line, with status 2."""
    parser = _Parser(prog=PROGRAM, description="DFlash speculative decoding.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    command = commands.add_parser("generate", help="continue a prompt and stream the result")
    add = command.add_argument
    add("--target", type=Path, help="folder of the target; default: the shipped tiny one")
    add(
        "--draft", metavar=f"FOLDER|{'|'.join(DRAFTS)}|{NO_DRAFT}",
        help="folder of the draft, without one plain decoding; or, for the shipped target, one of "
        f"its drafts by name, {DRAFTS[0]} by default, or {NO_DRAFT}",
    )
    prompt = command.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text of the user's message")
    prompt.add_argument(
        "--prompt-ids",
        type=Path,
        metavar="FILE",
        help="token ids: a JSON list, a JSON list of lists (a batch), or plain numbers",
    )
    add("--raw", action="store_true", help="continue --prompt itself, without a chat template")
    add("--draft-tokens", type=int, metavar="K", help="proposals a round; default block_size - 1")
    add(
        "--draft-tree-nodes", type=_tree_nodes, metavar="N[,N...]|auto",
        help="columns of a tree round, K + 2..32, by number of live rows, 0 for a chain; or auto",
    )
    add("--draft-tree-paths", type=int, metavar="N", help="leaves of a tree, 2..8; default 8")
    add("--max-new-tokens", type=int, metavar="N", help="outputs a row, at most; needs a value "
        f"for every target but the shipped one ({NEW_TOKENS})")
    positions = f"positions a row; default {DEFAULT_CONTEXT}, or fewer if the models have fewer"
    add("--max-context", type=int, metavar="N", help=positions)
    add("--dtype", choices=sorted(DTYPES),
        help="float32 is for exactness, and for the shipped target; bfloat16 for every other")
    add("--causal", choices=("true", "false"), help="override the draft layers' causality")
    add("--proposal-head", choices=("full", "indexed"), help="propose from all rows, the default, "
        "or from those of the draft's proposal_head.safetensors")
    add("--public-vocab", type=int, metavar="N", help="ids that may be emitted")
    add("--ignore-eos", action="store_true", help="run on to --max-new-tokens")
    add(
        "--preset",
        choices=[*PRESETS, "folder"],
        help="sampling controls by name, or those of the target's folder; default greedy",
    )
    for option, kind in SAMPLING_OPTIONS.items():
        add(f"--{option.replace('_', '-')}", type=kind, help=f"overrides the preset's {option}")
    _add_output_options(add)
    chat.add_command(commands)
    inspect.add_command(commands)
    return parser


def _add_output_options(add: Callable[..., object]) -> None:
    add("--compare", action=argparse.BooleanOptionalAction,
        help="decode again without the draft; by default only with the shipped target")
    add("--show-accepted", action="store_true", help="mark text of accepted proposals")
    add("--color", choices=("auto", "always", "never"),
        help="of these marks; auto, the default, has colour on a terminal and {+marks+} elsewhere")
    add("--plot", type=Path, metavar="FILE",
        help="write a picture of acceptance by position and tokens a round (needs matplotlib)")
    add("--quiet", action="store_true", help="print neither geometry nor statistics")


def check_options(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that mean nothing here."""
    for option in ("draft_tokens", "causal", "draft_tree_nodes", "draft_tree_paths", "plot",
                   "compare", "show_accepted", "proposal_head"):
        if arguments.draft is None and getattr(arguments, option) not in (None, False):
            raise ValueError(f"--{option.replace('_', '-')}: expected only with --draft")
    for option in ("raw", "show_accepted"):
        if getattr(arguments, option) and arguments.prompt is None:
            raise ValueError(f"--{option.replace('_', '-')}: expected only with --prompt")
    if arguments.color is not None and not arguments.show_accepted:
        raise ValueError("--color: expected only with --show-accepted")
    if arguments.compare and arguments.quiet:
        raise ValueError("--compare: expected without --quiet, which hides it")
    if arguments.plot is not None:
        check_plot(arguments.plot)


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{PROGRAM}: error: {message}\n")


def _tree_nodes(text: str) -> tuple[int, ...] | str:
    parts = text.split(",")
    if text != "auto" and not all(NUMBER.fullmatch(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected auto, or numbers separated by commas, got {text!r}"
        )
    return text if text == "auto" else tuple(map(int, parts))
