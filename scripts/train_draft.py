"""Trains a DFlash or DFlash2 draft for a target folder, or measures one.

    python scripts/train_draft.py --target FOLDER --draft dflash2 --out DIR [--text FOLDER]
    python scripts/train_draft.py --validate --target FOLDER --draft DIR --prompts ids.json

The data are the target's own continuations of prompts cut from text (.py files below --text, by
default the standard library); files of the held-out split are for the figures. Features are kept
on the device, and in --cache too when it is given.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

from dflash_jax.config import DraftKind, DtypePolicy, RunConfig
from dflash_jax.engine.generate import run_draft_tokens
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params
from dflash_jax.training.capture import capture
from dflash_jax.training.continuations import continuation_models, continuations
from dflash_jax.training.corpus import (
    prompts_by_file,
    random_windows,
    read_documents,
    standard_library,
)
from dflash_jax.training.figures import read_prompts
from dflash_jax.training.fit import FitConfig, discard_checkpoint
from dflash_jax.training.forward import training_dtypes
from dflash_jax.training.parameters import count, draft_params, start_draft
from dflash_jax.training.prepared import prepare, target_tokenizer
from dflash_jax.training.recipe import DRAFT_TOKENS, DRAFTS, pair_draft
from dflash_jax.training.results import check_space
from dflash_jax.training.stages import DraftObjective, check_room, draft_data, fit_draft
from dflash_jax.training.tiny_pair import write_draft
from dflash_jax.training.validate import measure_acceptance
from dflash_jax.weights import load_draft, load_target

POLICIES = {"bfloat16": DtypePolicy(), "float32": DtypePolicy.exact()}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--draft", required=True, help="dflash or dflash2; with --validate a draft's folder")
    add("--out", type=Path)
    add("--text", type=Path, help="folder of .py files")
    add("--layers", type=int, nargs="+", metavar="ID", help="captured target blocks")
    add("--mask-id", type=int, help="default: the last row of the vocabulary")
    add("--sequences", type=int, default=4096)
    add("--write-batch", type=int, default=512, help="sequences that the target writes at once")
    add("--prompt", type=int, default=64)
    add("--new-tokens", type=int, default=192)
    add("--temperature", type=float, default=0.0,
        help="of the target's continuations; with --validate, of the measurement")
    add("--steps", type=int, default=3000)
    add("--seconds", type=float)
    add("--batch", type=int, default=64)
    add("--blocks", type=int, default=24)
    add("--learning-rate", type=float, default=2e-3)
    add("--dtype", choices=sorted(POLICIES), default="bfloat16")
    add("--cache", type=Path, metavar="DIR", help="keeps the features on disk")
    add("--save-every", type=int, default=0, metavar="N", help="steps between resume points")
    add("--seed", type=int, default=0)
    add("--validate", action="store_true", help="only measure")
    add("--prompts", type=Path, metavar="FILE", help="JSON list of id lists to measure on")
    add("--held-out-prompts", type=int, default=64)
    return parser


def validate(arguments, target, target_params, draft, params, prompts) -> None:
    """Prints acceptance of the prompts."""
    run = RunConfig(
        draft_tokens=run_draft_tokens(draft), batch=len(prompts),
        max_context=max(map(len, prompts)) + arguments.new_tokens, chunk=64,
        dtypes=POLICIES[arguments.dtype],
    )
    pair = Params(target=target_params, draft=params)
    heat = arguments.temperature if arguments.validate else 0.0
    found, _ = measure_acceptance(
        Models(target, draft, run), pair, prompts, arguments.new_tokens,
        sampling=SamplingParams(temperature=heat, seed=arguments.seed),
    )
    print(f"{found.tokens_per_round} tokens per round, {found.prompts} prompts, "
          f"{found.rounds} rounds")
    for position, share in enumerate(found.conditional):
        print(f"  position {position + 1}, accepted given all before: {share}")


def train(arguments, target, target_params):
    """Fits and writes a draft; returns its config, parameters and held-out prompts."""
    if arguments.out is None:
        raise ValueError("--out: expected a folder")
    if arguments.draft not in DRAFTS:
        raise ValueError(f"--draft: expected one of {sorted(DRAFTS)}, got {arguments.draft!r}")
    config = pair_draft(
        target, DraftKind(DRAFTS[arguments.draft]), layer_ids=arguments.layers,
        mask_token_id=arguments.mask_id,
    )
    dtypes = training_dtypes(arguments.dtype)
    objective = DraftObjective(
        target=target, draft=config, dtypes=dtypes, draft_tokens=DRAFT_TOKENS,
        batch=arguments.batch, blocks=arguments.blocks, prompt=arguments.prompt, gamma=4.0,
    )
    check_room(objective, arguments.prompt + arguments.new_tokens)
    fit = FitConfig(
        steps=arguments.steps, seconds=arguments.seconds, learning_rate=arguments.learning_rate,
        weight_decay=0.05, seed=arguments.seed, save_every=arguments.save_every,
    )
    tokenizer = target_tokenizer(arguments.target, target.public_vocab)
    size = count(jax.eval_shape(lambda: start_draft(config, arguments.seed)))
    check_space(arguments.out, 2 * size)  # before the work, not only after it
    documents = read_documents(arguments.text) if arguments.text else standard_library()
    prepared = prepare(documents, tokenizer)
    sequences = continuations(
        continuation_models(target, POLICIES[arguments.dtype], batch=arguments.write_batch,
                            prompt=arguments.prompt, new_tokens=arguments.new_tokens),
        target_params,
        random_windows(prepared.train, arguments.sequences, arguments.prompt, arguments.seed),
        temperature=arguments.temperature, seed=arguments.seed,
    )
    features = capture(
        target, dtypes, config.target_layer_ids, target_params, sequences,
        batch=capture_size(arguments.write_batch), folder=arguments.cache,
    )
    resume = arguments.out.with_name(arguments.out.name + ".resume")
    data = draft_data(target, target_params, np.asarray(sequences), features)
    fitted = fit_draft(objective, data, fit, folder=resume)
    write_draft(arguments.out, target, config, fitted)
    discard_checkpoint(resume)
    prompts = prompts_by_file(
        prepared.held_out, arguments.held_out_prompts, arguments.prompt, arguments.seed + 2
    )
    return config, draft_params(config, fitted.params, POLICIES[arguments.dtype]), prompts


def capture_size(written: int) -> int:
    """Sequences per pass of the capture: at most 256, and a divisor of a batch of the writer."""
    return max(size for size in range(1, 257) if written % size == 0)


def main() -> int:
    arguments = build_parser().parse_args()
    try:
        target, target_params = load_target(arguments.target, POLICIES[arguments.dtype])
        if not arguments.validate:
            draft, params, prompts = train(arguments, target, target_params)
        else:
            if arguments.prompts is None:
                raise ValueError("--prompts: expected a file with --validate")
            prompts = read_prompts(arguments.prompts)
            draft, params = load_draft(arguments.draft, target, POLICIES[arguments.dtype])
        validate(arguments, target, target_params, draft, params, prompts)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"train_draft: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
