"""Where a row ends, as far as the device can see it: EOS ids, the budget, a fault."""

import jax.numpy as jnp


def first_end(outputs, licensed, eos_ids):
    """N of each row, and whether an EOS id decided it.

    Args:
      outputs: [B, W] int32, y_1..y_L first. licensed: [B] int32, L.
      eos_ids: [B, E] int32; -1 fills up.
    Returns:
      [B] int32, the tokens up to the first EOS id among y_1..y_L, it included, else L; [B] bool.
    Source: contracts 9.1.
    """
    column = jnp.arange(outputs.shape[1], dtype=jnp.int32)
    is_end = jnp.any(outputs[:, :, None] == eos_ids[:, None, :], axis=-1)
    is_end &= column < licensed[:, None]
    first = jnp.min(jnp.where(is_end, column, outputs.shape[1]), axis=1)
    return jnp.minimum(licensed, first + 1), first < outputs.shape[1]


def spent(sequence):
    """[B] bool: the row of a `SequenceState` has no budget or no room left."""
    return (sequence.remaining <= 0) | (sequence.frontier >= sequence.capacity)


def check_eos_ids(eos_ids, batch: int) -> None:
    """Raises ValueError unless it is [batch, E]."""
    if eos_ids.ndim != 2 or len(eos_ids) != batch:
        raise ValueError(f"eos_ids: expected [{batch}, E], got {eos_ids.shape}")
