"""The rounds that `bench_round` times: its command line, the pairs, and the forced acceptance."""

import argparse

import numpy as np

from dflash_jax import config
from dflash_jax.config.run import IMPLEMENTATIONS
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models

PAIRS = {
    "27b-dflash2": (config.qwen35_27b, config.dflash2_27b),
    "27b-dflash": (config.qwen35_27b, config.dflash_27b),
    "35b-dflash": (config.qwen35_35b_a3b, config.dflash_35b_a3b),
    "35b-dflash2": (config.qwen35_35b_a3b, config.dflash2_35b_a3b),
}
WARMUP = 5
PREFILLS = 3  # of which the median counts
GROUP = 8  # rounds between two readings of the clock
LOOPS, LOOPED = 9, 32  # calls of the device's own loop, the first left out, and rounds of each


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, its sampling controls as `controls`. Exits for a value out of range, before
    any model is made."""
    parser = argparse.ArgumentParser(description="Times rounds at official geometry.")
    parser.add_argument("--model", choices=PAIRS, default="27b-dflash2")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=64)
    parser.add_argument("--tau", type=float, default=4.8, help="mean of accepted + 1")
    parser.add_argument("--random-context", action="store_true", help="fill it without a prefill")
    parser.add_argument("--skip-plain", action="store_true", help="rounds only")
    parser.add_argument("--device-loop", action="store_true", help="time `decode_rounds` as well")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a round")
    parser.add_argument("--temperature", type=float, default=0.0, help="> 0: time it as well")
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--presence-penalty", type=float, default=1.5)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="auto",
                        help="xla for XLA alone")
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16",
                        help="of the target's matrices; fp8 in blocks of 128 x 128")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name in ("batch", "draft_tokens", "context", "chunk", "rounds", "tau"):
        if not getattr(args, name) >= 1:
            option = name.replace("_", "-")
            parser.error(f"--{option}: expected at least 1, got {getattr(args, name)}")
    if args.rounds < 4 * GROUP:  # three groups queued and one blocking
        parser.error(f"--rounds: expected at least {4 * GROUP}, got {args.rounds}")
    if args.tau == np.inf:
        parser.error(f"--tau: expected a finite number, got {args.tau}")
    try:
        args.controls = SamplingParams(
            temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
            presence_penalty=args.presence_penalty,
        )
    except ValueError as fault:  # it begins with the control's name
        parser.error(f"--{str(fault).replace('_', '-')}")
    return args


def pair(args) -> Models:
    """The pair at full size, with room for all rounds that will be timed."""
    make_target, make_draft = PAIRS[args.model]
    rounds = args.rounds + WARMUP + (LOOPS * LOOPED if args.device_loop else 0)
    rounds += GROUP if args.profile else 0
    longest = args.context + rounds * (args.draft_tokens + 1)
    run = config.RunConfig(
        draft_tokens=args.draft_tokens,
        batch=args.batch,
        max_context=-(-longest // 64) * 64,
        chunk=args.chunk,
        implementation=args.implementation,
    )
    target = make_target().with_fp8() if args.dtype == "fp8" else make_target()
    return Models(target, make_draft(), run)


def alone(models: Models, args) -> Models:
    """The target alone."""
    run = config.RunConfig(
        draft_tokens=0, batch=args.batch, max_context=models.run.max_context, chunk=args.chunk,
        implementation=args.implementation,
    )
    return Models(models.target, None, run)


def accepted_counts(args) -> list[int]:
    """Accepted counts whose running mean follows tau - 1."""
    mean = min(args.tau - 1, args.draft_tokens)
    totals = [round(mean * i) for i in range(args.rounds + WARMUP + 1)]
    return [b - a for a, b in zip(totals, totals[1:], strict=False)]
