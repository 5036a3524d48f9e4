"""Makes the shipped pair: corpus, tokenizer, target, its own text, DFlash and DFlash2, figures.

    python scripts/make_tiny_pair.py --out DIR [--seed 0] [--smoke]
    python scripts/make_tiny_pair.py --out DIR --target-seconds 100 --draft-seconds 55   # a GPU
    python scripts/make_tiny_pair.py --measure DIR
    python scripts/make_tiny_pair.py --card DIR --retrained REPORT... [--remark TEXT]

writes DIR/target, DIR/dflash, DIR/dflash2 (Hugging Face folders), DIR/MODEL_CARD.md,
DIR/report.json and DIR/held_out_prompts.json. Budgets are steps or, where given, seconds; with both
the steps are the most there may be. What is finished is written before the next stage starts.
`--prepare DIR2` writes only the tokenizer and the encoded corpus, `--prepared DIR2` starts from
them. `--measure` reads the folders of a finished run and rewrites the figures of its report and
card. `--card` measures nothing: it writes the card of the report anew, after adding the reports of
runs with other seeds to it.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path

import jax

from dflash_jax.training.corpus import read_documents, standard_library
from dflash_jax.training.figures import DraftFigures, measure_folders
from dflash_jax.training.fit import FitConfig
from dflash_jax.training.prepared import Prepared, load_prepared, prepare, save_prepared
from dflash_jax.training.recipe import Recipe, pair_target, smoke_target
from dflash_jax.training.retrained import add_retrained
from dflash_jax.training.tiny_pair import make_pair

IDS = 1016
MOST_STEPS = 20_000  # of a budget in seconds
SMOKE = {
    "target_batch": 4, "target_length": 64, "prompt": 16, "new_tokens": 48, "sequences": 32,
    "temperatures": (0.0, 1.0), "capture_batch": 32, "draft_batch": 4, "blocks": 4,
    "held_out_prompts": 4, "held_out_tokens": 16,
}


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The recipe with the command line's budgets and seed."""
    smoke = arguments.smoke

    def steps(given: int | None, seconds: float | None, default: int) -> int:
        return given or (MOST_STEPS if seconds else 20 if smoke else default)

    target = FitConfig(
        steps=steps(arguments.target_steps, arguments.target_seconds, 6000),
        seconds=arguments.target_seconds,
        learning_rate=3e-3, warmup_steps=200, seed=arguments.seed,
        log_every=10 if smoke else 50, save_every=arguments.save_every,
    )
    draft = dataclasses.replace(
        target, steps=steps(arguments.draft_steps, arguments.draft_seconds, 4000),
        seconds=arguments.draft_seconds, warmup_steps=100, learning_rate=2e-3, weight_decay=0.05,
        seed=arguments.seed + 1,
    )
    sizes = SMOKE if smoke else {}
    return Recipe(target=target, draft=draft, seed=arguments.seed, **sizes)


def corpus_of(arguments: argparse.Namespace) -> Prepared:
    """The encoded corpus: ready-made, or of the given folder or the standard library."""
    if arguments.prepared:
        return load_prepared(arguments.prepared)
    documents = read_documents(arguments.text) if arguments.text else standard_library()
    return prepare(documents, IDS)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = options.add_argument
    add("--out", type=Path, help="folder to write into")
    add("--seed", type=int, default=0)
    add("--text", type=Path, help="folder of .py files instead of the standard library")
    add("--prepare", type=Path, metavar="DIR", help="only encode the corpus, into this folder")
    add("--prepared", type=Path, metavar="DIR", help="a folder that --prepare wrote")
    add("--measure", type=Path, metavar="DIR", help="only measure the drafts of a finished run")
    add("--card", type=Path, metavar="DIR", help="only write the card of a finished run anew")
    add("--retrained", type=Path, nargs="+", metavar="REPORT",
        help="with --card: report.json of runs of the same recipe with other seeds, to be added")
    add("--remark", metavar="TEXT", help="with --card: stands under the table of these runs")
    add("--target-steps", type=int, metavar="N")
    add("--draft-steps", type=int, metavar="N")
    add("--target-seconds", type=float, metavar="S", help="ends the target's training in time")
    add("--draft-seconds", type=float, metavar="S", help="the same for each draft")
    add("--save-every", type=int, default=0, metavar="N", help="steps between resume points")
    add("--compile-cache", type=Path, metavar="DIR", help="compile ahead, into this folder")
    add("--smoke", action="store_true", help="tiny models and batches, for a CPU")
    return options


def main() -> int:
    arguments = parser().parse_args()
    try:
        if arguments.card:
            add_retrained(arguments.card, arguments.retrained or (), arguments.remark)
            return 0
        for name in ("retrained", "remark"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name}: expected --card with it, got none")
        if arguments.measure:
            show(measure_folders(arguments.measure))
            return 0
        prepared = corpus_of(arguments)
        if arguments.prepare:
            save_prepared(arguments.prepare, prepared)
            return 0
        if arguments.out is None:
            raise ValueError("--out: expected a folder")
        if arguments.compile_cache:
            jax.config.update("jax_compilation_cache_dir", str(arguments.compile_cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        command = f"python {shlex.join(sys.argv)}"
        target = (smoke_target if arguments.smoke else pair_target)(prepared.facts["ids"])
        recipe = recipe_of(arguments)
        outcomes = make_pair(recipe, target, prepared, arguments.out, command=command)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"make_tiny_pair: error: {error}", file=sys.stderr)
        return 2
    show({name: outcome.figures for name, outcome in outcomes.items()})
    return 0


def show(found: dict[str, DraftFigures]) -> None:
    """Prints the figures that the card leads with."""
    for name, figures in found.items():
        share = figures.agreement
        print(f"{name}: tokens per round {figures.acceptance.tokens_per_round} greedy, "
              f"{figures.sampled.tokens_per_round} at temperature 1; accepted {share.accepted}, "
              f"expected {share.expected}, difference {share.excess}")


if __name__ == "__main__":
    sys.exit(main())
