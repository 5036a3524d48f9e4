"""Times torch at the shapes of `bench_ops`, under the names of its cases.

    python scripts/bench_torch.py [--only NAME ...] [--full]

One line per case and form, as `bench_ops` prints them, with the rate of the bytes. A time is that
of one call among many on rotating operands, more of them than a cache holds, in one CUDA graph, so
that dispatch is not in it; --queued times calls queued one by one instead, for what a graph cannot
record. Operands are random. flash-linear-attention takes part where it can be imported.
"""

import argparse
import sys
from pathlib import Path

# Works from a checkout as well as from an installation.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from scripts import torch_ops
from scripts.torch_ops import Peer


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    chosen = [
        peer for peer in torch_ops.peers(args.full)
        if any(part in peer.case.name for part in args.only)
    ]
    if not chosen:
        raise SystemExit(f"--only: expected parts of a case's name, got {args.only}")
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    print(f"{name}, torch {torch.__version__}, {' '.join(sys.argv)}")
    bandwidth = torch_ops.copy_bandwidth(device)
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s (read + write)")
    failed = [not report(peer, device, bandwidth, graph=not args.queued) for peer in chosen]
    if torch_ops.delta_rules() is None:
        print("gated_delta_verify: flash-linear-attention (fla) is absent, not timed")
    return int(any(failed))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Exits for a device that is absent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="parts of names")
    parser.add_argument("--full", action="store_true", help="larger batches and contexts too")
    parser.add_argument("--queued", action="store_true", help="without CUDA graphs")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device: expected a device of this machine, got {args.device}")
    return args


def report(peer: Peer, device: torch.device, bandwidth: float, *, graph: bool) -> bool:
    """Prints a line a form; False if one cannot run."""
    good = True
    moved = peer.case.bytes
    for form in peer.forms:
        try:
            taken = torch_ops.microseconds(peer, form, device, graph=graph)
        except (RuntimeError, ValueError, NotImplementedError) as fault:
            print(f"{peer.case.name}, {form}: FAILED {str(fault).splitlines()[0]}", flush=True)
            good = False
            continue
        floor = moved / bandwidth * 1e6
        print(f"{peer.case.name}, {form}: {taken:.1f} us, {moved / 1e6:.1f} MB, floor {floor:.1f} "
              f"us, ratio {taken / floor:.2f}, {moved / taken / 1e6:.3f} TB/s", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
