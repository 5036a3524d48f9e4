"""Settings every test runs under: CPU unless ``--gpu``, and no silent casts."""

import jax
import pytest

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


@pytest.fixture(scope="session")
def repository_root(pytestconfig):
    """The folder that holds ``pyproject.toml``."""
    return pytestconfig.rootpath
