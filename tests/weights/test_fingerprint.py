"""One bit, one place or one name changes the fingerprint; a copy does not."""

import ml_dtypes
import numpy as np
import pytest

from dflash_jax.weights.fingerprint import fingerprint

DTYPES = (np.float32, ml_dtypes.bfloat16, np.int32, np.uint8, bool)


def weights(dtype=np.float32):
    values = np.arange(24) % 5
    return {"a": values.reshape(2, 3, 4).astype(dtype), "b": np.ones(3, np.float32)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bit_any_swap_and_any_shape_count(dtype):
    seen = {fingerprint(weights(dtype))}
    assert fingerprint(weights(dtype)) in seen
    for place in (0, 7, 23):
        changed = weights(dtype)
        bits = changed["a"].reshape(-1).view(np.uint8)
        bits[place * changed["a"].itemsize] ^= 1
        seen.add(fingerprint(changed))
    swapped = weights(dtype)
    swapped["a"][0, 0, [0, 1]] = swapped["a"][0, 0, [1, 0]]
    flat = weights(dtype)
    flat["a"] = flat["a"].reshape(6, 4)
    named = {"c" if name == "a" else name: leaf for name, leaf in weights(dtype).items()}
    seen |= {fingerprint(tree) for tree in (swapped, flat, named)}
    assert len(seen) == 7


def test_the_sign_of_zero_and_the_dtype_count():
    zero, negative = ({"a": np.array([x], np.float32)} for x in (0.0, -0.0))
    assert fingerprint(zero) != fingerprint(negative)
    assert fingerprint({"a": np.zeros(2, np.int32)}) != fingerprint({"a": np.zeros(2, np.float32)})
