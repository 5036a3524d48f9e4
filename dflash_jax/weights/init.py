"""Random parameters for demos and tests: shapes by the tables, scales that keep a model healthy.

Branches add a bounded share to the residual stream, logits have a spread of a few units (neither
uniform nor one-hot), and GDN decays range from short to long memory. Nothing is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from dflash_jax.config import DraftConfig, DtypePolicy, TargetConfig
from dflash_jax.weights import names
from dflash_jax.weights.convert import insert, place
from dflash_jax.weights.leaves import PlannedLeaf, Storage

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

LOGIT_SPREAD = 3.0  # standard deviation of logits of a normed hidden vector
# Gain of the last projection of a branch times sqrt(branches): the branches together then change
# the residual stream about as much as the embedding gave it.
BRANCH_GAIN = 3.0


def random_target(config: TargetConfig, policy: DtypePolicy, *, seed: int) -> dict:
    """Parameters of a target on the default device, a function of config, policy and seed.

    Raises: ValueError for a config with float8 matrices.
    """
    _refuse_fp8(config)
    leaves, _ = names.target_plan(config)
    depth = 2 * config.num_layers
    norm = _around(0.0, 0.1)  # stored as w of (1 + w)
    exceptions = {"delta_net/norm": _around(1.0, 0.1)}
    if config.tie_embeddings:
        exceptions["embedding"] = _matrix(LOGIT_SPREAD)
    return _fill(leaves, policy, seed, depth, norm, exceptions)


def _refuse_fp8(config: TargetConfig) -> None:
    if config.fp8 is not None:
        raise ValueError(f"fp8: expected none, got {config.fp8.count} matrices")


def random_draft(config: DraftConfig, policy: DtypePolicy, *, seed: int) -> dict:
    """Parameters of a draft that uses the target's embedding and head; see `random_target`.

    Raises: ValueError if the config has an own head, which needs an id map.
    """
    if config.head_rows:
        raise ValueError(f"head_rows: expected 0, got {config.head_rows}")
    leaves, _ = names.draft_plan(config)
    params = _fill(leaves, policy, seed, 2 * config.draft_layers, _around(1.0, 0.1), exceptions={})
    _copy_context(config, params)
    return params


def _copy_context(config: DraftConfig, params: dict) -> None:
    """The context projections repeat the layers' key and value rows, as in loaded files."""
    layers = [params[f"layers_{i}"]["attention"] for i in range(config.draft_layers)]
    start = config.query_heads * config.head_dim
    rows = [np.asarray(layer["qkv"]["kernel"])[start:] for layer in layers]
    params["context"]["key_value"]["kernel"] = place(np.concatenate(rows))
    norms = [np.asarray(layer["key_norm"]["weight"]) for layer in layers]
    params["context"]["key_norm"] = place(np.stack(norms))


def _fill(
    leaves: list[PlannedLeaf],
    policy: DtypePolicy,
    seed: int,
    depth: int,
    norm: Draw,
    exceptions: dict[str, Draw],
) -> dict:
    rng, params = np.random.default_rng(seed), {}
    for leaf in leaves:
        path = "/".join(leaf.path)
        draw = next((d for part, d in exceptions.items() if part in path), None)
        draw = draw or _draw(path, depth, norm)
        dtype = policy.param_dtype if leaf.storage is Storage.MATRIX else np.dtype("float32")
        insert(params, leaf.path, place(draw(rng, leaf.shape).astype(dtype)))
    return params


def _draw(path: str, depth: int, norm: Draw) -> Draw:
    """The law of one leaf, by the end of its path."""
    if path.endswith(("output/kernel", "down/kernel", "moe/down")):
        return _matrix(BRANCH_GAIN / math.sqrt(depth))
    if path == "head":
        return _matrix(LOGIT_SPREAD)
    if path.startswith("embedding"):
        return _around(0.0, 1.0)
    if path.endswith("A_log"):
        return lambda rng, shape: np.log(rng.uniform(0.25, 4.0, shape))
    if path.endswith("dt_bias"):
        return lambda rng, shape: rng.uniform(-4.0, 0.0, shape)
    if path.endswith("delta_net/conv"):
        return _taps(newest=-1, axis=-1)
    if path.endswith("/base"):
        return _taps(newest=0, axis=-2)
    if path.endswith("conv/projection/kernel"):
        return _matrix(0.1)
    if path.startswith(("selector/predecessor", "selector/successor")):
        # E adds sum_r pred * g * succ over R ranks: R^(-1/4) each makes the sum of order one.
        return lambda rng, shape: rng.standard_normal(shape) * shape[-1] ** -0.25
    if "norm" in path:
        return norm
    return _matrix(1.0)


def _matrix(gain: float) -> Draw:
    """Normal entries; outputs have standard deviation `gain` for unit inputs."""
    return lambda rng, shape: rng.standard_normal(shape) * (gain / math.sqrt(shape[-1]))


def _around(centre: float, spread: float) -> Draw:
    return lambda rng, shape: centre + spread * rng.standard_normal(shape)


def _taps(newest: int, axis: int) -> Draw:
    """Short kernels: one at the current position, a tenth of noise everywhere."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        taps = 0.1 * rng.standard_normal(shape)
        np.moveaxis(taps, axis, 0)[newest] += 1.0
        return taps

    return draw
