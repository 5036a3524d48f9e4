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


def choose_form(op: str, implementation: str, lacking: str | None, *, auto_gpu: str = "xla") -> str:
    """The form of an op that has a kernel: "xla", "pallas" or "interpret".

    Args:
      op: its name, for errors.
      implementation: one of the three, or "auto". Static.
      lacking: what the kernel takes and got instead, or None if it takes this call.
      auto_gpu: what "auto" means on a GPU; elsewhere, and where the kernel lacks the call, "xla".
    Raises: ValueError for another name; NotImplementedError if a named kernel lacks the call.
    """
    form = choose(implementation, gpu=auto_gpu if lacking is None else "xla", other="xla")
    if form not in ("xla", "pallas", "interpret"):
        raise ValueError(
            f"implementation: expected auto, xla, pallas or interpret, got {implementation!r}"
        )
    if form != "xla" and lacking is not None:
        raise NotImplementedError(f"{op}: the kernel takes {lacking}")
    return form
