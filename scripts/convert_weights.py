"""Converts Hugging Face folders to orbax checkpoints in the fused layout, and drafts back.

    python scripts/convert_weights.py --target DIR [--draft DIR] --out DIR [--dtype fp8]
    python scripts/convert_weights.py --target DIR --draft CONVERTED --out DIR --to-hf
    python scripts/convert_weights.py --synthetic-gb 20 --out DIR

writes DIR/target and DIR/draft, which `load_target`, `load_draft` and the command line take in
place of the files. Each appears under its name only when it is whole; a stopped run goes on where
it was when the same command is given again. `--target` may be converted already. Host memory stays
below twice the largest item plus 1 GiB; `--synthetic-gb` measures that on a sparse target.

`--dtype fp8` quantises what official FP8 releases have in float8: the layers' matrices, with a
scale of largest / 448 for each 128 x 128 block of a file's matrix. Embedding, head, router, the a
and b rows, norms and the draft stay as with bfloat16. Float8 matrices of the files stay as they are
under any dtype.

There is one item a layer whatever `--shards N` says: it stores each leaf above N MiB in N chunks or
more, so that N hosts or devices that hold a part each can read it at once. The values and what may
load them are the same.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

from dflash_jax.config import tiny_target
from dflash_jax.weights import names, read_target_config
from dflash_jax.weights.conversion import (
    FP8,
    MATRIX_DTYPES,
    ConversionPlan,
    convert,
    plan_draft,
    plan_target,
)
from dflash_jax.weights.converted import is_converted
from dflash_jax.weights.export import target_json
from dflash_jax.weights.leaves import Storage
from dflash_jax.weights.to_hf import draft_to_hf

GB, GIB = 1e9, 2**30
BAR = 30


class Progress:
    """A bar with GB and the time that is left, on one line of standard error."""

    def __init__(self, name: str):
        self._name, self._start, self._first = name, time.perf_counter(), None

    def show(self, done: int, total: int) -> None:
        """Called after each item with the bytes done and all bytes."""
        elapsed = time.perf_counter() - self._start
        if self._first is None:
            # What an earlier run did took no time of this one; the first item is not timed.
            self._first, self._start, elapsed = done, time.perf_counter(), 0.0
        moved = done - self._first
        eta = f"{elapsed / moved * (total - done):.0f} s left" if moved else "..."
        filled = BAR * done // max(total, 1)
        bar = "#" * filled + "-" * (BAR - filled)
        text = f"\r{self._name} [{bar}] {done / GB:.2f} of {total / GB:.2f} GB, {eta}   "
        print(text, end="\n" if done == total else "", file=sys.stderr, flush=True)


def run(plan: ConversionPlan, name: str, dry: bool) -> None:
    """Prints the plan and, unless dry, carries it out."""
    print(plan)
    if dry:
        return
    written = convert(plan, on_bytes=Progress(name).show)
    print(f"{plan.out}: {'written' if written else 'already whole, left as it is'}")


def peak() -> int:
    """Largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sparse_target(folder: Path, gigabytes: float) -> Path:
    """A target of about that size whose shards are holes: 27B-wide layers, as many as it takes."""
    shape = dict(hidden=5120, vocab_rows=248320, public_vocab=248077, intermediate=17408)
    kinds, layers = tiny_target().layer_types, []
    while True:
        config = tiny_target(**shape, layer_types=(*layers, *kinds))
        parts = {
            part.name: (part.shape, "F32" if leaf.storage is Storage.VECTOR else "BF16")
            for leaf in names.target_plan(config)[0]
            for part in leaf.layouts[0]
        }
        size = sum(_bytes(*part) for part in parts.values())
        if size >= gigabytes * GB:
            break
        layers += kinds
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(target_json(config)))
    weight_map, listed = {}, list(parts)
    for shard, start in enumerate(range(0, len(listed), 16)):
        file = f"model-{shard:05d}.safetensors"
        mine = listed[start : start + 16]
        _write_hole(folder / file, {name: parts[name] for name in mine})
        weight_map |= dict.fromkeys(mine, file)
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    size = 4 if dtype == "F32" else 2
    for extent in shape:
        size *= extent
    return size


def _write_hole(file: Path, parts: dict[str, tuple[tuple[int, ...], str]]) -> None:
    header, end = {}, 0
    for name, (shape, dtype) in parts.items():
        size = _bytes(shape, dtype)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def measure(out: Path, gigabytes: float, dtype: str) -> int:
    """Converts a sparse target and compares the peak of host memory with its bound."""
    plan = plan_target(sparse_target(out / "sparse", gigabytes), out / "target", dtype)
    before = peak()
    run(plan, "target", dry=False)
    bound = 2 * plan.largest + GIB
    print(
        f"{plan.num_bytes / GB:.2f} GB converted; host memory {peak() / GIB:.2f} GiB at its peak "
        f"({before / GIB:.2f} before), bound {bound / GIB:.2f} GiB (largest item "
        f"{plan.largest / GIB:.2f} GiB x 2 + 1)"
    )
    return 0 if peak() <= bound else 1


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = options.add_argument
    add("--target", type=Path, help="folder of the target; converted already or not")
    add("--draft", type=Path, help="folder of a draft for it; with --to-hf a converted one")
    add("--out", type=Path, required=True, help="folder to write target and draft into")
    add("--dtype", choices=[*sorted(MATRIX_DTYPES), FP8], default="bfloat16", help="of matrices")
    add("--shards", type=int, default=1, metavar="N", help="chunks of each large leaf, at least")
    add("--dry-run", action="store_true", help="print the plan and write nothing")
    add("--to-hf", action="store_true", help="write the draft's Hugging Face files; needs --target")
    add("--synthetic-gb", type=float, metavar="GB", help="measure memory on a sparse target")
    return options


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 above the memory bound, 2 for a caller's fault."""
    options = parser()
    arguments = options.parse_args(argv)
    if arguments.synthetic_gb is None and arguments.target is None:
        options.error("--target: expected a folder, got none")
    if arguments.to_hf and arguments.draft is None:
        options.error("--to-hf: expected with --draft, got none")
    try:
        if arguments.synthetic_gb is not None:
            return measure(arguments.out, arguments.synthetic_gb, arguments.dtype)
        if arguments.to_hf:
            draft_to_hf(arguments.draft, arguments.out, read_target_config(arguments.target))
            return 0
        _convert(arguments)
    except (ValueError, OSError) as error:
        print(f"convert_weights: error: {error}", file=sys.stderr)
        return 2
    return 0


def _convert(arguments: argparse.Namespace) -> None:
    """Plans both before either is written, so that a faulty draft costs no conversion."""
    plans = {}
    if not is_converted(arguments.target):
        out = arguments.out / "target"
        plans["target"] = plan_target(
            arguments.target, out, arguments.dtype, shards=arguments.shards
        )
    if arguments.draft is not None:
        config = read_target_config(arguments.target)
        out = arguments.out / "draft"
        dtype = "bfloat16" if arguments.dtype == FP8 else arguments.dtype
        plans["draft"] = plan_draft(arguments.draft, out, dtype, config, shards=arguments.shards)
    if not plans:
        raise ValueError("--target: expected Hugging Face files or a --draft, got converted ones")
    for name, plan in plans.items():
        run(plan, name, arguments.dry_run)


if __name__ == "__main__":
    sys.exit(main())
