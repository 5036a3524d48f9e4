"""Several rounds as one device program, for rows whose end the device can see by itself."""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from dflash_jax.sampling.params import SamplingArrays
from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.steps.commit import commit
from dflash_jax.steps.ends import check_eos_ids, first_end, spent
from dflash_jax.steps.models import Models, Params
from dflash_jax.steps.round import speculate


@struct.dataclass
class RoundLog:
    """What `decode_rounds` did, round by round.

    outputs:   [B, rounds, W] int32, y_1..y_N of each round, then zeros.
    committed: [B, rounds] int32, N; 0 from a row's end on.
    licensed:  [B, rounds] int32, L; N < L only in a round that an end of text cuts.
    proposals: [B, rounds] int32, P.
    ended:     [B] bool, the row published an EOS id or its whole budget, or has a fault.
    fault:     [B] bool, a round had no finite candidate and changed nothing.
    """

    outputs: jax.Array
    committed: jax.Array
    licensed: jax.Array
    proposals: jax.Array
    ended: jax.Array
    fault: jax.Array


@functools.partial(jax.jit, static_argnames=("models", "rounds"), donate_argnames="state")
def decode_rounds(
    models: Models,
    params: Params,
    state: DecodeState,
    rows: Rows,
    sampling: SamplingArrays,
    eos_ids,
    *,
    rounds: int,
) -> tuple[DecodeState, RoundLog]:
    """`rounds` times speculate -> preview -> commit without the host. Donates `state`.

    The preview is the part of the engine's that needs no text: N = L, or up to the first EOS id. A
    row that has ended is idle from then on, so a row's outputs and state are those of the same
    rounds run one by one. Stop strings, stop sequences and cancellation need the host: it may look
    between two calls, and goes on from a state like any other.

    Args:
      rows: `Rows` [B]; a row's write slot is its read slot from its first commit on.
      eos_ids: [B, E] int32, ids that end a row; -1 fills up.
      rounds: at most this many for each row. Static.
    Returns:
      the state and the `RoundLog`.
    Raises: ValueError for fewer than one round, or eos_ids of another shape.
    Source: contracts 9.1, 9.2.
    """
    batch = rows.lane.shape[0]
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    check_eos_ids(eos_ids, batch)
    lanes, slots = models.run.lanes, models.run.slots

    def one_round(number, carry):
        state, read_slot, ended, fault, log = carry
        live = ~ended & (rows.lane < lanes)
        active = Rows(
            lane=jnp.where(live, rows.lane, lanes),
            read_slot=jnp.where(live, read_slot, slots),
            write_slot=jnp.where(live, rows.write_slot, slots),
        )
        extent = models.extent(state.sequence.gather(active.lane))
        state, scratch = speculate(models, params, state, active, sampling, extent)
        acceptance = scratch.acceptance
        failed = acceptance.fault & live
        count, stopped = first_end(acceptance.outputs, acceptance.licensed, eos_ids)
        count = jnp.where(failed, 0, count)
        state = commit(models, state, active, scratch, count)
        column = jnp.arange(acceptance.outputs.shape[1], dtype=jnp.int32)
        entry = jnp.concatenate([
            jnp.where(column < count[:, None], acceptance.outputs, 0),
            jnp.stack([count, acceptance.licensed, extent.proposals], axis=1),
        ], axis=1)
        # Not a slice at `number`: its address would cut the round's command buffer in two.
        here = jnp.arange(rounds, dtype=jnp.int32)[:, None] == number
        log = jnp.where(here, entry[:, None], log)
        over = stopped | failed | spent(state.sequence.gather(active.lane))
        ended = ended | (live & over)
        read_slot = jnp.where(count > 0, rows.write_slot, read_slot)
        return state, read_slot, ended, fault | failed, log

    ended = spent(state.sequence.gather(rows.lane))
    log = jnp.zeros((batch, rounds, models.run.block_width + 3), jnp.int32)
    start = (state, rows.read_slot, ended, jnp.zeros((batch,), bool), log)
    state, _, ended, fault, log = lax.fori_loop(0, rounds, one_round, start)
    outputs, numbers = log[..., :-3], jnp.moveaxis(log[..., -3:], 2, 0)
    committed, licensed, proposals = numbers
    return state, RoundLog(
        outputs=outputs, committed=committed, licensed=licensed, proposals=proposals,
        ended=ended, fault=fault,
    )
