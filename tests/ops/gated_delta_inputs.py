"""Inputs of the gated delta rule for its tests: columns, states, trees, poison."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.gated_delta_rule import (
    gated_delta_fold,
    gated_delta_prefill,
    gated_delta_verify,
)
from tests.oracles import gated_delta_rule as oracle

# Dk is a power of four, so that 1/sqrt(Dk) is exact; Dk != Dv shows a missing transpose. Both are
# powers of two of at least 16, which the kernel takes.
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 16, 32
WIDTH = 6
# Parents of column 0..5, one tree a row: a chain, a star, and three with side branches.
TREES = np.array(
    [
        [0, 0, 1, 2, 3, 4],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 1, 2, 1, 4],
        [0, 0, 0, 2, 1, 3],
        [0, 0, 1, 1, 1, 0],
    ],
    np.int32,
)
CHAIN = np.broadcast_to(TREES[0], TREES.shape)
BATCH = len(TREES)

# Implementations.
FORMS = pytest.mark.parametrize(
    "form", ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
# The same with the width of a value: 5 fills no vector of the processor, so that a step compiled in
# two ways shows in the last bits.
FORMS_BY_WIDTH = pytest.mark.parametrize(
    "form, value_dim",
    [
        ("xla", 5),
        ("xla", VALUE_DIM),
        ("interpret", VALUE_DIM),
        pytest.param("pallas", VALUE_DIM, marks=pytest.mark.gpu),
    ],
)
POISON = pytest.mark.parametrize("poison", ["nan", "largest", "inf"])


@dataclasses.dataclass
class Columns:
    """Inputs of B rows and T columns, leading axes [B, T]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    decay: np.ndarray

    def map(self, function):
        return Columns(*(function(x) for x in self.all()))

    def all(self):
        return self.query, self.key, self.value, self.decay

    def read(self):
        """What verification reads: queries and keys normalised, but for poison, which stays."""
        query, key = (_unit(x) for x in (self.query, self.key))
        return query * np.float32(query.shape[-1] ** -0.5), key, self.value, self.decay


def _unit(x):
    usual = np.abs(x.astype(np.float64)) < 1e30
    wide = np.where(usual, x, 0.0)
    unit = wide / np.sqrt(np.sum(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return np.where(usual, unit, x).astype(np.float32)


def make_columns(batch, length, *, value_dim=VALUE_DIM, seed=0, dtype="bfloat16"):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal((batch, length, *shape)).astype(jnp.dtype(dtype))

    heads = (batch, length, VALUE_HEADS)
    gates = [-rng.exponential(0.5, heads), rng.uniform(0.0, 1.0, heads)]
    return Columns(
        query=normal(KEY_HEADS, KEY_DIM),
        key=normal(KEY_HEADS, KEY_DIM),
        value=normal(VALUE_HEADS, value_dim),
        decay=np.stack(gates, axis=-1).astype(np.float32),
    )


def make_state(batch, *, value_dim=VALUE_DIM, seed=1):
    shape = (batch, VALUE_HEADS, value_dim, KEY_DIM)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def poisoned(columns, live, poison):
    """The same columns with every one from live[b] on destroyed."""

    def destroy(x):
        value = {"nan": np.nan, "inf": -np.inf, "largest": float(jnp.finfo(x.dtype).max)}[poison]
        x = x.copy()
        for b, count in enumerate(live):
            x[b, count:] = value
        return x

    return columns.map(destroy)


@functools.cache
def compiled_verify(chain, form):
    return jax.jit(functools.partial(gated_delta_verify, chain=chain, implementation=form))


@functools.cache
def compiled_fold(form):
    """Of the states alone, beside a convolution of seven channels."""
    def states(key, delta, decay, recurrent, *rest):
        inputs = jnp.zeros((*key.shape[:2], 7), jnp.bfloat16)
        conv = jnp.zeros((len(recurrent), 3, 7), jnp.bfloat16)
        return gated_delta_fold(
            key, delta, decay, inputs, recurrent, conv, *rest, implementation=form
        )[0]

    return jax.jit(states)


@functools.cache
def compiled_prefill(form):
    return jax.jit(functools.partial(gated_delta_prefill, implementation=form))


def verify(columns, state, parent, live, *, chain, form="xla"):
    """Outputs; row b reads slot b."""
    return _verified(columns, state, parent, live, chain, form)[0]


def _verified(columns, state, parent, live, chain, form):
    slot = np.arange(len(live), dtype=np.int32)
    call = compiled_verify(chain, form)
    made = call(*columns.read(), state, slot, ints(parent), ints(live))
    return tuple(map(np.asarray, made))


def records(columns, state, *, parent=None, form="xla"):
    """Keys, deltas and decays that verification of these columns leaves, in a chain or a tree."""
    chain, (batch, width) = parent is None, columns.key.shape[:2]
    parent = np.zeros((batch, width)) if chain else parent
    delta = _verified(columns, state, parent, [width] * batch, chain, form)[1]
    return columns.read()[1], delta, columns.decay


def prefill(columns, state, live, *, form="xla"):
    """Outputs and states after each row's live columns."""
    return tuple(map(np.asarray, compiled_prefill(form)(*columns.all(), state, ints(live))))


def fold_records(columns, state, count, *, path=None, parent=None, form="xla"):
    """Row b reads and writes slot b; without a path the columns are in order."""
    kept = records(columns, state, parent=parent, form=form)
    return fold_kept(kept, state, count, path=path, form=form)


def fold_kept(kept, state, count, *, path=None, form="xla"):
    """The same of records that are there."""
    batch, width = kept[0].shape[:2]
    path = np.tile(np.arange(width), (batch, 1)) if path is None else path
    slot = np.arange(batch, dtype=np.int32)
    return np.asarray(compiled_fold(form)(*kept, state, ints(path), slot, slot, ints(count)))


def ints(values):
    return np.asarray(values, np.int32)


def root_paths(column):
    """Per tree: the root path of a column padded with zeros to [B, WIDTH], and its length."""
    paths = [oracle.root_path(parent, column) for parent in TREES]
    return np.array([p + [0] * (WIDTH - len(p)) for p in paths]), [len(p) for p in paths]


def take_columns(x, at):
    return np.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)
