"""The optimiser's loop: AdamW, warm-up and cosine, clipping, budgets in steps or seconds, resume.

A step is a pure function of (state, data, seed, step number): batches are drawn on the device from
a key folded with the step. So a run that is stopped and resumed does bit for bit what an
uninterrupted one does, order of data included.
"""

import dataclasses
import errno
import functools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import struct
from jax import lax

from dflash_jax.training.parameters import decayed
from dflash_jax.training.progress import Progress
from dflash_jax.training.results import replacing, seal, unseal

# (masters, data, key) -> scalar loss and named scalars or vectors.
LossFunction = Callable[[Any, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
CHECKPOINT = "checkpoint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How long and how fast.

    steps: optimiser steps; with `seconds` the most there may be.
    seconds: wall time after the first step's compilation, or None. The cosine then ends when the
      time does; the number of steps reached is part of the result, so that it can be repeated.
    """

    steps: int
    seconds: float | None = None
    learning_rate: float = 3e-3
    final_share: float = 0.02  # of the learning rate, at the last step
    warmup_steps: int = 100
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0
    log_every: int = 50
    save_every: int = 0  # steps between checkpoints; 0 writes none

    def of_a_step(self) -> "FitConfig":
        """The same with neutral budgets: what one step depends on, and its program with it."""
        return dataclasses.replace(self, steps=1, seconds=None, log_every=1, save_every=0)

    def __post_init__(self):
        for name in ("steps", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds: expected a positive number, got {self.seconds}")


@struct.dataclass
class FitState:
    """What a checkpoint holds.

    params: fp32 masters. optimizer: optax state. step: scalar int32, steps done.
    """

    params: Any
    optimizer: Any
    step: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
    """Fields:
      params: fp32 masters.
      steps: optimiser steps made.
      history: (step, metrics) at every log; none when a checkpoint was complete already.
      seconds: wall time of the loop without its first step.
    """

    params: Any
    steps: int
    history: list[tuple[int, dict[str, np.ndarray]]]
    seconds: float


def fit(
    loss: LossFunction, params, data, config: FitConfig, *,
    name: str = "fit", folder: str | Path | None = None, identity: dict | None = None,
) -> FitResult:
    """Minimises a loss; continues from `folder` when it holds a checkpoint.

    Args:
      loss: (masters, data, key) -> (scalar, metrics); the key is that of the step.
      params: fp32 masters to start from; donated.
      data: pytree of device arrays, the same at every step.
      folder: where checkpoints go and come from; None neither saves nor resumes.
      identity: what must be equal for a checkpoint to be continued, beside the config.
    Raises:
      ValueError: a checkpoint is damaged or belongs to another run (the field is named).
      FloatingPointError: the loss or its gradient is not finite; the last checkpoint stays.
    """
    state = FitState(
        params=params, optimizer=_optimizer(config).init(params), step=jnp.zeros((), jnp.int32)
    )
    progress, keeper = Progress(name), _Keeper(folder, config, identity or {})
    state, total = keeper.resume(state), config.steps
    history, clock, first = [], _Clock(config), True
    done = int(state.step)
    while done < total:
        count = 1 if first else min(config.log_every, total - done)
        state, metrics = train_steps(
            loss, config.of_a_step(), state, data, np.int32(total), np.int32(count)
        )
        done, first = done + count, False
        metrics = {key: np.asarray(value) for key, value in metrics.items()}
        total = clock.planned_steps(done, total)
        history.append((done, metrics))
        shown = {key: float(value) for key, value in metrics.items() if value.ndim == 0}
        progress.show(done, total, **shown)
        for number in ("loss", "gradient"):  # before a checkpoint holds what they did
            if not np.isfinite(metrics[number]):
                raise FloatingPointError(
                    f"{name}: {number}: expected a finite number after {done} steps, got "
                    f"{metrics[number]}; lower the learning rate, {config.learning_rate:g}"
                )
        keeper.save(state, done, progress, last=done >= total)
    return FitResult(params=state.params, steps=done, history=history, seconds=clock.elapsed)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_steps(loss: LossFunction, config: FitConfig, state: FitState, data, total, count):
    """`count` optimiser steps in one execution, and the metrics of the last.

    Args:
      total: scalar int32, the step at which the cosine ends.
      count: scalar int32, at least 1; an array, so that every count is one program.
    """
    step = jax.jit(functools.partial(_train_step, loss, config))
    empty = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, state, data, total)[1]
    )
    return lax.fori_loop(
        0, count, lambda _, carry: step(carry[0], data, total), (state, empty)
    )


def _train_step(loss: LossFunction, config: FitConfig, state: FitState, data, total):
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    grads, metrics = jax.grad(_named(loss), has_aux=True)(state.params, data, key)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts with floats
        updates, optimizer = _optimizer(config).update(grads, state.optimizer, state.params)
    rate = learning_rate(config, state.step, total)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    metrics |= {"gradient": optax.tree.norm(grads), "rate": rate}
    return FitState(params=params, optimizer=optimizer, step=state.step + 1), metrics


def learning_rate(config: FitConfig, step, total):
    """Linear warm-up, then a cosine to `final_share` of the peak at `total`."""
    step, total = step.astype(jnp.float32), jnp.asarray(total, jnp.float32)
    warmup = jnp.minimum(float(config.warmup_steps), 0.2 * total)
    risen = jnp.minimum((step + 1.0) / jnp.maximum(warmup, 1.0), 1.0)
    share = jnp.clip((step - warmup) / jnp.maximum(total - warmup, 1.0), 0.0, 1.0)
    fallen = config.final_share + (1.0 - config.final_share) * 0.5 * (1 + jnp.cos(jnp.pi * share))
    return config.learning_rate * risen * fallen


def abstract_state(params, config: FitConfig) -> FitState:
    """Shapes of the state, to compile a step ahead of time."""
    return jax.eval_shape(
        lambda p: FitState(
            params=p, optimizer=_optimizer(config).init(p), step=jnp.zeros((), jnp.int32)
        ),
        params,
    )


def _optimizer(config: FitConfig) -> optax.GradientTransformation:
    """AdamW up to the learning rate, which `train_step` applies."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(*config.betas),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
    )


def _named(loss: LossFunction):
    def with_loss(params, data, key):
        value, metrics = loss(params, data, key)
        return value, {"loss": value, **metrics}

    return with_loss


class _Clock:
    """Re-plans the number of steps so that a budget in seconds is met."""

    def __init__(self, config: FitConfig):
        self._config = config
        self._start: float | None = None
        self._first = 0
        self.elapsed = 0.0

    def planned_steps(self, done: int, total: int) -> int:
        """Steps of the whole run, after `done` steps whose results have arrived."""
        now = time.monotonic()
        if self._start is None:  # the first step holds the compilation
            self._start, self._first = now, done
            return total
        self.elapsed = now - self._start
        if self._config.seconds is None:
            return total
        pace = self.elapsed / (done - self._first)
        left = max(self._config.seconds - self.elapsed, 0.0)
        return min(self._config.steps, done + int(left / pace))


class _Keeper:
    """Writes and finds checkpoints in FOLDER/checkpoint."""

    def __init__(self, folder, config: FitConfig, identity: dict):
        self._folder = None if folder is None else Path(folder).absolute() / CHECKPOINT
        self._every = config.save_every
        # A budget may be extended; everything else decides what a step does.
        settings = dataclasses.asdict(config.of_a_step())
        settings["betas"] = list(settings["betas"])
        self._identity = {**settings, **identity}
        self._saved = 0

    def resume(self, state: FitState) -> FitState:
        """The saved state, or what was given when there is none."""
        if self._folder is None or not self._folder.exists():
            return state
        facts = unseal(self._folder)
        for name, value in self._identity.items():
            if (got := facts.get("identity", {}).get(name)) != value:
                raise ValueError(f"{name}: expected {value!r} (this run), got {got!r} in "
                                 f"{self._folder}")
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype,
                                                             sharding=x.sharding), state)
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(self._folder / "state", shapes)
        self._saved = int(state.step)
        return state

    def save(self, state: FitState, done: int, progress: Progress, *, last: bool) -> None:
        """Saves when it is time to. A full disk is reported, and training goes on."""
        due = self._every and (last or done - self._saved >= self._every)
        if self._folder is None or not due:
            return
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        try:
            with replacing(self._folder, need_bytes=2 * size) as partial:
                with ocp.StandardCheckpointer() as checkpointer:
                    checkpointer.save(partial / "state", state)
                seal(partial, {"step": done, "identity": self._identity})
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            progress.say(f"no checkpoint at step {done}: {error}")
        self._saved = done


def discard_checkpoint(folder: str | Path) -> None:
    """Removes a finished run's checkpoint, and its folder if nothing else is in it."""
    folder = Path(folder)
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
