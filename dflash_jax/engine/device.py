"""The arrays of a batch and the calls that move them; the host loop sees only Python numbers.

Request i uses lane, slot and row i. A row that does not run is idle: its lane and slots lie out of
range, so it has no columns and writes nothing.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import RunConfig
from dflash_jax.engine.request import Request
from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.sampling.uniform import seed_words
from dflash_jax.state.decode import Rows
from dflash_jax.state.scratch import RoundScratch
from dflash_jax.steps import (
    Admission,
    Models,
    Params,
    PrefillChunk,
    advance,
    begin,
    commit,
    empty_scratch,
    first_token,
    prefill_chunk,
)

SMALLEST_BUCKET = 16
MOST_EOS_IDS = 8  # of a request whose end the device sees; fixed, so that no request compiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What the host reads of a round, by row; an idle row has zeros.

    Fields:
      outputs: y_1..y_L, then zeros.
      licensed: L.
      proposals: P.
      columns: target columns verified, Q or what a tree has of it.
      fault: the row has no finite candidate and must end without a commit.
    """

    outputs: list[list[int]]
    licensed: list[int]
    proposals: list[int]
    columns: list[int]
    fault: list[bool]

    @classmethod
    def of(cls, summary) -> "RoundResult":
        """Reads the summary that `advance` left, [B, W + 4]; waits for it."""
        numbers = np.asarray(summary).tolist()
        return cls(
            outputs=[row[:-4] for row in numbers],
            licensed=[row[-4] for row in numbers],
            proposals=[row[-3] for row in numbers],
            columns=[row[-2] for row in numbers],
            fault=[bool(row[-1]) for row in numbers],
        )


class DeviceBatch:
    """State and weights of one batch on the device.

    Per round: one read of a small array, and one ``advance`` into the next round, before that read
    if the device sees by itself where rows end; ``speculate`` starts the first one, and one whose
    rows or width are others, after a ``commit``.
    """

    def __init__(self, models: Models, params: Params, sampling: Sequence[SamplingParams] = ()):
        """``sampling`` holds the controls of row 0, 1, ...; rows beyond it are greedy.

        Raises:
          ValueError: a bias or an allowed id outside [0, public_vocab), or a pool that does not
            hold every row at full length.
        """
        need = models.run.batch * models.run.max_pages
        if models.run.pages < need:
            raise ValueError(f"pool_pages: expected at least {need}, got {models.run.pages}")
        self._models, self._params = models, params
        spare = models.run.batch - len(sampling)
        self._controls = [*sampling, *[SamplingParams()] * spare]
        if all(one.is_plain for one in self._controls):  # its programs hold no sampling at all
            self._sampling = SamplingArrays.greedy(models.run.batch)
        else:
            self._sampling = SamplingArrays.of(self._controls, models.target.public_vocab)
        self._state = models.zeros()
        self._rows: Rows | None = None
        self._live: tuple[int, ...] | None = None
        self._scratch: dict[int, RoundScratch] = {}  # what the last round of each width left
        self._round = models  # those of the last round, which its commit belongs to
        self._summary, self._none, self._all = round_arrays(models.run)
        self._eos_ids = no_ends(models.run)
        self._told = self._decided = self._summary  # of the last round, and of the one before it

    @property
    def block_width(self) -> int:
        """W: no round gives a row more outputs."""
        return self._models.run.block_width

    def prefill(
        self, row: int, prompt: Sequence[int], max_new_tokens: int, eos_ids: Collection[int] = ()
    ) -> int | None:
        """Runs a prompt in chunks and returns the first new token, None when none is finite.

        A chunk is as long as ``run.chunk``, the last one padded to a power of two, so the number
        of compiled programs grows with the logarithm of the chunk only.
        """
        models, run = self._models, self._models.run
        rows = Rows.of([row])
        self._eos_ids = self._eos_ids.at[row].set(eos_row(eos_ids))
        state = begin(models, self._state, rows, self._admission(row, max_new_tokens))
        for start in range(0, len(prompt), run.chunk):
            piece = prompt[start : start + run.chunk]
            padded = np.zeros((1, bucket(len(piece), run.chunk)), np.int32)
            padded[0, : len(piece)] = piece
            chunk = PrefillChunk.text(models, padded, [len(piece)], [start])
            state = prefill_chunk(models, self._params, state, rows, chunk)
        own = jax.tree.map(lambda x: x[row : row + 1], self._sampling)
        self._state, fault = first_token(models, self._params, state, rows, own)
        return None if fault[0] else int(self._state.sequence.anchor[row])

    def warm_up(self, widths: Sequence[int]) -> None:
        """Compiles rounds of these widths by running each without live rows: nothing changes."""
        for nodes in widths:
            self.speculate((), nodes)
            self.commit({})

    def speculate(self, live: Sequence[int], tree_nodes: int) -> None:
        """Starts a round of that width, 0 for a chain, for the given rows.

        Raises:
          ConfigError: a width that does not fit the run.
        """
        self._round, rows = self._models.with_tree(tree_nodes), self._rows_of(live)
        if tree_nodes not in self._scratch:
            self._scratch[tree_nodes] = empty_scratch(
                self._round, self._params, self._state, rows, self._sampling
            )
        self._advance(self._none)

    def result(self) -> RoundResult:
        """Waits for the last round and reads what the host decides on."""
        return RoundResult.of(self._told)

    def last_result(self) -> RoundResult:
        """The same of the round that the last `advance` committed."""
        return RoundResult.of(self._decided)

    def commit(self, committed: Mapping[int, int]) -> None:
        """Adopts the first N columns of the last round; rows without an entry keep nothing."""
        scratch = self._scratch[self._round.run.tree_nodes]
        self._state = commit(
            self._round, self._state, self._rows, scratch,
            by_row(committed, self._models.run.batch),
        )

    def advance(self) -> None:
        """Adopts what is licensed of the last round, up to where a row ends by an EOS id, and
        starts the next one of the same rows and width, in one call."""
        self._advance(self._all)

    def _advance(self, most: jax.Array) -> None:
        nodes = self._round.run.tree_nodes
        self._state, self._scratch[nodes], self._summary = advance(
            self._round, self._params, self._state, self._rows, self._sampling,
            self._scratch[nodes], most, self._summary, self._eos_ids,
        )
        self._told, self._decided = read_later(self._summary), self._told

    def _rows_of(self, live: Sequence[int]) -> Rows:
        if self._live != tuple(live):
            run = self._models.run
            lanes = [row if row in live else run.slots for row in range(run.batch)]
            self._rows, self._live = Rows.of(lanes), tuple(live)
        return self._rows

    def _admission(self, row: int, max_new_tokens: int) -> Admission:
        run = self._models.run
        first = row * run.max_pages
        pages = np.arange(first, first + run.max_pages, dtype=np.int32)[None]
        return Admission(
            remaining=jnp.array([max_new_tokens], jnp.int32),
            capacity=jnp.array([run.max_context], jnp.int32),
            rope_delta=jnp.zeros((1,), jnp.int32),
            seed=jnp.array(seed_words(self._controls[row].seed)[None]),
            target_pages=jnp.array(pages),
            draft_pages=jnp.array(pages),
        )


def bucket(length: int, chunk: int) -> int:
    """Columns of the program that runs a chunk of ``length`` tokens: a power of two, or a chunk."""
    return min(max(1 << (length - 1).bit_length(), SMALLEST_BUCKET), chunk)


def round_arrays(run: RunConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """An empty summary, and `advance`'s limits for nothing and for all that is licensed.

    Kept, since an array of another address has XLA write its command buffers anew.
    """
    width = run.block_width
    return (
        jnp.zeros((run.batch, width + 4), jnp.int32),
        jnp.zeros((run.batch,), jnp.int32),
        jnp.full((run.batch,), width, jnp.int32),
    )


def may_run_ahead(request: Request, width: int) -> bool:
    """Whether the device decides of a round of `width` outputs what the host would: the request has
    no stop sequences or strings and not too many EOS ids, and its budget outlasts the round."""
    stops = request.stop_sequences or request.stop_strings
    return not stops and len(request.eos_ids) <= MOST_EOS_IDS and request.remaining > width


def eos_row(eos_ids: Collection[int]) -> np.ndarray:
    """A request's EOS ids for `advance`, [E] int32; none if there are too many of them."""
    row = np.full((MOST_EOS_IDS,), -1, np.int32)
    if len(eos_ids) <= MOST_EOS_IDS:
        row[: len(eos_ids)] = sorted(eos_ids)
    return row


def no_ends(run: RunConfig) -> jax.Array:
    """EOS ids of a batch without any, [B, E] int32."""
    return jnp.full((run.batch, MOST_EOS_IDS), -1, jnp.int32)


def read_later(summary: jax.Array) -> jax.Array:
    """A copy on its way to the host, in memory of its own: the next round takes the summary's."""
    copy = _copied(summary)
    copy.copy_to_host_async()  # so that it is here as soon as it is there
    return copy


@jax.jit
def _copied(array: jax.Array) -> jax.Array:
    return jnp.copy(array)


def by_row(committed: Mapping[int, int], batch: int) -> np.ndarray:
    """N of each row of a batch, [B] int32; rows without an entry have 0."""
    counts = np.zeros((batch,), np.int32)
    for row, count in committed.items():
        counts[row] = count
    return counts
