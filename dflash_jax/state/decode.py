"""The whole state of decoding, the rows of a batch, and the invariants between rounds."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dflash_jax.config import DraftConfig, RunConfig, TargetConfig
from dflash_jax.state.draft_context import DraftContext
from dflash_jax.state.pages import PageTable
from dflash_jax.state.pending import PendingFeatures
from dflash_jax.state.sequence import SequenceState
from dflash_jax.state.target import TargetState


@struct.dataclass
class Rows:
    """Which lane and slots each row of the compact batch uses; an idle row is out of range.

    lane:       [B] int32, the live request; idle: lanes or more, or negative.
    read_slot:  [B] int32, state image that verify and the fold read; idle: likewise, by slots.
    write_slot: [B] int32, state image that is written, and the row's rings. It differs from
      read_slot only between a fork and its first commit or prefill chunk.
    """

    lane: jax.Array
    read_slot: jax.Array
    write_slot: jax.Array

    @classmethod
    def of(cls, lanes) -> "Rows":
        """Rows whose slots equal their lanes, from a list of lane numbers."""
        lane = np.asarray(lanes, np.int32)
        return cls(lane=jnp.array(lane), read_slot=jnp.array(lane), write_slot=jnp.array(lane))


@struct.dataclass
class DecodeState:
    """Everything that survives a round. New values come from prefill, materialize and commit only;
    between rounds `steps/images.py` copies whole slots and pages.

    target:   `TargetState`, covers [0, F) of each lane.
    context:  `DraftContext`, covers [0, F_ctx).
    pending:  `PendingFeatures` of [F_ctx, F).
    sequence: `SequenceState`, the numbers of each lane.
    target_table, draft_table: `PageTable` of the two page pools.
    """

    target: TargetState
    context: DraftContext
    pending: PendingFeatures
    sequence: SequenceState
    target_table: PageTable
    draft_table: PageTable

    @classmethod
    def zeros(cls, target: TargetConfig, draft: DraftConfig | None, run: RunConfig):
        """Empty state: no lane is live, no page is mapped."""
        features = draft.feature_width if draft is not None else 0
        return cls(
            target=TargetState.zeros(target, run),
            context=DraftContext.zeros(draft, run),
            pending=PendingFeatures.zeros(
                run.lanes, run.block_width, features, run.dtypes.activation_dtype
            ),
            sequence=SequenceState.zeros(run.lanes, target.public_vocab),
            target_table=PageTable.unmapped(run.lanes, run.max_pages, run.pages),
            draft_table=PageTable.unmapped(run.lanes, run.max_pages, run.pages),
        )

    @classmethod
    def abstract(cls, target: TargetConfig, draft: DraftConfig | None, run: RunConfig):
        """The same as shapes and dtypes only."""
        return jax.eval_shape(lambda: cls.zeros(target, draft, run))


class InvariantError(AssertionError):
    """A documented equality of the state does not hold: a bug of this library."""


def check_invariants(state: DecodeState, ledgers: dict[int, list[int]], run: RunConfig) -> None:
    """Evaluates, on the host, every equality that must hold between rounds.

    Args:
      ledgers: for each live lane all its token ids, prompt included.
      run: the run that made the state.
    Raises: InvariantError naming the lane and the equality.
    Source: contracts 3.1; the class docstrings of this package.
    """
    sequence = jax.tree.map(np.asarray, state.sequence)
    mapped = np.asarray(state.target_table.ids) < run.pages
    for lane, ledger in ledgers.items():
        frontier, covered = int(sequence.frontier[lane]), int(sequence.context_frontier[lane])
        claims = {
            "len(ledger) = F + 1": len(ledger) == frontier + 1,
            "ledger[F] = anchor": ledger[-1] == sequence.anchor[lane],
            "0 <= F - F_ctx <= W": 0 <= frontier - covered <= run.block_width,
            "F < capacity": frontier < sequence.capacity[lane],
            "remaining > 0": sequence.remaining[lane] > 0,
            "positions [0, F] are mapped": mapped[lane, : frontier // run.page_size + 1].all(),
            "all ids are public": 0 <= min(ledger) and max(ledger) < sequence.counts.shape[1],
            "counts = published tokens": _counts_match(sequence, lane, ledger),
        }
        for claim, holds in claims.items():
            if not holds:
                raise InvariantError(
                    f"lane {lane}: {claim} fails at F = {frontier}, F_ctx = {covered}, "
                    f"ledger of {len(ledger)}"
                )
    pages = np.asarray(state.target_table.ids)
    users = Counter(page for lane in ledgers for page in pages[lane][mapped[lane]].tolist())
    for lane in ledgers:
        # Full pages below the frontier are read only, and may be those of a shared prefix.
        first = int(sequence.frontier[lane]) // run.page_size
        writable = pages[lane, first:][mapped[lane, first:]].tolist()
        if any(users[page] > 1 for page in writable):
            raise InvariantError("two live lanes share a writable page")


def _counts_match(sequence, lane: int, ledger: list[int]) -> bool:
    published = int(sequence.counts[lane].sum())
    if published > len(ledger):
        return False
    tail = ledger[len(ledger) - published :]
    expected = np.bincount(tail, minlength=sequence.counts.shape[1])
    return np.array_equal(expected, sequence.counts[lane])
