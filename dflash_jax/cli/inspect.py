"""``dflash-jax inspect FOLDER``: what is in a model folder, from headers alone."""

import argparse
import sys
from pathlib import Path

from dflash_jax.weights import inspect_folder


def add_command(commands) -> None:
    """Adds the command to the parser's subcommands."""
    command = commands.add_parser("inspect", help="what is in a model folder, from headers alone")
    command.add_argument("folder", type=Path, help="folder of a target or a draft")
    command.add_argument("--target", type=Path, help="the target's folder, to compare a draft with")


def run(arguments: argparse.Namespace) -> int:
    """Prints what is in the folder; 1 if a loader would refuse it, 2 for a caller's fault."""
    try:
        found = inspect_folder(arguments.folder, arguments.target)
    except (ValueError, OSError) as error:
        print(f"dflash-jax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(found)
    return 1 if found.faults else 0
