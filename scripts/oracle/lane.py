"""One sequence in lane 0, moved through the library's own steps, in float32."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig, DtypePolicy, RunConfig, TargetConfig
from dflash_jax.state.decode import DecodeState, Rows
from dflash_jax.steps import Admission, Models, Params, PrefillChunk, begin, prefill_chunk
from dflash_jax.target import TargetColumns

# Neither divides the lengths of a kit, and a page is shorter than a prompt: chunk and page edges
# fall inside every sequence.
CHUNK = 32
PAGE = 16
ROWS = Rows.of([0])


def models_for(
    target: TargetConfig,
    draft: DraftConfig | None,
    *,
    draft_tokens: int,
    positions: int,
    dtypes: DtypePolicy | None = None,
) -> Models:
    """A pair for one sequence of at most `positions` tokens; draft_tokens is 0 without a draft;
    dtypes None is float32 throughout."""
    run = RunConfig(
        draft_tokens=draft_tokens,
        batch=1,
        max_context=positions,
        page_size=PAGE,
        chunk=CHUNK,
        dtypes=dtypes or DtypePolicy.exact(),
    )
    return Models(target, draft, run)


def prefilled(
    models: Models, params: Params, ids: np.ndarray, *, budget: int = 1, chunk: int = CHUNK
) -> DecodeState:
    """The state after all of `ids`, run in chunks; no token is chosen yet."""
    run = models.run
    pages = jnp.arange(run.max_pages, dtype=jnp.int32)[None]
    admission = Admission(
        remaining=jnp.full((1,), budget, jnp.int32),
        capacity=jnp.full((1,), run.max_context, jnp.int32),
        rope_delta=jnp.zeros((1,), jnp.int32),
        seed=jnp.zeros((1, 2), jnp.uint32),
        target_pages=pages,
        draft_pages=jnp.array(pages),
    )
    state = begin(models, models.zeros(), ROWS, admission)
    return extended(models, params, state, ids, frontier=0, chunk=chunk)


def extended(
    models: Models,
    params: Params,
    state: DecodeState,
    ids: np.ndarray,
    *,
    frontier: int,
    chunk: int = CHUNK,
) -> DecodeState:
    """Runs further `ids` from `frontier` on, in chunks of one padded width."""
    for first in range(0, len(ids), chunk):
        part = ids[first : first + chunk]
        tokens = np.zeros((1, chunk), np.int32)
        tokens[0, : len(part)] = part
        text = PrefillChunk.text(models, tokens, [len(part)], [frontier + first])
        state = prefill_chunk(models, params, state, ROWS, text)
    return state


def columns_at(state: DecodeState, frontier: int, width: int) -> TargetColumns:
    """`width` text columns of the target from `frontier` on."""
    position = frontier + jnp.arange(width, dtype=jnp.int32)
    return TargetColumns.chained(
        positions=jnp.broadcast_to(position[None, :, None], (1, width, 3)),
        frontier=jnp.full((1,), frontier, jnp.int32),
        live=jnp.full((1,), width, jnp.int32),
        table=state.target_table.rows(ROWS.lane),
        slot=ROWS.read_slot,
    )


def stacked(arrays: list, empty_like: np.ndarray) -> np.ndarray:
    """Stacks arrays of several layers; without layers, an empty array of the golden's shape."""
    if arrays:
        return np.stack([np.asarray(array) for array in arrays])
    return np.zeros((0, *empty_like.shape[1:]), np.float32)
