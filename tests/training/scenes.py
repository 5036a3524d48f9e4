"""A tiny target, its own text and features, and drafts: shared by the tests of training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftKind, DtypePolicy, RunConfig, tiny_draft, tiny_target
from dflash_jax.steps import Models, Params
from dflash_jax.training.fit import FitConfig
from dflash_jax.training.forward import target_forward, training_dtypes
from dflash_jax.training.parameters import (
    draft_params,
    start_draft,
    start_target,
    target_params,
)
from dflash_jax.training.stages import DraftObjective, draft_data

K, LENGTH, PROMPT = 7, 48, 16
EXACT = DtypePolicy.exact()
DTYPES = training_dtypes("float32")
TARGET = tiny_target(tie_embeddings=True)
DRAFTS = {
    "dflash": tiny_draft(DraftKind.DFLASH),
    "dflash2": tiny_draft(DraftKind.DFLASH2),
    "dflash-causal": tiny_draft(DraftKind.DFLASH, causal=(True, False)),
}


@functools.cache
def target():
    """Module parameters of a fresh target."""
    return target_params(TARGET, start_target(TARGET, 0), EXACT)


@functools.cache
def tokens(rows: int = 2) -> np.ndarray:
    """[rows, LENGTH] int32 public ids."""
    drawn = np.random.default_rng(7).integers(0, TARGET.public_vocab, (rows, LENGTH))
    return drawn.astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def _features(layer_ids, params, ids):
    return target_forward(TARGET, DTYPES, params, ids, capture=layer_ids).features


def features(draft, ids):
    """Features of [N, T] ids for a draft's captured blocks."""
    return _features(draft.target_layer_ids, target(), jnp.asarray(ids))


def shaken_draft(name: str, seed: int = 3):
    """Masters of a draft in which nothing is neutral any more: norms, kernels and convolutions."""
    master = start_draft(DRAFTS[name], seed)
    leaves, tree = jax.tree.flatten(master)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(key, x.shape, x.dtype)
             for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


def objective(name: str, **sizes) -> DraftObjective:
    fields = {"batch": 1, "blocks": 12, "prompt": PROMPT, "gamma": 4.0} | sizes
    return DraftObjective(
        target=TARGET, draft=DRAFTS[name], dtypes=DTYPES, draft_tokens=K, **fields
    )


def data(name: str, ids):
    return draft_data(TARGET, target(), ids, features(DRAFTS[name], ids))


def models(name: str, batch: int = 1) -> Models:
    """A float32 pair whose context is longer than the local window."""
    run = RunConfig(
        draft_tokens=K, batch=batch, max_context=64, page_size=16, chunk=PROMPT, dtypes=EXACT
    )
    return Models(TARGET, DRAFTS[name], run)


def pair(name: str, master) -> Params:
    return Params(target=target(), draft=draft_params(DRAFTS[name], master, EXACT))


def quick(**fields) -> FitConfig:
    defaults = {"steps": 6, "learning_rate": 1e-3, "warmup_steps": 2, "log_every": 2}
    return FitConfig(**(defaults | fields))
