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


def choose_form(
    op: str, implementation: str, lacking: str | None, *, auto_gpu: str = "xla", more=None
) -> str:
    """The form of an op that has a kernel: "xla", "pallas" or "interpret", or one of `more`.

    Args:
      op: its name, for errors.
      implementation: one of them, or "auto". Static.
      lacking: what the kernel takes and got instead, or None if it takes this call.
      auto_gpu: what "auto" means on a GPU; elsewhere, and where the kernel lacks the call, "xla".
      more: further forms of this op, each with what it lacks.
    Raises: ValueError for another name; NotImplementedError if a named kernel lacks the call.
    """
    lacks = {"xla": None, "pallas": lacking, "interpret": lacking} | (more or {})
    gpu = auto_gpu if lacks[auto_gpu] is None else "xla"
    form = choose(implementation, gpu=gpu, other="xla")
    if form not in lacks:
        names = ", ".join(["auto", *lacks][:-1])
        raise ValueError(
            f"implementation: expected {names} or {[*lacks][-1]}, got {implementation!r}"
        )
    if lacks[form] is not None:
        raise NotImplementedError(f"{op}: the kernel takes {lacks[form]}")
    return form
