"""Times the official `dflash` package on the official geometry, beside ours in the same call.

    python scripts/bench_peer.py --model 27b-dflash2 --draft-tokens 7 --context 4096 --aba

The package's own `dflash_generate` runs unchanged, at temperature 0 and without stop ids (its
stop test would cost a further wait a round). Random weights accept nothing, so the target that it
is given puts an infinite score on the proposals that the schedule of `bench_round` accepts, and
minus infinity on the next one: two small kernels a round. Its acceptance reads these scores as any
others, and the counts that it reports must be those of the schedule.

Timing only: transformers' hybrid cache does not roll its recurrent states back, so texts are
wrong after the first rejection; the work is that of a right cache, or less.

Steps of a round, by events on the device's stream: "verify" is the target's call, "accept" all up
to the draft's call (argmax, the count's way to the host, cropping, features, embedding), "draft"
the draft's call, "propose" its head and choice. --aba runs ours, the peer and ours again, each in
a process of its own, since each takes most of the memory.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

# Works from a checkout as well as from an installation.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflash_jax.config import DraftKind
from dflash_jax.config.presets import tiny_draft, tiny_target
from scripts.round_cases import PAIRS, WARMUP, accepted_counts

HERE = Path(__file__).resolve().parent
# Small enough for a CPU, to try the program itself.
TINY = {
    "tiny-dflash2": (tiny_target, lambda: tiny_draft(DraftKind.DFLASH2)),
    "tiny-dflash": (
        lambda: tiny_target(moe=True), lambda: tiny_draft(DraftKind.DFLASH, causal=(True, False))
    ),
}
OURS = re.compile(r"^round: queued ([\d.]+) ms", re.MULTILINE)
PEER = re.compile(r"^round: ([\d.]+) ms", re.MULTILINE)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.aba:
        return compare(args)
    print(f"command: {' '.join(sys.argv)}")
    from scripts.torch_rounds import measure

    pair = build(args)
    options = pair, args.context, args.seed
    spec = measure(*options, accepted_counts(args), args.draft_tokens + 1)
    report("round", spec)
    print(f"round: tokens/s at tau {spec.tau:.2f}: {spec.tau / spec.total * 1e3:.1f}")
    if not args.skip_plain:
        plain = measure(*options, [0] * (args.rounds + WARMUP), 1)
        report("plain", plain)
        print(f"speed-up over plain {spec.tau * plain.total / spec.total:.2f}")
    print(f"peak {spec.peak / 1e9:.1f} GB")
    return 0


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Exits for a value out of range or a device that is absent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*PAIRS, *TINY], default="27b-dflash2")
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=64)
    parser.add_argument("--tau", type=float, default=4.8, help="mean of accepted + 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", help="of torch")
    parser.add_argument("--skip-plain", action="store_true", help="rounds only")
    parser.add_argument("--aba", action="store_true", help="ours, the peer, ours")
    parser.add_argument("--skip-ours", action="store_true", help="with --aba: the peer alone")
    parser.add_argument("--random-context", action="store_true",
                        help="with --aba: ours fills its context without a prefill")
    parser.add_argument("--package-path", metavar="DIR",
                        help="a folder that holds dflash/, and fla/ if wanted, if not installed")
    args = parser.parse_args(argv)
    for name, least in (("draft_tokens", 1), ("context", 1), ("rounds", 1), ("tau", 1)):
        if not getattr(args, name) >= least:
            option = name.replace("_", "-")
            parser.error(f"--{option}: expected at least {least}, got {getattr(args, name)}")
    if args.aba and not args.skip_ours and args.model in TINY:
        parser.error(f"--aba: expected a model of bench_round, got {args.model}")
    if args.device.startswith("cuda") and not args.aba:
        import torch

        if not torch.cuda.is_available():
            parser.error(f"--device: expected a device of this machine, got {args.device}")
    return args


def build(args) -> SimpleNamespace:
    """The package and the two models of it, with random weights on the device."""
    import torch
    import transformers

    from scripts import torch_models, torch_rounds

    torch_models.add_package(args.package_path)
    package = torch_models.dflash_model()
    make_target, make_draft = (PAIRS | TINY)[args.model]
    device = torch.device(args.device)
    if device.type != "cuda":
        package._cuda_time = time.perf_counter  # its clock takes a GPU for granted
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    print(f"device: {name}, torch {torch.__version__}, transformers {transformers.__version__}, "
          f"dflash in {Path(package.__file__).parent}")
    began = time.perf_counter()
    target = torch_models.make_target(make_target(), args.device, args.seed)
    draft = torch_models.make_draft(make_draft(), make_target(), args.device, args.seed + 1)
    torch_rounds.wait(device)
    counts = [sum(p.numel() for p in model.parameters()) / 1e9 for model in (target, draft)]
    print(f"kernels: {torch_models.kernels_in_use(target)}")
    print(f"{args.model}: target {counts[0]:.3g}e9, draft {counts[1]:.3g}e9 parameters, bfloat16, "
          f"made in {time.perf_counter() - began:.1f} s")
    return SimpleNamespace(package=package, target=target, draft=draft, device=device)


def report(name: str, result: SimpleNamespace) -> None:
    """Prints the figures of `measure`."""
    steps = ", ".join(f"{step} {taken:.2f}" for step, taken in result.steps.items())
    print(f"{name}: {result.total:.2f} ms (spread {result.spread:.2f}); {steps}")
    print(f"{name}: blocks of {result.width}; the loop's own clock {result.clock:.2f} ms a round, "
          f"first calls included; prefill {result.prefill:.0f} ms", flush=True)


def compare(args) -> int:
    """Runs ours, the peer and ours, and prints their milliseconds a round."""
    figures = []
    for name, command in commands(args):
        pattern = PEER if name == "peer" else OURS
        figures.append((name, figure(name, output_of(name, command), pattern)))
    print(", ".join(f"{name} {taken:.2f} ms" for name, taken in figures) + " a round")
    ours = [taken for name, taken in figures if name == "ours"]
    if ours:
        peer = dict(figures)["peer"]
        print(f"ratio {peer / statistics.mean(ours):.2f} (peer over the mean of ours), "
              f"{peer / max(ours):.2f} over the slower")
    return 0


def commands(args) -> list[tuple[str, list[str]]]:
    """Whose turn it is, and its command line."""
    shared = []
    for option in ("model", "draft-tokens", "context", "rounds", "tau", "seed"):
        shared += [f"--{option}", str(getattr(args, option.replace("-", "_")))]
    if args.skip_plain:
        shared.append("--skip-plain")
    ours, peer = [
        [sys.executable, "-u", str(HERE / name), *shared]
        for name in ("bench_round.py", "bench_peer.py")
    ]
    if args.random_context:
        ours.append("--random-context")
    peer += ["--device", args.device]
    if args.package_path is not None:
        peer += ["--package-path", args.package_path]
    if args.skip_ours:
        return [("peer", peer)]
    return [("ours", ours), ("peer", peer), ("ours", ours)]


def output_of(name: str, command: list[str]) -> str:
    """What a command prints, shown as it comes. Raises RuntimeError if it fails."""
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(f"{name}| {line}", end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise RuntimeError(f"{name}: expected exit status 0, got {process.returncode}")
    return "".join(lines)


def figure(name: str, text: str, pattern: re.Pattern) -> float:
    """Milliseconds a round in what a program printed. Raises RuntimeError if there are none."""
    found = pattern.search(text)
    if found is None:
        raise RuntimeError(f"{name}: expected a line like {pattern.pattern!r} in its output")
    return float(found[1])


if __name__ == "__main__":
    raise SystemExit(main())
