"""Parameters without files: their shapes, and random values for tests and benchmarks."""

import functools
import zlib

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftKind
from dflash_jax.draft import DraftColumns
from dflash_jax.layers import matrix_init, scale_init
from dflash_jax.steps.models import Models, Params
from dflash_jax.target import TargetColumns


@functools.lru_cache(maxsize=8)
def abstract_params(models: Models) -> Params:
    """Shape and dtype of every parameter of a pair, at no cost in memory.

    Returns:
      `Params` of `jax.ShapeDtypeStruct`; draft is empty without a draft.
    """
    draft = {} if models.draft is None else _draft_shapes(models)
    return Params(target=_target_shapes(models), draft=draft)


def random_params(models: Models, seed: int) -> Params:
    """Random parameters of every shape, drawn leaf by leaf on the default device.

    Matrices have variance 1 / fan_in; scales and decays lie near those of trained models, so that
    a large model stays finite. The same seed and path give the same leaf in every pair.

    Args:
      seed: 32-bit.
    """
    key = jax.random.key(seed)

    def leaf(path, like):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        leaf_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return _draw(leaf_key, _kind(name.split("/")), like.shape, like.dtype)

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(models))


def _target_shapes(models: Models):
    run, hidden = models.run, models.target.hidden
    one = jnp.zeros((1,), jnp.int32)

    def everything(module, x, columns, state):
        return module.logits(module.verify(x, columns, state).hidden)

    def variables():
        columns = TargetColumns.chained(
            positions=jnp.zeros((1, 1, 3), jnp.int32), frontier=one, live=one,
            table=jnp.zeros((1, run.max_pages), jnp.int32), slot=one,
        )
        x = jnp.zeros((1, 1, hidden), run.dtypes.activation_dtype)
        state = models.zeros().target
        return models.target_module.init(jax.random.key(0), x, columns, state, method=everything)

    return jax.eval_shape(variables)["params"]


def _draft_shapes(models: Models):
    run, target, config = models.run, models.target, models.draft
    one = jnp.zeros((1,), jnp.int32)

    def everything(module, x, features, columns, context):
        module.context_kv(features, columns.positions)
        hidden = module.block_hidden(x, columns, context).hidden
        head = jnp.zeros((target.vocab_rows, target.hidden), run.dtypes.param_dtype)
        if config.kind == DraftKind.DFLASH:
            return module.argmax(hidden, head, target.public_vocab)
        candidates = module.topk(hidden, head, target.public_vocab)
        return module.edges(hidden, candidates, one)

    def variables():
        width, dtype = run.block_width, run.dtypes.activation_dtype
        columns = DraftColumns(
            positions=jnp.zeros((1, width), jnp.int32), frontier=one, live=one, slot=one,
            table=jnp.zeros((1, run.max_pages), jnp.int32),
        )
        x = jnp.zeros((1, width, target.hidden), dtype)
        features = jnp.zeros((1, width, config.feature_width), dtype)
        return models.draft_module.init(
            jax.random.key(0), x, features, columns, models.zeros().context, method=everything
        )

    return jax.eval_shape(variables)["params"]


def _kind(names: list[str]) -> str:
    """How a leaf is drawn, from its path."""
    last = names[-1]
    if last in ("A_log", "dt_bias", "token_ids", "base"):
        return last
    if last.endswith("scale"):
        return "block scale"
    if last not in ("weight", "key_norm"):
        return "matrix"
    # Target norms scale by 1 + weight, except the output norm of the delta net.
    return "offset" if names[0] == "target" and "delta_net" not in names else "scale"


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key, kind: str, shape, dtype):
    if kind == "matrix":
        return matrix_init(key, shape, dtype)
    if kind == "block scale":
        return scale_init(key, shape, dtype)
    if kind == "token_ids":
        return jnp.arange(*shape, dtype=dtype)
    noise = 0.1 * jax.random.normal(key, shape, jnp.float32)
    if kind == "base":
        noise = noise.at[:, 0].add(1.0)
    elif kind == "scale":
        noise = noise + 1.0
    elif kind == "A_log":
        noise = 10.0 * noise - 1.0
    return noise.astype(dtype)
