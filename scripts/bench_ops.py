"""Checks ops against float64 on the device, then times them, beside peers of the same run.

    python scripts/bench_ops.py [--only NAME ...] [--full]

One line per op, size and form: microseconds of a call inside a program of many calls on rotating
operands (with what the host takes to launch it, which a round hides) and of its kernels alone, the
bytes it must move, its floor at the copy bandwidth of the same run and the kernels' ratio to it.
Operands are random. A form that misses its tolerance is reported and not timed; the exit status
is then 1.
"""

import argparse
import sys
from pathlib import Path

# Works from a checkout as well as from an installation.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

from scripts.bench_round import copy_bandwidth
from scripts.ops.catalogue import cases


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="parts of names")
    parser.add_argument("--full", action="store_true", help="larger batches and contexts too")
    parser.add_argument("--forms", nargs="+", help="only these forms")
    arguments = parser.parse_args(argv)
    chosen = [
        (case, form)
        for case in cases(arguments.full)
        if any(part in case.name for part in arguments.only)
        for form in case.forms
        if not arguments.forms or form in arguments.forms
    ]
    if not chosen:
        parser.error(f"--only, --forms: expected parts of a case's name and forms of it, got "
                     f"{arguments.only}, {arguments.forms}")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {' '.join(sys.argv)}")
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s (read + write)")
    return int(any([not report(case, form, bandwidth) for case, form in chosen]))


def report(case, form: str, bandwidth: float) -> bool:
    """Prints a line; False if the form is wrong or cannot run."""
    key = jax.random.key(0)
    try:
        error = f"error {case.check(form, key):.1e}" if case.exact else "not compared here"
        taken, kernels = case.time(form, key)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as fault:
        print(f"{case.name}, {form}: FAILED {str(fault).splitlines()[0]}", flush=True)
        return False
    floor = case.bytes / bandwidth * 1e6
    inside = f" ({kernels:.1f} in kernels)" if kernels else ""
    print(f"{case.name}, {form}: {taken:.1f} us{inside}, {case.bytes / 1e6:.1f} MB, floor "
          f"{floor:.1f} us, ratio {(kernels or taken) / floor:.2f}, {error}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
