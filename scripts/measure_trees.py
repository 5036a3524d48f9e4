"""Tokens per round of tree rounds beside chains, on the shipped pair's held-out prompts.

    python scripts/measure_trees.py [--nodes 12 16 24 32] [--temperature 0 1] [--prompts 128]

Every width decodes the same prompts with the same seeds. Intervals are 95% bootstraps over prompts;
the gain over the chain is resampled in pairs. The rounds are the library's own. Acceptance depends
on the device and on --batch only as far as bfloat16 products round otherwise; time is not reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np

from dflash_jax.assets import tiny_pair_path
from dflash_jax.config import DtypePolicy, RunConfig
from dflash_jax.engine.generate import generate
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params
from dflash_jax.training.intervals import Interval, ratio, resamples
from dflash_jax.weights import load_draft, load_target

ASSETS = tiny_pair_path("target").parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pair", type=Path, default=ASSETS, help="folder with target, dflash2 and the prompts")
    add("--nodes", type=int, nargs="+", default=[12, 16, 24, 32], metavar="N")
    add("--paths", type=int, default=8, metavar="N", help="leaves, 2..8")
    add("--draft-tokens", type=int, default=7, metavar="K")
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    add("--prompts", type=int, default=128)
    add("--new-tokens", type=int, default=128)
    add("--batch", type=int, default=32)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    policy = DtypePolicy() if arguments.dtype == "bfloat16" else DtypePolicy.exact()
    try:
        target, target_params = load_target(arguments.pair / "target", policy)
        draft, draft_params = load_draft(arguments.pair / "dflash2", target, policy)
        prompts = json.loads((arguments.pair / "held_out_prompts.json").read_text("utf-8"))
        prompts = prompts[: arguments.prompts]
        run = RunConfig(
            draft_tokens=arguments.draft_tokens, batch=min(arguments.batch, len(prompts)),
            max_context=max(map(len, prompts)) + arguments.new_tokens, chunk=64, dtypes=policy,
        )
        runs = [dataclasses.replace(run, tree_nodes=n, tree_paths=arguments.paths)
                for n in (0, *arguments.nodes)]
    except (ValueError, OSError) as error:
        print(f"measure_trees: error: {error}", file=sys.stderr)
        return 2
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, K = {run.draft_tokens}, "
          f"{len(prompts)} prompts, {arguments.new_tokens} new tokens, {arguments.dtype}")
    params = Params(target=target_params, draft=draft_params)
    for temperature in arguments.temperature:
        chain = None
        for each in runs:
            models = Models(target, draft, each)
            found = rounds_of(models, params, prompts, arguments.new_tokens, temperature)
            chain = found if chain is None else chain
            name = f"tree of {each.tree_nodes}" if each.tree_nodes else "chain"
            print(f"temperature {temperature}, {name}: {line(found, chain)}", flush=True)
    return 0


def rounds_of(models: Models, params: Params, prompts, new_tokens: int, temperature: float):
    """[prompts, 2] fp64: rounds of each prompt, and the outputs its rounds licensed."""
    rows = []
    for first in range(0, len(prompts), models.run.batch):
        part = prompts[first : first + models.run.batch]
        controls = [
            SamplingParams(temperature=temperature, seed=first + i) for i in range(len(part))
        ]
        for output in generate(
            models, params, part, max_new_tokens=new_tokens, sampling=controls
        ):
            kept = output.statistics
            rows.append((kept.rounds, kept.rounds + sum(kept.accepted_by_position)))
    return np.array(rows, np.float64)


def line(found, chain) -> str:
    """Tokens per round, and the ratio to the chain's, with intervals."""
    draws = resamples(len(found), seed=0)
    share, base = ((draws @ x[:, 1]) / (draws @ x[:, 0]) for x in (found, chain))
    value, usual = (ratio(x[:, 1], x[:, 0], draws) for x in (found, chain))
    low, high = np.percentile(share / base, [2.5, 97.5])
    gain = Interval(value=value.value / usual.value, low=low, high=high)
    return f"{value} tokens per round, {gain} times the chain's"


if __name__ == "__main__":
    sys.exit(main())
