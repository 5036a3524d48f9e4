"""Named tolerances of all tests, the one comparison that uses them, and the exact one.

The criterion is the one of the reference engine's tests: ||err|| / ||expected|| <= rel_l2 and
max|err| <= gross_abs + gross_rel * max|expected|. `expected` is float64 from represented inputs;
the rounding of the stored output belongs to the tolerance. A non-finite value always fails.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Bounds on the relative L2 error and on the largest error (absolute, and of the maximum)."""

    rel_l2: float
    gross_abs: float
    gross_rel: float


# fp32 throughout: a norm, a rotation, one product, a softmax.
FP32 = Tolerance(rel_l2=2e-6, gross_abs=1e-6, gross_rel=4e-6)
# fp32 through several products in a row: a recurrence, a layer, a small model.
FP32_CHAIN = Tolerance(rel_l2=2e-5, gross_abs=1e-5, gross_rel=4e-5)
# fp32 from a bf16 pair hi + lo: what the pair does not hold is 2^-16 of each input.
SPLIT_BF16 = Tolerance(rel_l2=8e-6, gross_abs=1e-5, gross_rel=2e-5)
# One rounding to bf16 of a value computed in fp32; 2^-9 is half a step.
BF16_ROUND = Tolerance(rel_l2=2e-3, gross_abs=1e-6, gross_rel=2.0**-8)
# A product of bf16 operands with one rounding behind it and perhaps one of an operand before it.
BF16_MATMUL = Tolerance(rel_l2=3.6e-3, gross_abs=3e-3, gross_rel=2.0**-7)
# Several bf16 boundaries in a row: an attention layer, a feed-forward, a small model.
BF16_CHAIN = Tolerance(rel_l2=8e-3, gross_abs=5e-3, gross_rel=2.0**-6)


def assert_close(actual, expected, tolerance):
    """Fails unless shapes agree, all is finite and the error is within both bounds."""
    actual, expected = as_float64(actual), as_float64(expected)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    assert np.isfinite(expected).all(), "the oracle is not finite"
    assert np.isfinite(actual).all(), f"{(~np.isfinite(actual)).sum()} values are not finite"
    if not expected.size:
        return
    error = np.abs(actual - expected)
    norm = np.linalg.norm(expected)
    rel_l2 = np.linalg.norm(error) / norm if norm else np.linalg.norm(error)
    bound = tolerance.gross_abs + tolerance.gross_rel * np.abs(expected).max()
    assert rel_l2 <= tolerance.rel_l2, f"relative L2 error {rel_l2:.3g} > {tolerance.rel_l2:.3g}"
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error.max() <= bound, f"error {error.max():.3g} > {bound:.3g} at {worst}"


def assert_same_bits(actual, expected):
    """Fails unless dtype, shape and every byte agree; NaN equals itself, -0.0 is not 0.0."""
    actual, expected = np.ascontiguousarray(actual), np.ascontiguousarray(expected)
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


def as_float64(array):
    """The represented values of an array of any float or integer dtype, bf16 included."""
    return np.asarray(array).astype(np.float64)
