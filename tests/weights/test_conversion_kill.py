"""What a conversion survives and what it costs, measured in processes of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.config import tiny_target
from dflash_jax.weights import names
from dflash_jax.weights.export import target_json

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def program(*arguments):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_j23_a_kill_at_a_random_point_always_resumes_to_equal_bytes(tmp_path, dtype):
    """Twenty kills; each is followed by a run whose manifest and tensors equal the reference's."""
    folder = ROOT / "dflash_jax/assets/target"
    out = program("-m", "tests.weights.killing", folder, tmp_path, 20, dtype)
    kills, under_way, resumed = map(int, re.findall(r"\d+", out))
    # Where a kill falls is the machine's affair; a few have to fall into the work.
    assert kills == 20 and under_way >= 4 and resumed >= 2, out


def big_target(folder):
    """640 MB of random finite bfloat16 in 10 items of about 65 MB."""
    config = tiny_target(
        hidden=1024, vocab_rows=32768, public_vocab=32768, intermediate=10240,
        layer_types=tiny_target().layer_types * 2,
    )  # fmt: skip
    rng, header, end = np.random.default_rng(0), {}, 0
    for leaf in names.target_plan(config)[0]:
        for part in leaf.layouts[0]:
            size = 2 * int(np.prod(part.shape))
            place = {"dtype": "BF16", "shape": part.shape, "data_offsets": [end, end + size]}
            if part.name not in header:
                header[part.name], end = place, end + size
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(target_json(config)))
    with open(folder / "model.safetensors", "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, 1 << 24):
            bits = np.frombuffer(rng.bytes(min(1 << 24, end - start)), np.uint16)
            stream.write((bits & 0xBFFF).tobytes())  # no exponent of all ones: finite


MEASURE = """
import resource, sys
from pathlib import Path
from dflash_jax.weights.conversion import convert, plan_target
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small, folder, out = sys.argv[1:]
convert(plan_target(small, Path(out) / "small", "bfloat16"))
plan = plan_target(folder, Path(out) / "big", "bfloat16")
before = peak()
convert(plan)
print(plan.num_bytes, plan.largest, peak() - before)
"""


def test_host_memory_is_bounded_by_the_largest_item_not_by_the_model(tmp_path):
    big_target(tmp_path / "model")
    kit = ROOT / "tests/data/kit_tiny/targets/tiny"
    out = program("-c", MEASURE, kit, tmp_path / "model", tmp_path / "out")
    total, largest, more = map(int, out.split())
    assert total > 9 * largest
    assert more <= 2 * largest + (288 << 20) < total, out
