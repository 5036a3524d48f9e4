"""Settings every test runs under: CPU unless ``--gpu``, and no silent casts."""

import gc
import os
from pathlib import Path

# Read when jax looks for its plugins: a CUDA plugin may be installed, for its compiler, without a
# driver.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import pytest

# Linux lets a process map 65530 regions; XLA's CPU programs take a dozen or more each, and a
# process that has compiled thousands of them ends in a segmentation fault. At this many, a worker
# holds 2.5 GB.
MOST_REGIONS = 12_000
REGIONS = Path("/proc/self/maps")

# Most of the suite's time is compilation, of programs that then run for milliseconds: XLA writes
# simpler code for a CPU in a third of the time. What a program computes, aliases and copies is
# decided before that.
QUICK_TO_COMPILE = [
    "--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1",
]
if jax.__version_info__ < (0, 11):  # later versions always use fusion emitters, and know no flag
    QUICK_TO_COMPILE.append("--xla_cpu_use_fusion_emitters=false")

# Tracing makes very many objects that live as long as the process; looking through them for
# cycles as often as Python does by itself takes some percent of the suite.
OBJECTS_BEFORE_COLLECTION = 100_000

# Mixed dtypes must be an error in a test: a silent promotion hides a missing, named rounding.
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="also run the tests that need a GPU")


def pytest_configure(config):
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
    if not config.getoption("--gpu"):
        # Read when the first program is compiled. Flags that are set outside come last and win.
        os.environ["XLA_FLAGS"] = " ".join([*QUICK_TO_COMPILE, os.environ.get("XLA_FLAGS", "")])
        jax.config.update("jax_platforms", "cpu")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--gpu"):
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu:
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """Forgets compiled programs between modules when the process holds very many."""
    yield
    if REGIONS.exists() and REGIONS.read_bytes().count(b"\n") > MOST_REGIONS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def repository_root(pytestconfig):
    """The folder that holds ``pyproject.toml``."""
    return pytestconfig.rootpath
