"""What a request asks of the sampler, as arrays over the batch."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class SamplingArrays:
    """Sampling controls of B rows.

    temperature: [B] fp32; <= 0 is greedy.
    """

    temperature: jax.Array

    @classmethod
    def greedy(cls, batch: int) -> "SamplingArrays":
        """Every row takes the target's argmax."""
        return cls(temperature=jnp.zeros((batch,), jnp.float32))
