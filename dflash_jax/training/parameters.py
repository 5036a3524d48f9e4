"""Parameters while they are trained: fp32 masters, where they start, what the modules are given.

A master tree is the library's parameter tree in fp32 without the leaves that are copies of others
(a draft's fused context K/V), so that every number of it exists once and receives the gradient of
all its uses.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig, DtypePolicy, TargetConfig
from dflash_jax.layers import matrix_init
from dflash_jax.weights import names
from dflash_jax.weights.convert import insert
from dflash_jax.weights.leaves import PlannedLeaf, Storage

# Decay rates and steps of a fresh Gated DeltaNet: memories of a few to a few thousand tokens.
RATE_RANGE = (1.0, 16.0)
STEP_RANGE = (1e-3, 1e-1)


def start_target(config: TargetConfig, seed: int) -> dict:
    """Fresh fp32 masters of a target: norms neutral, branches small at the output, GDN memories
    spread out."""
    return _start(names.target_plan(config)[0], seed, 2 * config.num_layers, offset_norms=True)


def start_draft(config: DraftConfig, seed: int) -> dict:
    """Fresh fp32 masters of a draft: norms neutral, every convolution the identity.

    Raises: ValueError if the config asks for an embedding or a head of the draft's own.
    """
    for name, own in (("own_embedding", config.own_embedding), ("head_rows", config.head_rows)):
        if own:
            raise ValueError(f"{name}: expected none (a draft is trained with its target's), "
                             f"got {own}")
    return _start(names.draft_plan(config)[0], seed, 2 * config.draft_layers, offset_norms=False)


def masters(leaves: list[PlannedLeaf], params) -> dict:
    """fp32 masters of existing parameters."""
    tree = {}
    for leaf in leaves:
        if not leaf.copy:
            insert(tree, leaf.path, jnp.asarray(_at(params, leaf.path), jnp.float32))
    return tree


def target_params(config: TargetConfig, master, dtypes: DtypePolicy) -> dict:
    """The target module's parameters: matrices rounded to the param dtype. Differentiable."""
    return _lowered(names.target_plan(config)[0], master, dtypes)


def draft_params(config: DraftConfig, master, dtypes: DtypePolicy) -> dict:
    """The draft module's parameters, context copies included. Differentiable."""
    tree = _lowered(names.draft_plan(config)[0], master, dtypes)
    first = config.query_heads * config.head_dim
    layers = [tree[f"layers_{i}"]["attention"] for i in range(config.draft_layers)]
    tree["context"] |= {
        "key_value": {
            "kernel": jnp.concatenate([layer["qkv"]["kernel"][first:] for layer in layers])
        },
        "key_norm": jnp.stack([layer["key_norm"]["weight"] for layer in layers]),
    }
    return tree


def count(master) -> int:
    """Numbers in a master tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(master))


def decayed(master):
    """Which leaves weight decay applies to: matrices, not norms, kernels or gate constants."""

    def is_matrix(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return leaf.ndim == 2 and not name.endswith("delta_net/conv")

    return jax.tree_util.tree_map_with_path(is_matrix, master)


def _start(leaves: list[PlannedLeaf], seed: int, branches: int, *, offset_norms: bool) -> dict:
    keys = iter(jax.random.split(jax.random.key(seed), len(leaves)))
    tree = {}
    for leaf in leaves:
        key = next(keys)
        if not leaf.copy:
            path = "/".join(leaf.path)
            insert(tree, leaf.path, _draw(path, key, leaf.shape, branches, offset_norms))
    return tree


def _draw(path: str, key, shape: tuple[int, ...], branches: int, offset_norms: bool):
    if path.endswith(("output/kernel", "down/kernel", "moe/down")):
        return matrix_init(key, shape, jnp.float32) * branches**-0.5
    if path.endswith("conv/projection/kernel"):
        return jnp.zeros(shape, jnp.float32)
    if path.endswith("/base"):
        return jnp.zeros(shape, jnp.float32).at[:, 0].set(1.0)
    if path.endswith("A_log"):
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, *RATE_RANGE))
    if path.endswith("dt_bias"):
        low, high = np.log(STEP_RANGE)
        step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
        return jnp.log(jnp.expm1(step))  # softplus of it is the step
    if path.endswith(("norm/weight", "key_norm")):
        neutral = 0.0 if offset_norms and "delta_net" not in path else 1.0
        return jnp.full(shape, neutral, jnp.float32)
    if path in ("selector/predecessor", "selector/successor"):
        # Products of three such factors over R ranks start far below the head's scores.
        return 0.1 * jax.random.normal(key, shape, jnp.float32)
    return matrix_init(key, shape, jnp.float32)


def _lowered(leaves: list[PlannedLeaf], master, dtypes: DtypePolicy) -> dict:
    tree = {}
    for leaf in leaves:
        if leaf.copy:
            continue
        value = _at(master, leaf.path)
        if leaf.storage is Storage.MATRIX:
            value = value.astype(dtypes.param_dtype)
        insert(tree, leaf.path, value)
    return tree


def _at(tree, path: tuple[str, ...]):
    for key in path:
        tree = tree[key]
    return tree
