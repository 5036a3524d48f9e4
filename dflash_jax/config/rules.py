"""The checks that config objects share; each failure names the field."""

from __future__ import annotations

import numpy as np

MAX_INT = 2**31 - 1
MAX_FLOAT = float(np.finfo(np.float32).max)


class ConfigError(ValueError):
    """A geometry or run choice breaks a rule: "field: expected ..., got ..."."""


def require(condition: bool, field: str, expected: str, got: object) -> None:
    """Raises ConfigError unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field}: expected {expected}, got {got!r}")


def is_int(value: object) -> bool:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive_ints(owner: object, prefix: str, names: str) -> None:
    """Every field in `names` (separated by spaces) is a positive 32-bit integer."""
    for name in names.split():
        value = getattr(owner, name)
        legal = is_int(value) and 0 < value <= MAX_INT
        require(legal, prefix + name, "a positive 32-bit integer", value)


def positive_float(field: str, value: object) -> None:
    """A number that is finite and above zero in float32, where it will be used."""
    legal = (is_int(value) or isinstance(value, float)) and 0 < value <= MAX_FLOAT
    if legal:
        with np.errstate(under="ignore"):
            legal = bool(np.float32(value) > 0)
    require(legal, field, "a number finite and > 0 in float32", value)


def divides(field: str, value: int, by_name: str, by: int) -> None:
    """`value` is a multiple of `by`."""
    require(value % by == 0, field, f"a multiple of {by_name} = {by}", value)


def instance(field: str, value: object, kind: type) -> None:
    """`value` is of class `kind`."""
    require(isinstance(value, kind), field, f"a {kind.__name__}", value)
