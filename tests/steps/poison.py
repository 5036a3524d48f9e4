"""Overwrites every byte of a state that no step may read."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np


def poison_with(*values):
    """A `before` hook for `Session` that writes the values in turn; nan or any number."""
    turn = itertools.cycle(values)

    def before(models, state, lanes):
        return poison(models, state, lanes, next(turn))

    return before


def poison(models, state, lanes, value):
    """The state with `value` in all dead floats and large numbers in the sequences of idle lanes.

    Dead are: ring indices outside the live interval, free pages and offsets at or beyond the
    frontier, pending columns beyond F - F_ctx, and every image of a slot without a lane.
    """
    copy = jax.tree.map(np.array, state)
    covered = {lane: int(copy.sequence.context_frontier[lane]) for lane in lanes}
    frontier = {lane: int(copy.sequence.frontier[lane]) for lane in lanes}
    slot_of = {lane: known.slot for lane, known in lanes.items()}
    for ring in copy.context.rings:
        dead = np.ones((models.run.slots, models.draft.window), bool)
        for lane, end in covered.items():
            held = np.arange(max(0, end - models.draft.window), end) % models.draft.window
            dead[slot_of[lane], held] = False
        for leaf in (ring.key, ring.value):
            leaf.swapaxes(1, 2)[dead] = cast(value, leaf.dtype)
    for pool, table, ends in (
        (copy.target.kv, copy.target_table.ids, frontier),
        (copy.context.pages, copy.draft_table.ids, covered),
    ):
        dead = np.ones((models.run.pages, models.run.page_size), bool)
        for lane, end in ends.items():
            position = np.arange(end)
            size = models.run.page_size
            dead[table[lane, position // size], position % size] = False
        for layer in pool:
            layer.key[:, dead] = cast(value, layer.key.dtype)
            layer.value[:, dead] = cast(value, layer.value.dtype)
    for lane in range(models.run.lanes):
        live = frontier[lane] - covered[lane] if lane in lanes else 0
        copy.pending.features[lane, live:] = cast(value, copy.pending.features.dtype)
    idle_slots = sorted(set(range(models.run.slots)) - set(slot_of.values()))
    for leaf in (*jax.tree.leaves(copy.target.gdn), copy.target.continuation):
        leaf[idle_slots] = cast(value, leaf.dtype)
    idle_lanes = sorted(set(range(models.run.lanes)) - set(lanes))
    for leaf in jax.tree.leaves(copy.sequence):
        leaf[idle_lanes] = True if leaf.dtype == bool else 2**30
    return jax.tree.map(jnp.array, copy)


def cast(value, dtype):
    """`value` clipped to the finite range of dtype; nan stays nan."""
    if np.isnan(value):
        return np.array(np.nan, dtype)
    limit = float(jnp.finfo(dtype).max)
    return np.array(np.clip(value, -limit, limit), dtype)
