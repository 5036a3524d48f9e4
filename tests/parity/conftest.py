"""The published implementations, imported only where a parity test runs."""

from types import SimpleNamespace

import pytest

WHY = "parity tests compare with {0}, which is not installed: pip install 'dflash_jax[parity]'"


@pytest.fixture(scope="session")
def published():
    """torch, and the modules that write and run the published models."""
    for name in ("torch", "transformers", "dflash"):
        pytest.importorskip(name, reason=WHY.format(name))
    import dflash.model
    import torch

    from tests.parity import reference, writers

    torch.set_num_threads(1)
    return SimpleNamespace(torch=torch, dflash=dflash.model, reference=reference, writers=writers)
