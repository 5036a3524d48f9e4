"""Shapes of a pair's parameters, and random values for tests and benchmarks."""

import functools

import jax
import jax.numpy as jnp

from dflash_jax.draft import DraftColumns
from dflash_jax.state.draft_context import DraftContext
from dflash_jax.state.target import TargetState
from dflash_jax.steps.models import Models, Params
from dflash_jax.target import TargetColumns


def abstract_params(models: Models) -> Params:
    """Every parameter of the pair as `jax.ShapeDtypeStruct`; nothing is computed."""
    return jax.eval_shape(functools.partial(_init, models), jax.random.key(0))


def random_params(models: Models, seed: int) -> Params:
    """Random parameters made on the default device, one small program per distinct leaf shape.

    Matrices have variance 1 / fan_in; norms and other vectors have their neutral value plus noise,
    so that no factor is invisible to a comparison. Draft id maps count up.
    """
    abstract = abstract_params(models)
    leaves, tree = jax.tree.flatten_with_path(abstract)
    made = []
    for index, (path, leaf) in enumerate(leaves):
        key = jax.random.fold_in(jax.random.key(seed), index)
        made.append(_leaf(key, leaf.shape, leaf.dtype, _centre(path)))
    return jax.tree.unflatten(tree, made)


def _centre(path) -> float:
    """1 for factors that are whole (plain norms, tap 0 aside), 0 for everything else."""
    names = [getattr(entry, "key", getattr(entry, "name", "")) for entry in path]
    whole = names[0] == "draft" or "delta_net" in names
    return 1.0 if whole and ("norm" in names[-2] or "norm" in names[-1]) else 0.0


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "centre"))
def _leaf(key, shape, dtype, centre):
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.arange(shape[0], dtype=dtype)
    scale = 0.1 if len(shape) == 1 or centre else shape[-1] ** -0.5
    return (centre + scale * jax.random.normal(key, shape, dtype)).astype(dtype)


def _init(models: Models, key) -> Params:
    """Runs every submodule once at the smallest shapes, which declares all parameters."""
    dtype = models.run.dtypes.activation_dtype
    number = jnp.zeros((1,), jnp.int32)
    table = jnp.zeros((1, models.run.max_pages), jnp.int32)
    columns = TargetColumns.chained(
        positions=jnp.zeros((1, 1, 3), jnp.int32), frontier=number, live=number, table=table,
        slot=number,
    )
    state = TargetState.zeros(models.target, models.run)
    column = jnp.zeros((1, 1, models.target.hidden), dtype)
    target = models.target_module.init(key, column, columns, state, method="verify")["params"]
    if models.draft is None:
        return Params(target=target, draft={})

    width = models.run.block_width
    block = DraftColumns(
        positions=jnp.zeros((1, width), jnp.int32), frontier=number, live=number, slot=number,
        table=table,
    )
    context = DraftContext.zeros(models.draft, models.run)

    def touch(module, embedded, features):
        module.context_kv(features, block.positions[:, :1])
        output = module.block_hidden(embedded, block, context)
        if models.whole_block:
            head = jnp.zeros((models.target.vocab_rows, models.target.hidden), embedded.dtype)
            found = module.topk(output.hidden, head, models.target.public_vocab)
            module.edges(output.hidden, found, number)
        else:
            module.head.argmax(output.hidden, target["embedding"], models.target.public_vocab)

    embedded = jnp.zeros((1, width, models.target.hidden), dtype)
    features = jnp.zeros((1, 1, models.draft.feature_width), dtype)
    draft = models.draft_module.init(key, embedded, features, method=touch)["params"]
    return Params(target=target, draft=draft)
