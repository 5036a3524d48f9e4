"""What a request asks of the sampler: checked on the host, arrays over the batch on the device."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

_LARGEST = float(np.finfo(np.float32).max)


def _is_number(x) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _finite(x) -> bool:
    """Finite as fp32 too; a NaN compares false."""
    return abs(x) <= _LARGEST


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Controls of one request; the defaults are plain greedy decoding.

    Fields:
      temperature: 0 is greedy; filters and seed are then not read, penalties and bias are.
      top_k: candidates kept, in order of the adjusted logit; 0 keeps all.
      top_p: smallest leading share of the kept mass, in (0, 1]; 1 keeps all.
      min_p: least weight relative to the best candidate, in [0, 1); 0 keeps all.
      presence_penalty: subtracted once from every id already published by the request.
      frequency_penalty: subtracted per occurrence of a published id.
      repetition_penalty: > 0; divides a positive logit and multiplies a negative one, for ids of
        the prompt and published ids.
      seed: 0 .. 2^64 - 1.
      logit_bias: id -> number added to its logit before everything else.
      allowed_ids: when given, only these ids may be emitted.
    Raises: ValueError naming the field. Source: contracts 7.1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_ids: Sequence[int] | None = None

    def __post_init__(self):
        rules = {
            "temperature": ("finite and >= 0", lambda x: _finite(x) and x >= 0),
            "top_k": ("an integer >= 0", lambda x: isinstance(x, int) and 0 <= x < 1 << 31),
            "top_p": ("in (0, 1]", lambda x: 0 < x <= 1),
            "min_p": ("in [0, 1)", lambda x: 0 <= x < 1),
            "presence_penalty": ("finite", _finite),
            "frequency_penalty": ("finite", _finite),
            "repetition_penalty": ("finite and > 0", lambda x: _finite(x) and np.float32(x) > 0),
            "seed": ("an integer in [0, 2^64)", lambda x: isinstance(x, int) and 0 <= x < 1 << 64),
        }
        for name, (expected, holds) in rules.items():
            value = getattr(self, name)
            if not _is_number(value) or not holds(value):
                raise ValueError(f"{name}: expected {expected}, got {value!r}")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias: expected ids and numbers, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            if not _is_number(bias) or not _finite(bias):
                raise ValueError(f"logit_bias[{token}]: expected a finite number, got {bias!r}")
        _check_allowed(self.allowed_ids)

    @property
    def is_plain(self) -> bool:
        """Greedy, with every control of the logits neutral."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0)
        touched = any(penalties) or self.logit_bias or self.allowed_ids is not None
        return self.temperature == 0 and not touched


@struct.dataclass
class SamplingArrays:
    """Sampling controls of B rows; see `SamplingParams` for meanings. Seeds live in the sequence.

    temperature, top_p, min_p, presence, frequency, repetition: [B] fp32.
    top_k:   [B] int32; 0 keeps all.
    plain:   [B] bool, the row is greedy and leaves its logits as they are: argmax is all it needs.
    bias:    [B, V_pub] fp32; [B, 0] in `greedy`.
    allowed: [B, V_pub] bool; [B, 0] in `greedy`.
    greedy_only: promises that every row is plain, now and later, so that programs hold nothing
      else. Static: `of` and `greedy` make different programs.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    plain: jax.Array
    bias: jax.Array
    allowed: jax.Array
    greedy_only: bool = struct.field(pytree_node=False)

    @classmethod
    def of(cls, params: Sequence[SamplingParams], public_vocab: int) -> "SamplingArrays":
        """Arrays of a batch. Raises ValueError for ids outside [0, V_pub)."""
        rows = len(params)
        bias = np.zeros((rows, public_vocab), np.float32)
        allowed = np.ones((rows, public_vocab), bool)
        for row, one in enumerate(params):
            _check_ids("logit_bias", one.logit_bias, public_vocab)
            for token, value in one.logit_bias.items():
                bias[row, token] = value
            if one.allowed_ids is not None:
                _check_ids("allowed_ids", one.allowed_ids, public_vocab)
                allowed[row] = False
                allowed[row, np.asarray(one.allowed_ids, np.int64)] = True
        return cls._numbers(params).replace(bias=jnp.array(bias), allowed=jnp.array(allowed))

    @classmethod
    def greedy(cls, batch: int) -> "SamplingArrays":
        """For programs that never sample: every row takes the target's argmax, no bias, no mask."""
        return cls._numbers([SamplingParams()] * batch).replace(greedy_only=True)

    @classmethod
    def _numbers(cls, params: Sequence[SamplingParams]) -> "SamplingArrays":
        def column(name, dtype=np.float32):
            return jnp.array(np.array([getattr(one, name) for one in params], dtype))

        return cls(
            temperature=column("temperature"),
            top_k=column("top_k", np.int32),
            top_p=column("top_p"),
            min_p=column("min_p"),
            presence=column("presence_penalty"),
            frequency=column("frequency_penalty"),
            repetition=column("repetition_penalty"),
            plain=jnp.array([one.is_plain for one in params]),
            bias=jnp.zeros((len(params), 0), jnp.float32),
            allowed=jnp.zeros((len(params), 0), bool),
            greedy_only=False,
        )


def _check_allowed(ids) -> None:
    if ids is None:
        return
    other = isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Collection)
    if other or getattr(ids, "ndim", 1) != 1:
        raise ValueError(f"allowed_ids: expected a list of ids or None, got {ids!r}")
    if len(ids) == 0:
        raise ValueError("allowed_ids: expected at least one id, got none")


def _check_ids(name: str, ids, public_vocab: int) -> None:
    for token in ids:
        if not isinstance(token, Integral) or not 0 <= token < public_vocab:
            raise ValueError(f"{name}: expected ids in [0, {public_vocab}), got {token}")
