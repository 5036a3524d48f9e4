"""Trains a small Qwen3.5-family target on text and writes a Hugging Face folder.

    python scripts/train_target.py --out DIR [--text FOLDER] [--steps N | --seconds S] [--smoke]

Text is the running Python's standard library unless a folder of .py files is given. A run that is
stopped goes on from DIR.resume when `--save-every` was given.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax

from dflash_jax.training.corpus import read_documents, standard_library
from dflash_jax.training.fit import FitConfig, discard_checkpoint
from dflash_jax.training.forward import training_dtypes
from dflash_jax.training.parameters import count, start_target
from dflash_jax.training.prepared import prepare
from dflash_jax.training.recipe import pair_target, smoke_target
from dflash_jax.training.results import check_space
from dflash_jax.training.stages import TargetObjective, fit_target
from dflash_jax.training.tiny_pair import write_target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--text", type=Path, help="folder of .py files")
    add("--ids", type=int, default=1016, help="ids of the tokenizer that is learned")
    add("--steps", type=int, help="default 6000, or 20 with --smoke")
    add("--seconds", type=float)
    add("--batch", type=int, default=32)
    add("--length", type=int, default=512)
    add("--learning-rate", type=float, default=3e-3)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the passes")
    add("--save-every", type=int, default=0, metavar="N", help="steps between resume points")
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="a small geometry, to try things out on a CPU")
    arguments = parser.parse_args()
    resume = arguments.out.with_name(arguments.out.name + ".resume")
    try:
        text = read_documents(arguments.text) if arguments.text else standard_library()
        prepared = prepare(text, arguments.ids)
        config = (smoke_target if arguments.smoke else pair_target)(prepared.facts["ids"])
        objective = TargetObjective(
            config=config, dtypes=training_dtypes(arguments.dtype), batch=arguments.batch,
            length=arguments.length,
        )
        fit = FitConfig(
            steps=arguments.steps or (20 if arguments.smoke else 6000), seconds=arguments.seconds,
            learning_rate=arguments.learning_rate, save_every=arguments.save_every,
            seed=arguments.seed,
        )
        size = count(jax.eval_shape(lambda: start_target(config, arguments.seed)))
        check_space(arguments.out, 2 * size)  # before the work, not only after it
        fitted = fit_target(objective, prepared.train, fit, folder=resume)
        write_target(arguments.out, config, fitted, prepared)
        discard_checkpoint(resume)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"train_target: error: {error}", file=sys.stderr)
        return 2
    loss = f", loss {fitted.history[-1][1]['loss']:.4f}" if fitted.history else ""
    print(f"{arguments.out}: {fitted.steps} steps{loss}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
