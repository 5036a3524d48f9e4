"""Loading into given shardings over several devices, from either kind of folder."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 4)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from dflash_jax.config import DtypePolicy
from dflash_jax.weights import load_target
from dflash_jax.weights.conversion import convert, plan_target

folder, out = sys.argv[1:]
mesh = Mesh(np.array(jax.devices()), ("rows",))

def shardings(path, shape):
    split = len(shape) == 2 and shape[0] % 4 == 0
    return NamedSharding(mesh, PartitionSpec("rows" if split else None))

convert(plan_target(folder, out, "bfloat16"))
whole = jax.tree.leaves(load_target(folder, DtypePolicy())[1])
for where in (folder, out):
    parts = jax.tree.leaves(load_target(where, DtypePolicy(), shardings=shardings)[1])
    split = 0
    for part, leaf in zip(parts, whole, strict=True):
        assert np.asarray(part).tobytes() == np.asarray(leaf).tobytes()
        local = {shard.data.nbytes for shard in part.addressable_shards}
        if leaf.ndim == 2 and leaf.shape[0] % 4 == 0:
            assert local == {leaf.nbytes // 4}  # no device holds more than its quarter
            split += 1
    assert split > 20, split
print("ok")
"""


def test_each_device_holds_its_part_and_no_more(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "dflash_jax/assets/target"), tmp_path / "out"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "ok"
