"""Compares the library, in float32, with the reference arrays of a parity kit.

    python scripts/check_oracle.py KIT [--targets NAME ...] [--drafts NAME ...]

One line for each array and each way to compute it: name, error, tolerance, ok or FAIL ("-" marks
inputs, which are not compared). The exit status is 1 if anything failed, and 2, with one line on
standard error, for a folder that is no kit.
"""

import argparse
import sys
from pathlib import Path

# Works from a checkout as well as from an installation.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.oracle.kit import KitError
from scripts.oracle.run import check_kit


def main(arguments: list[str] | None = None) -> int:
    """Prints the lines and their count; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kit", type=Path, help="folder with targets/, drafts/ and golden/")
    parser.add_argument("--targets", nargs="+", help="only goldens of these targets")
    parser.add_argument("--drafts", nargs="+", help="only goldens of these drafts")
    options = parser.parse_args(arguments)
    passed = failed = 0
    try:
        for line in check_kit(options.kit, targets=options.targets, drafts=options.drafts):
            print(line, flush=True)
            passed += line.ok is True
            failed += line.ok is False
    except KitError as error:
        print(f"check_oracle.py: error: {error}", file=sys.stderr)
        return 2
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
