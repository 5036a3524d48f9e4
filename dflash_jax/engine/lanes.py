"""The arrays of an engine and the calls that move them; the engine sees only Python numbers.

A live request has a lane, and its row in the batch is the row of that number; its slot and pages
are whatever the pools gave it. A row that does not run is idle: its lane and slot lie out of range,
so it has no columns and writes nothing. Every method that changes the state replaces it in one
assignment together with what tells that it happened, so an exception leaves the two in agreement.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.engine.device import (
    RoundResult,
    bucket,
    by_row,
    eos_row,
    no_ends,
    read_later,
    round_arrays,
)
from dflash_jax.engine.pools import Holding, Tail
from dflash_jax.engine.request import Embeddings, Request
from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.sampling.uniform import seed_words
from dflash_jax.state.decode import DecodeState, Rows
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
    images,
    materialize,
    prefill_chunk,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replica:
    """A state image on the host, packed: NumPy arrays, exactly the pages that are in use.

    Fields:
      slot: the slot's arrays.
      pages: the pages' arrays, in order of position.
    """

    slot: images.SlotImage
    pages: images.PageGroup

    @property
    def nbytes(self) -> int:
        """Bytes it occupies."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


jax.tree_util.register_dataclass(Replica, data_fields=["slot", "pages"], meta_fields=[])


class Lanes:
    """State and weights on the device, by lane."""

    def __init__(self, models: Models, params: Params):
        self._models, self._params = models, params
        self.commits = 0  # rounds whose commit has been issued
        self.reset()

    def reset(self) -> None:
        """An empty state; whatever lanes and slots held is lost."""
        run = self._models.run
        idle = [SamplingParams()] * run.batch
        self._sampling = SamplingArrays.of(idle, self._models.target.public_vocab)
        self._state = self._models.zeros()
        self._frontier: dict[int, int] = {}  # prompt tokens processed, by lane
        self._drawn: dict[int, jax.Array] = {}  # first tokens not yet taken, by lane
        self._rows: Rows | None = None
        self._live: dict[int, int] | None = None
        self._scratch: dict[int, RoundScratch] = {}  # what the last round of each width left
        self._eos_ids = no_ends(run)
        self._summary, self._none, self._all = round_arrays(run)
        self._flight = None  # (models, rows, told) of a round that waits for a commit
        self._decided = None  # what was told of the round that the last advance committed

    @property
    def lost(self) -> bool:
        """A device call failed after it had taken the memory of what it was to replace."""
        replaced = (self._state, self._scratch, self._sampling, self._eos_ids)
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(replaced))

    @property
    def state(self) -> DecodeState:
        """The state, to look at."""
        return self._state

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return _bytes(jax.eval_shape(images.read_slot, self._state, jnp.int32(0)))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of every layer of both pools."""
        one = jnp.zeros((1,), jnp.int32)
        return _bytes(jax.eval_shape(images.read_pages, self._state, one, one))

    def frontier(self, lane: int) -> int:
        """Prompt tokens that the lane has processed."""
        return self._frontier[lane]

    def begin(self, lane: int, holding: Holding, request: Request) -> None:
        """Gives a lane an empty sequence."""
        self._control(lane, request)
        admission = Admission(
            remaining=_one(request.remaining),
            capacity=_one(self._models.run.max_context),
            rope_delta=_one(_rope_delta(request)),
            seed=jnp.array(seed_words(request.sampling.seed)[None]),
            target_pages=self._table(holding.target_pages),
            draft_pages=self._table(holding.draft_pages),
        )
        rows = self._row(lane, holding)
        self._drawn.pop(lane, None)
        self._state, self._frontier[lane] = begin(self._models, self._state, rows, admission), 0

    def resume(self, lane: int, holding: Holding, request: Request, frontier: int) -> None:
        """Gives a lane the sequence of a request at a frontier whose image the holding has.

        With published tokens the last of them is the anchor, and the frontier is the request's;
        else the prompt goes on from there.
        """
        self._control(lane, request)
        run, prompt, tokens = self._models.run, request.prompt, request.tokens
        resumption = images.Resumption(
            frontier=_one(frontier),
            anchor=_one(tokens[-1] if tokens else 0),
            rope_delta=_one(_rope_delta(request)),
            remaining=_one(request.remaining),
            capacity=_one(run.max_context),
            seed=jnp.array(seed_words(request.sampling.seed)[None]),
            prompt=_padded(prompt[:frontier], run.max_context),
            prompt_tokens=_one(min(len(prompt), frontier)),
            published=_padded(tokens, run.max_context),
            published_tokens=_one(len(tokens)),
            target_pages=self._table(holding.target_pages),
            draft_pages=self._table(holding.draft_pages),
        )
        rows = self._row(lane, holding)
        self._drawn.pop(lane, None)
        self._state, self._frontier[lane] = (
            images.resume(self._state, rows, resumption), min(len(prompt), frontier)
        )

    def prefill(
        self, lane: int, holding: Holding, tokens: Sequence[int], start: int,
        embeddings: Embeddings | None = None,
    ) -> int:
        """Runs the next chunk of ``tokens`` from index ``start``, which is its position.

        A chunk is as long as ``run.chunk``, the last one padded to a power of two, so the number
        of compiled programs grows with the logarithm of the chunk only.

        Returns:
          the index behind the chunk.
        """
        models, run = self._models, self._models.run
        piece = tokens[start : start + run.chunk]
        padded = np.zeros((1, bucket(len(piece), run.chunk)), np.int32)
        padded[0, : len(piece)] = piece
        chunk = PrefillChunk.text(models, padded, [len(piece)], [start])
        if embeddings is not None:
            chunk = _with_embeddings(models, chunk, embeddings, start, len(piece))
        rows, end = self._row(lane, holding), start + len(piece)
        self._state, self._frontier[lane] = (
            prefill_chunk(models, self._params, self._state, rows, chunk), end
        )
        return end

    def first_token(self, lane: int, holding: Holding) -> int | None:
        """The token after the prompt, None when none is finite. Drawn once, read any time."""
        if lane not in self._drawn:
            rows = self._row(lane, holding)
            self._state, self._drawn[lane] = _first(
                self._models, self._params, self._state, rows, self._sampling
            )
        with self._reading():
            token, fault = np.asarray(self._drawn[lane]).tolist()
        return None if fault else token

    def speculate(self, live: Mapping[int, int], tree_nodes: int) -> None:
        """Starts a round of that width, 0 for a chain, for lanes with their slots.

        Raises:
          ConfigError: a width that does not fit the run.
        """
        models, rows = self._models.with_tree(tree_nodes), self._batch(live)
        if tree_nodes not in self._scratch:
            self._scratch[tree_nodes] = empty_scratch(
                models, self._params, self._state, rows, self._sampling
            )
        self._advance(models, rows, self._none)

    def result(self) -> RoundResult:
        """Waits for the round in flight and reads what the host decides on."""
        with self._reading():
            return RoundResult.of(self._flight[2])

    def last_result(self) -> RoundResult:
        """The same of the round that the last `advance` committed."""
        with self._reading():
            return RoundResult.of(self._decided)

    def commit(self, committed: Mapping[int, int]) -> None:
        """Adopts the first N columns of the round in flight; other lanes keep nothing."""
        models, rows, _ = self._flight
        scratch, counts = self._scratch[models.run.tree_nodes], by_row(committed, models.run.batch)
        self._state, self._flight, self.commits = (
            commit(models, self._state, rows, scratch, counts), None, self.commits + 1
        )

    def advance(self) -> None:
        """Adopts what is licensed of the round in flight, up to where a row ends by an EOS id, and
        starts the next one of the same lanes and width, in one call.

        Its result is `last_result` from now on. It need not have been read before if all of its
        requests `may_run_ahead`.
        """
        models, rows, _ = self._flight
        self._advance(models, rows, self._all)

    def _advance(self, models: Models, rows: Rows, most: jax.Array) -> None:
        self._tell()
        nodes, decided, commits = models.run.tree_nodes, self._decided, self.commits
        if self._flight is not None:
            decided, commits = self._flight[2], commits + 1
        state, scratch, summary = advance(
            models, self._params, self._state, rows, self._sampling, self._scratch[nodes], most,
            self._summary, self._eos_ids,
        )
        (self._state, self._scratch[nodes], self._summary, self._flight, self._decided,
         self.commits) = (
            state, scratch, summary, (models, rows, summary), decided, commits
        )
        self._tell()

    def _tell(self) -> None:
        """Sends what a round leaves to the host, unless that has been done: the next round takes
        its memory, perhaps before the host has read it."""
        if self._flight is not None and self._flight[2] is self._summary:
            models, rows, summary = self._flight
            self._flight = models, rows, read_later(summary)

    def materialize(self, lane: int, holding: Holding) -> None:
        """Brings a lane's context up to its frontier."""
        rows = self._row(lane, holding)
        self._state = materialize(self._models, self._params, self._state, rows)

    def copy(self, source: Holding, target: Holding, tail: Tail) -> None:
        """Copies a slot, and the partial tail pages, from one holding to another."""
        image = images.read_slot(self._state, _number(source.slot))
        self._state = images.write_slot(self._state, _number(target.slot), image)
        if tail.target is not None or tail.draft is not None:
            none = (self._models.run.pages,) * 2
            read, write = zip(tail.target or none, tail.draft or none, strict=True)
            group = images.read_pages(self._state, *map(_one, read))
            self._state = images.write_pages(self._state, *map(_one, write), group)

    def to_host(self, holding: Holding) -> Replica:
        """A packed copy of a holding's slot and pages; complete when this returns."""
        with self._reading():
            # np.array, since np.asarray on a CPU is a view that keeps the device's array.
            slot = jax.tree.map(np.array, images.read_slot(self._state, _number(holding.slot)))
            groups = [
                jax.tree.map(np.asarray, images.read_pages(self._state, target, draft))
                for target, draft in self._groups(holding)
            ]

        def packed(count):
            return lambda *leaves: np.concatenate(leaves, axis=1)[:, :count].copy()

        target = jax.tree.map(
            packed(len(holding.target_pages)), *[group.target for group in groups]
        )
        draft = jax.tree.map(packed(len(holding.draft_pages)), *[group.draft for group in groups])
        return Replica(slot=slot, pages=images.PageGroup(target=target, draft=draft))

    def like(self, tokens: int) -> Replica:
        """Shapes and dtypes of the replica of so many tokens."""
        pages = -(-tokens // self._models.run.page_size)
        ids = jax.ShapeDtypeStruct((pages,), jnp.int32)
        one = jax.ShapeDtypeStruct((), jnp.int32)
        return Replica(
            slot=jax.eval_shape(images.read_slot, self._state, one),
            pages=jax.eval_shape(images.read_pages, self._state, ids, ids),
        )

    def from_host(self, holding: Holding, replica: Replica) -> None:
        """Writes a replica into a holding that has as many pages or more."""
        self._state = images.write_slot(self._state, _number(holding.slot), replica.slot)
        held = max((leaf.shape[1] for leaf in jax.tree.leaves(replica.pages)), default=0)
        some = dataclasses.replace(
            holding, target_pages=holding.target_pages[:held],
            draft_pages=holding.draft_pages[:held],
        )
        for place, (target, draft) in enumerate(self._groups(some)):
            group = jax.tree.map(functools.partial(_group_of, place), replica.pages)
            self._state = images.write_pages(self._state, target, draft, group)

    @contextlib.contextmanager
    def _reading(self):
        """For reads of what programs left: one that failed on the device is known only here.

        The state came from the same programs, so it is lost with what they left.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError:
            for leaf in jax.tree.leaves(self._state):
                leaf.delete()
            raise

    def _groups(self, holding: Holding):
        pages = self._models.run.pages
        return images.page_groups(holding.target_pages, holding.draft_pages, pages)

    def _row(self, lane: int, holding: Holding) -> Rows:
        slot = _one(holding.slot)
        return Rows(lane=_one(lane), read_slot=slot, write_slot=slot)

    def _batch(self, live: Mapping[int, int]) -> Rows:
        if self._live != dict(live):
            run = self._models.run
            lanes = [lane if lane in live else run.lanes for lane in range(run.batch)]
            slots = [live.get(lane, run.slots) for lane in range(run.batch)]
            lane, slot = (jnp.array(np.array(one, np.int32)) for one in (lanes, slots))
            self._rows = Rows(lane=lane, read_slot=slot, write_slot=slot)
            self._live = dict(live)
        return self._rows

    def _control(self, lane: int, request: Request) -> None:
        one = SamplingArrays.of([request.sampling], self._models.target.public_vocab)
        ends = jnp.array(eos_row(request.eos_ids)[None])
        self._sampling, self._eos_ids = _set_row(
            (self._sampling, self._eos_ids), _number(lane), (one, ends)
        )

    def _table(self, pages: Sequence[int]) -> jax.Array:
        return _padded(pages, self._models.run.max_pages, self._models.run.pages)


def _one(number: int) -> jax.Array:
    return jnp.array(np.array([number], np.int32))


def _number(number: int) -> jax.Array:
    return jnp.array(np.array(number, np.int32))


def _padded(ids: Sequence[int], length: int, filler: int = 0) -> jax.Array:
    full = np.full((1, length), filler, np.int32)
    full[0, : len(ids)] = ids
    return jnp.array(full)


def _bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _group_of(place: int, leaf: np.ndarray) -> np.ndarray:
    """Pages of one group, filled up with zeros to its fixed size."""
    first = place * images.PAGE_GROUP
    some = leaf[:, first : first + images.PAGE_GROUP]
    lack = images.PAGE_GROUP - some.shape[1]
    return np.pad(some, ((0, 0), (0, lack), (0, 0), (0, 0)))


def _rope_delta(request: Request) -> int:
    return 0 if request.embeddings is None else request.embeddings.rope_delta


def _with_embeddings(
    models: Models, chunk: PrefillChunk, embeddings: Embeddings, start: int, length: int
) -> PrefillChunk:
    """The chunk with the caller's rows at its places, and the caller's rotation positions.

    Behind the prompt (forced tokens) there are no rows, and positions go on from its last.
    """
    width, behind = chunk.tokens.shape[1], start >= len(embeddings.positions)
    rows = np.zeros((1, width, models.target.hidden), models.run.dtypes.activation_dtype)
    replaced = np.zeros((1, width), bool)
    positions = np.array(chunk.positions)
    if behind:
        return chunk.replace(positions=jnp.array(positions + np.int32(embeddings.rope_delta)))
    positions[0, :length] = embeddings.positions[start : start + length]
    index = np.asarray(embeddings.index)
    here = (index >= start) & (index < start + length)
    rows[0, index[here] - start] = embeddings.rows[here]
    replaced[0, index[here] - start] = True
    return chunk.replace(
        positions=jnp.array(positions), embeddings=jnp.array(rows), replaced=jnp.array(replaced)
    )


@functools.partial(jax.jit, static_argnames="models", donate_argnames="state")
def _first(models: Models, params: Params, state: DecodeState, rows: Rows, sampling):
    """`first_token` of one lane, and [2] int32 {token, fault} in one array."""
    own = jax.tree.map(lambda x: x[rows.lane], sampling)
    state, fault = first_token(models, params, state, rows, own)
    token = state.sequence.anchor[rows.lane[0]]
    return state, jnp.stack([token, fault[0].astype(jnp.int32)])


@functools.partial(jax.jit, donate_argnames="controls")
def _set_row(controls, row, one):
    """Controls of the batch with those of one row replaced."""
    return jax.tree.map(lambda all_rows, own: all_rows.at[row].set(own[0]), controls, one)
