"""Context K/V of whole sequences, for drafts that are trained on many blocks of each."""

import jax
from flax import struct


@struct.dataclass
class KVSequence:
    """Keys and values of one draft layer at every position of N sequences.

    It takes the place of a ring or of pages: a block with frontier F sees positions below F.

    key:   [N, T, Hkv, D], as a ring or pages would store it; position t is at index t.
    value: [N, T, Hkv, D].
    """

    key: jax.Array
    value: jax.Array
