"""The order of candidates (value descending, id ascending), cut and drawn from without a sort."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from dflash_jax.ops.dispatch import choose

_DIGIT = 4  # bits that one pass over the values decides
_DIGITS = np.arange(1 << _DIGIT, dtype=np.uint32)
_BLOCK = 256  # ids whose weights the inverse CDF sums before it looks inside


@struct.dataclass
class Cutoff:
    """The last candidate of a prefix of the order.

    key: [...] uint32, its sortable value; place: [...] uint32, its inverted id.
    """

    key: jax.Array
    place: jax.Array


def sortable(values):
    """uint32 keys that compare like fp32 values; +0 and -0 are equal."""
    values = jnp.where(values == 0.0, 0.0, values)
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    negative = bits >> np.uint32(31) == np.uint32(1)
    return bits ^ jnp.where(negative, jnp.uint32(0xFFFFFFFF), jnp.uint32(0x80000000))


def places(count: int):
    """Inverted ids [count] uint32: among equal values the lower id has the larger place."""
    return np.uint32(count - 1) - np.arange(count, dtype=np.uint32)


def shortest_prefix(keys, weights, goal) -> Cutoff:
    """The shortest prefix of the order whose weights sum to at least `goal`.

    A radix search: every pass reads all values once and decides the next digit of the cutoff, first
    of the value, then of the id among equal values. No sort, and a fixed number of passes.

    Args:
      keys:    [..., V] uint32, see `sortable`.
      weights: [..., V] fp32, >= 0.
      goal:    [...] fp32, > 0 and at most the sum of all weights (up to rounding).
    Returns:
      Cutoff; `within` selects the prefix.
    Source: contracts 7.1, steps 4 and 7.
    """
    place = jnp.asarray(places(keys.shape[-1]))
    cut = Cutoff(key=jnp.zeros(goal.shape, jnp.uint32), place=jnp.zeros(goal.shape, jnp.uint32))
    # A loop on a GPU would leave the captured graph of the round; elsewhere it compiles faster.
    unrolled = choose("auto", gpu="unrolled", other="loop") == "unrolled"
    id_digits = -(-max(1, (keys.shape[-1] - 1).bit_length()) // _DIGIT)
    for name, digits in (("key", 32 // _DIGIT), ("place", id_digits)):

        def decide(step, cut, name=name, digits=digits):
            shift = jnp.uint32(_DIGIT) * (digits - 1 - step).astype(jnp.uint32)
            trials = [getattr(cut, name) | (np.uint32(digit) << shift) for digit in _DIGITS]
            mass = _masses(keys, place, weights, [cut.replace(**{name: x}) for x in trials])
            # The largest digit whose prefix still reaches the goal; digit 0 always does.
            digit = jnp.max(jnp.where(mass >= goal, _DIGITS.reshape(-1, *(1,) * goal.ndim), 0), 0)
            return cut.replace(**{name: getattr(cut, name) | (digit << shift)})

        cut = lax.fori_loop(0, digits, decide, cut, unroll=unrolled)
    return cut


def within(keys, cut: Cutoff):
    """[..., V] bool: the candidates of the prefix that ends at `cut`."""
    return _beyond(keys, jnp.asarray(places(keys.shape[-1])), cut)


def inverse_cdf(weights, u):
    """Draws an id with probability proportional to its weight, in token-id order.

    The first id whose cumulative weight exceeds u times the total; the last positive one when
    rounding leaves none. The order is a contract: the same key gives the same id for ever.

    Args:
      weights: [..., V] fp32, >= 0.
      u: [...] fp32 in [0, 1).
    Returns:
      ids [...] int32, always of positive weight where any is, and the total weight [...] fp32.
    Source: contracts 7.1 (order of uncapped draws: by id).
    """
    count = weights.shape[-1]
    blocks = -(-count // _BLOCK)
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, blocks * _BLOCK - count)]
    blocked = jnp.pad(weights, padding).reshape(*weights.shape[:-1], blocks, _BLOCK)
    ends = jnp.cumsum(jnp.sum(blocked, axis=-1), axis=-1)
    total = ends[..., -1]
    goal = u * total
    block = _first_beyond(ends, goal, jnp.sum(blocked, axis=-1))
    chosen = jnp.take_along_axis(blocked, block[..., None, None], axis=-2)[..., 0, :]
    before = jnp.take_along_axis(ends, block[..., None], axis=-1)[..., 0] - jnp.sum(chosen, -1)
    inside = _first_beyond(jnp.cumsum(chosen, axis=-1), goal - before, chosen)
    return block * _BLOCK + inside, total


def _beyond(keys, place, cut: Cutoff):
    key, edge = cut.key[..., None], cut.place[..., None]
    return (keys > key) | ((keys == key) & (place >= edge))


def _masses(keys, place, weights, cuts):
    """[cuts, ...] fp32 sums of the weights inside each cut; one reduction of many operands reads
    the values once."""
    parts = [jnp.where(_beyond(keys, place, cut), weights, 0.0) for cut in cuts]
    zeros = [np.float32(0.0)] * len(parts)

    def add(left, right):
        return [x + y for x, y in zip(left, right, strict=True)]

    return jnp.stack(lax.reduce(parts, zeros, add, (weights.ndim - 1,)))


def _first_beyond(cumulative, goal, weights):
    """First index with goal < cumulative and a positive weight, else the last positive one."""
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    positive = weights > 0.0
    found = (cumulative > goal[..., None]) & positive
    first = jnp.argmax(found, axis=-1).astype(jnp.int32)
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    return jnp.where(jnp.any(found, axis=-1), first, last)
