"""``dflash-jax chat``: a conversation in the terminal, on the shipped pair or on given weights.

Answers go to standard output as they are committed; prompts, progress and statistics go to standard
error. Each turn starts from the state that the one before left, as far as their tokens agree.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from dflash_jax.assets import DRAFTS, tiny_pair_path
from dflash_jax.config import DtypePolicy, RunConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.generate import run_draft_tokens
from dflash_jax.engine.request import FinishReason, Request
from dflash_jax.engine.text import TextTokenizer, eos_ids
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params
from dflash_jax.weights import load_draft, load_target

HELP = "/new forgets the conversation, /quit leaves; Ctrl-C ends an answer"
CONTEXT = 2048
SLOTS = 4  # the conversation's, and three for checkpoints
BAR = 30


def add_command(commands) -> None:
    """Registers the command with an argparse subparsers object."""
    command = commands.add_parser("chat", help="talk to a model in the terminal")
    add = command.add_argument
    add("--target", type=Path, help="folder of the target; default the shipped pair")
    add("--draft", type=Path, help="folder of the draft")
    add("--raw", action="store_true", help="continue what is typed, without a chat template")
    add("--system", help="text of a system message")
    add("--draft-tokens", type=int, metavar="K", help="proposals a round")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="tokens of an answer, at most")
    positions = f"positions of a conversation; default {CONTEXT}, or fewer if the models have fewer"
    add("--max-context", type=int, metavar="N", help=positions)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    for name, kind in (("temperature", float), ("top-k", int), ("top-p", float), ("seed", int)):
        add(f"--{name}", type=kind, help="of the sampler; default greedy")
    add("--quiet", action="store_true", help="print neither progress nor statistics")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 2 for a fault of the caller."""
    try:
        engine = load_engine(arguments)
        chat = Chat(engine, arguments)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"dflash-jax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if not arguments.quiet:
        print(HELP, file=sys.stderr)
    chat.talk(_lines(arguments.quiet))
    return 0


def load_engine(arguments: argparse.Namespace) -> Engine:
    """One row with the weights that the arguments name.

    Raises:
      ValueError, OSError, NotImplementedError: a fault of the caller, or an unsupported model.
    """
    if arguments.max_new_tokens < 1:
        raise ValueError(
            f"--max-new-tokens: expected at least 1, got {arguments.max_new_tokens}"
        )
    folders = (arguments.target, arguments.draft)
    if arguments.target is None:
        if arguments.draft is not None:
            raise ValueError("--draft: expected only with --target")
        folders = (tiny_pair_path("target"), tiny_pair_path(DRAFTS[0]))
    policy = DtypePolicy.exact() if arguments.dtype == "float32" else DtypePolicy()
    tokenizer = TextTokenizer.load(folders[0])
    target, target_params = load_target(folders[0], policy)
    draft, draft_params = None, {}
    if folders[1] is not None:
        draft, draft_params = load_draft(folders[1], target, policy)
    limit = min(model.max_positions for model in (target, draft) if model is not None)
    choices = RunConfig(
        draft_tokens=run_draft_tokens(draft, arguments.draft_tokens), batch=1, slots=SLOTS,
        max_context=min(CONTEXT, limit) if arguments.max_context is None
        else arguments.max_context, dtypes=policy,
    )
    return Engine(
        Models(target=target, draft=draft, run=choices),
        Params(target=target_params, draft=draft_params),
        tokenizer=tokenizer,
        eos_ids=eos_ids(folders[0], vocab_rows=target.vocab_rows),
    )


class Chat:
    """A conversation: messages for the chat template, or ids that are simply continued."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace):
        """Raises ValueError for controls that cannot be, or a template that is missing."""
        self._engine, self._options = engine, arguments
        if not arguments.raw and engine.tokenizer.chat_template is None:
            raise ValueError("chat_template: expected one in the target's folder; use --raw")
        if arguments.raw and arguments.system is not None:
            raise ValueError("--system: expected only without --raw")
        given = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p",
                                                             "seed")}
        self._sampling = SamplingParams(**{n: x for n, x in given.items() if x is not None})
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation."""
        system = self._options.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._ids: list[int] = []

    def talk(self, lines: Iterable[str]) -> None:
        """Answers lines until there are none, or one says /quit."""
        for line in lines:
            if line == "/quit":
                return
            if line == "/new":
                self.reset()
            elif line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        tokenizer = self._engine.tokenizer
        messages = self._messages
        if not self._options.raw:
            messages = [*messages, {"role": "user", "content": line}]
        try:
            prompt = [*self._ids, *tokenizer.encode(line)] if self._options.raw else messages
            request = self._engine.submit(
                prompt, max_new_tokens=self._options.max_new_tokens, sampling=self._sampling
            )
        except ValueError as error:  # too long by now, or no text that the tokenizer takes
            print(f"dflash-jax: {error}; /new starts over", file=sys.stderr)
            return
        self._answer(request)
        self._ids = request.ledger
        self._messages = [*messages, {"role": "assistant", "content": request.text}]
        if request.finish_reason is FinishReason.FAULT:
            print("dflash-jax: ended early, no finite logit", file=sys.stderr)
        if not self._options.quiet:
            print(report(request), file=sys.stderr)

    def _answer(self, request: Request) -> None:
        """Prints an answer as it comes; an interrupt ends it."""
        bar = progress_bar(len(request.prompt)) if not self._options.quiet else None
        shown = 0
        try:
            while True:
                if bar is not None and not request.tokens:
                    bar(self._engine.read(request))
                for piece in request.pieces[shown:]:
                    print(piece.text, end="", flush=True)
                shown = len(request.pieces)
                if request.finish_reason is not None:
                    break
                self._engine.step()
        except KeyboardInterrupt:
            self._engine.cancel(request)
        print(flush=True)


def progress_bar(total: int, stream=None) -> Callable[[int], None]:
    """A bar for a prompt of so many tokens, drawn over itself; it is gone when the prompt is read.

    Nothing is drawn where no terminal shows it, or for a prompt that takes one call.
    """
    stream = sys.stderr if stream is None else stream
    width = len(f"prompt [{'#' * BAR}] {total}/{total}")

    def draw(done: int) -> None:
        if not stream.isatty() or done == 0:
            return
        if done >= total:
            stream.write("\r" + " " * width + "\r")
        else:
            filled = BAR * done // total
            stream.write(f"\rprompt [{'#' * filled}{'.' * (BAR - filled)}] {done}/{total}")
        stream.flush()

    return draw


def report(request: Request) -> str:
    """Statistics of a turn in one line."""
    counted = request.statistics
    return (
        f"[prompt {counted.prompt_tokens} tokens, {counted.reused_tokens} reused, "
        f"{counted.prefill_seconds:.2f} s; answer {counted.new_tokens} tokens, "
        f"{counted.tokens_per_second:.1f} tokens/s; {counted.tokens_per_round:.2f} tokens a round, "
        f"accepted {counted.accepted} of {counted.drafted}; {request.finish_reason}]"
    )


def _lines(quiet: bool) -> Iterable[str]:
    """Lines of standard input, with a prompt where a terminal shows it."""
    while True:
        if not quiet and sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            return
        if not line:
            return
        yield line.rstrip("\n")
