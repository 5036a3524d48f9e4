"""Settings every test runs under: CPU unless ``--gpu``, and no silent casts."""

import gc
import os
from pathlib import Path

# Read when jax looks for its plugins: a CUDA plugin may be installed, for its compiler, without a
# driver.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import pytest

# Linux lets a process map 65530 regions; XLA's CPU programs take some dozens each, and a process
# that has compiled thousands of them ends in a segmentation fault.
MOST_REGIONS = 24_000
REGIONS = Path("/proc/self/maps")

# Mixed dtypes must be an error in a test: a silent promotion hides a missing, named rounding.
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="also run the tests that need a GPU")


def pytest_configure(config):
    if not config.getoption("--gpu"):
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
