"""Command line: ``dflash-jax generate | chat | inspect`` or ``python -m dflash_jax ...``.

Without a target it decodes a built-in prompt with the shipped pair (``cli/shipped.py``). New text
(or token ids) goes to standard output as it is committed, everything else to standard error. A
caller's fault is one line on standard error and exit status 2.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import logging
import os
import sys
from collections.abc import Sequence

from dflash_jax import chat
from dflash_jax.cli import inspect
from dflash_jax.cli.options import (
    DEFAULT_CONTEXT,
    DTYPES,
    NUMBER,
    PROGRAM,
    SAMPLING_OPTIONS,
    build_parser,
    check_options,
)
from dflash_jax.cli.plot import write_plot
from dflash_jax.cli.printing import (
    IdPrinter,
    RoundRecorder,
    TextPrinter,
    comparison,
    marks_for,
    report,
)
from dflash_jax.cli.shipped import with_defaults
from dflash_jax.config import DraftConfig, RunConfig, TargetConfig, describe
from dflash_jax.config.folder import read_text
from dflash_jax.engine.checks import check_prompts, is_integer
from dflash_jax.engine.generate import check_widths, generate, run_draft_tokens
from dflash_jax.engine.request import FinishReason, OnTokens, Output, total_statistics
from dflash_jax.engine.text import TextTokenizer, eos_ids
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.sampling.presets import PRESETS, read_generation_config
from dflash_jax.steps import Models, Params
from dflash_jax.weights import (
    load_draft,
    load_target,
    read_draft_config,
    read_target_config,
    use_proposal_head,
)
from dflash_jax.weights.proposal_head import read_proposal_head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One checked call of ``generate``. ``tokenizer`` is None when ids are printed."""

    models: Models
    params: Params
    prompts: list[list[int]]
    max_new_tokens: int
    eos_ids: frozenset[int]
    sampling: SamplingParams
    tree_nodes: tuple[int, ...] | str | None
    tokenizer: TextTokenizer | None

    def generate(self, on_tokens: OnTokens) -> list[Output]:
        return generate(
            self.models, self.params, self.prompts, max_new_tokens=self.max_new_tokens,
            eos_ids=self.eos_ids, sampling=self.sampling, tree_nodes=self.tree_nodes,
            on_tokens=on_tokens,
        )

    def plain(self) -> "Job":
        """The same without a draft."""
        run = dataclasses.replace(self.models.run, draft_tokens=0, tree_nodes=0)
        return dataclasses.replace(
            self, models=Models(target=self.models.target, draft=None, run=run),
            params=Params(target=self.params.target, draft={}), tree_nodes=None,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 2 a caller's fault, 1 a faulty row.

    130 after an interrupt from the keyboard, 1 when nobody reads the output any more. Text that the
    output's encoding lacks appears as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes once more at its end: into nothing, then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "chat":
        return chat.run(arguments)
    if arguments.command == "inspect":
        return inspect.run(arguments)
    arguments = with_defaults(arguments, parser.error)
    try:
        job = prepare(arguments)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if not arguments.quiet:
        print(describe(job.models.target, job.models.draft, job.models.run), file=sys.stderr)
        if arguments.built_in:
            print(f"prompt, built in:\n{arguments.prompt}", file=sys.stderr)
    outputs, recorder = _decode(arguments, job)
    if not arguments.quiet:
        print(report(outputs), file=sys.stderr)
    if arguments.compare:
        print("the same again without the draft ...", file=sys.stderr)
        plain = job.plain().generate(lambda row, tokens: None)
        sampled = job.sampling.temperature > 0
        print(comparison(outputs, plain, sampled=sampled), file=sys.stderr)
    status = _faults(outputs)
    if arguments.plot is not None:
        status = max(status, _plot(arguments, outputs, recorder))
    return status


def _decode(arguments: argparse.Namespace, job: Job) -> tuple[list[Output], RoundRecorder]:
    """Generates, and streams what comes."""
    recorder = RoundRecorder()
    if job.tokenizer:
        marks = marks_for(arguments.color) if arguments.show_accepted else None
        printer = TextPrinter(job.tokenizer, marks)
    else:
        printer = IdPrinter(len(job.prompts))

    def show(row: int, tokens: list[int]) -> None:
        recorder.show(row, tokens)
        printer.show(row, tokens)

    outputs = job.generate(show)
    printer.finish()
    return outputs, recorder


def _faults(outputs: Sequence[Output]) -> int:
    """Reports rows that broke; the exit status."""
    reasons = [output.finish_reason for output in outputs]
    for row, reason in enumerate(reasons):
        if reason == FinishReason.FAULT:
            print(f"{PROGRAM}: row {row}: ended early, no finite logit", file=sys.stderr)
    return 1 if FinishReason.FAULT in reasons else 0


def _plot(arguments: argparse.Namespace, outputs, recorder: RoundRecorder) -> int:
    """Writes the picture; the exit status."""
    total = total_statistics([output.statistics for output in outputs])
    try:
        write_plot(arguments.plot, total, recorder.rounds, f"draft {arguments.draft.name}")
    except OSError as error:
        print(f"{PROGRAM}: error: --plot: {error}", file=sys.stderr)
        return 2
    return 0


def prepare(arguments: argparse.Namespace) -> Job:
    """Reads prompts and weights and checks everything that can be checked before generating.

    Raises:
      ValueError, OSError, NotImplementedError: a fault of the caller, or an unsupported model.
    """
    check_options(arguments)
    tokenizer, prompts = None, None
    if arguments.prompt is None:
        prompts = parse_prompt_ids(read_text(arguments.prompt_ids))
    else:
        tokenizer = TextTokenizer.load(arguments.target)
        prompts = [_encode(tokenizer, arguments.prompt, arguments.raw)]
    sampling = _sampling(arguments)
    stops = _check(arguments, prompts)
    with _decisions_shown(arguments.quiet):
        models, params = _load(arguments, len(prompts))
    return Job(
        models=models,
        params=params,
        prompts=prompts,
        max_new_tokens=arguments.max_new_tokens,
        eos_ids=stops,
        sampling=sampling,
        tree_nodes=arguments.draft_tree_nodes,
        tokenizer=tokenizer,
    )


def parse_prompt_ids(text: str) -> list[list[int]]:
    """Rows of token ids from JSON (a list, or a list of lists) or from plain numbers.

    Raises:
      ValueError: anything else, or no ids.
    """
    if text.lstrip().startswith("["):
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"--prompt-ids: expected JSON, got {error}") from error
        rows = value if value and all(isinstance(row, list) for row in value) else [value]
    else:
        words = text.replace(",", " ").split()
        rows = [[int(word) if NUMBER.fullmatch(word) else word for word in words]]
    if not all(rows):
        raise ValueError("--prompt-ids: expected token ids, got an empty list")
    for token in itertools.chain.from_iterable(rows):
        if not is_integer(token):
            raise ValueError(f"--prompt-ids: expected integers or lists of them, got {token!r:.40}")
    return rows


def _encode(tokenizer: TextTokenizer, prompt: str, raw: bool) -> list[int]:
    if raw:
        return tokenizer.encode(prompt)
    if tokenizer.chat_template is None:
        raise ValueError("chat_template: expected one in the target's folder, got none; use --raw")
    return tokenizer.chat([{"role": "user", "content": prompt}])


def _models(
    arguments: argparse.Namespace, target: TargetConfig, draft: DraftConfig | None, batch: int
) -> Models:
    limit = min(model.max_positions for model in (target, draft) if model is not None)
    context = arguments.max_context
    paths = arguments.draft_tree_paths
    if paths is not None and arguments.draft_tree_nodes is None:
        raise ValueError("--draft-tree-paths: expected only with --draft-tree-nodes")
    run = RunConfig(
        draft_tokens=run_draft_tokens(draft, arguments.draft_tokens),
        batch=batch,
        max_context=min(DEFAULT_CONTEXT, limit) if context is None else context,
        dtypes=DTYPES[arguments.dtype],
        **({} if paths is None else {"tree_paths": paths}),
    )
    return Models(target=target, draft=draft, run=run)


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    base = PRESETS.get(arguments.preset, SamplingParams())
    if arguments.preset == "folder":
        base = read_generation_config(arguments.target)
    given = {name: getattr(arguments, name) for name in SAMPLING_OPTIONS}
    stated = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(base, **stated)


def _causal(arguments: argparse.Namespace) -> bool | None:
    return None if arguments.causal is None else arguments.causal == "true"


def _check(arguments: argparse.Namespace, prompts: list[list[int]]) -> frozenset[int]:
    """Everything that the small files already tell, before gigabytes are read; the EOS ids."""
    target = read_target_config(arguments.target, public_vocab=arguments.public_vocab)
    draft = None
    if arguments.draft is not None:
        draft = read_draft_config(arguments.draft, target, causal=_causal(arguments))
        if arguments.proposal_head == "indexed":
            read_proposal_head(arguments.draft, target)
    models = _models(arguments, target, draft, len(prompts))
    check_prompts(models, prompts, arguments.max_new_tokens)
    check_widths(models, arguments.draft_tree_nodes)
    if arguments.ignore_eos:
        return frozenset()
    return frozenset(eos_ids(arguments.target, vocab_rows=target.vocab_rows))


def _load(arguments: argparse.Namespace, batch: int) -> tuple[Models, Params]:
    policy = DTYPES[arguments.dtype]
    target, target_params = load_target(
        arguments.target, policy, public_vocab=arguments.public_vocab
    )
    draft, draft_params = None, {}
    if arguments.draft is not None:
        draft, draft_params = load_draft(
            arguments.draft, target, policy, causal=_causal(arguments)
        )
        if arguments.proposal_head == "indexed":
            draft, draft_params = use_proposal_head(
                arguments.draft, target, target_params, draft, draft_params, policy
            )
    models = _models(arguments, target, draft, batch)
    return models, Params(target=target_params, draft=draft_params)


@contextlib.contextmanager
def _decisions_shown(quiet: bool):
    """Shows on standard error what the loaders decide and why."""
    if quiet:
        yield
        return
    logger, handler = logging.getLogger("dflash_jax"), logging.StreamHandler(sys.stderr)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a handler that a library gave the root would say all of it again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
