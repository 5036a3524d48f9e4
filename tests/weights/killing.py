"""Kills conversions at random points; run by test_conversion_kill as a program of its own.

    python -m tests.weights.killing FOLDER WORK KILLS [DTYPE]

One process imports the library and forks a child for every attempt, before any device is used.
Prints one line: kills, how many hit a run under way, and how many resumed from finished items.
"""

import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

from dflash_jax.weights.conversion import convert, plan_target
from dflash_jax.weights.converted import ConvertedFolder, fingerprint, is_converted

# A child imports nothing and uses devices only after the fork.
warnings.filterwarnings("ignore", message=".*os.fork.*")
warnings.filterwarnings("ignore", message=".*use of fork.*")


def child(work):
    """Runs `work` in a fork; returns the process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    os._exit(0)


def finish(pid):
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def same_as(out, reference):
    """Manifests equal byte for byte, and tensors equal to what both say."""
    assert (out / "manifest.json").read_bytes() == (reference / "manifest.json").read_bytes()
    assert {p.name for p in out.iterdir()} == {p.name for p in reference.iterdir()}
    opened = ConvertedFolder(out, "target")
    for item, stated in opened.manifest["items"].items():
        values = opened.read_item(item)
        assert {path: fingerprint(leaf) for path, leaf in values.items()} == stated


def main(folder, work, kills, dtype="bfloat16"):
    rng, work = random.Random(0), Path(work)
    reference, out = work / "reference", work / "out"
    partial = out.with_name(".out.partial")

    def run(where):
        return child(lambda: convert(plan_target(folder, where, dtype)))

    start = time.monotonic()
    assert finish(run(reference)) == 0
    whole, under_way, resumed = time.monotonic() - start, 0, 0
    for _ in range(kills):
        shutil.rmtree(out, ignore_errors=True)
        pid = run(out)
        time.sleep(rng.uniform(0.1, 1.0) * whole)
        os.kill(pid, signal.SIGKILL)
        under_way += finish(pid) == -signal.SIGKILL
        if not out.exists():
            assert not is_converted(partial), "a partial folder that looks whole"
            resumed += any(partial.glob("records/*.json"))
        assert finish(run(out)) == 0
        assert finish(child(lambda: same_as(out, reference))) == 0
        assert not partial.exists()
    print(f"{kills} kills, {under_way} under way, {resumed} resumed from finished items")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
