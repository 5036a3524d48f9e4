"""Chooses the implementation of an op: a named one exactly, or `auto` by device."""

import jax


def choose(implementation: str, *, gpu: str, other: str) -> str:
    """The name of the implementation to run.

    Args:
      implementation: "auto", or a name that the op lists. Static.
      gpu, other: what "auto" means on a GPU and elsewhere.
    Returns:
      `implementation` unchanged, or what "auto" stands for. A named choice never falls back.
    """
    if implementation != "auto":
        return implementation
    return gpu if jax.default_backend() == "gpu" else other
