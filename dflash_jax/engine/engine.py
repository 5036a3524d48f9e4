"""Many requests on one device: submit, stream, cancel, fork, keep and restore, step by step.

The engine is plain synchronous Python. Nothing happens between calls; ``step`` moves everything by
one round, and the iterators call it for the caller. A request's tokens depend on its prompt,
controls and seed alone: who joins or leaves, what is cancelled and where state comes from changes
nothing.
"""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Collection, Iterator, Sequence

from dflash_jax.engine.checks import check_device, check_ids, check_params, check_request
from dflash_jax.engine.generate import GREEDY, check_widths
from dflash_jax.engine.images import ImageStore, StateImage
from dflash_jax.engine.lanes import Lanes
from dflash_jax.engine.pages import CapacityError
from dflash_jax.engine.placement import Waiting, positions_of
from dflash_jax.engine.pools import Pools
from dflash_jax.engine.prompts import Prompt, plain_ids, plain_stops, prompt_ids
from dflash_jax.engine.request import (
    Embeddings,
    FinishReason,
    OnTokens,
    Output,
    Piece,
    Request,
    Statistics,
)
from dflash_jax.engine.saved import Saved, identity, load_image, save_image
from dflash_jax.engine.schedule import Row, Scheduler
from dflash_jax.engine.text import TextTokenizer
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params
from dflash_jax.weights.fingerprint import fingerprint

CHECKPOINTS = ("prompt", "turn")


class Engine:
    """Continuous batching over ``models.run.batch`` rows.

    Prefix reuse: a state image is kept at the end of every prompt and turn, as far as slots, pages
    and budgets allow, and a prompt that begins with an image's tokens starts from it. Images need
    slots beyond those of the rows (``RunConfig.slots``), or room on the host.
    """

    def __init__(
        self,
        models: Models,
        params: Params,
        *,
        tokenizer: TextTokenizer | None = None,
        eos_ids: Collection[int] = (),
        tree_nodes: Sequence[int] | str | None = None,
        checkpoints: Collection[str] = CHECKPOINTS,
        device_bytes: int | None = None,
        host_bytes: int | None = 0,
    ):
        """Allocates the state; compiles nothing.

        Args:
          models, params: as for `generate`.
          tokenizer: needed for prompts that are text, for text of outputs and for stop strings.
          eos_ids: ids that end a request which names none itself.
          tree_nodes: as for `generate`.
          checkpoints: which images are kept without being asked for: "prompt", "turn".
          device_bytes: budget of the images' device copies; None for what slots and pages allow.
          host_bytes: budget of host replicas, which device copies move to when they must go; None
            for no limit, 0 for none.
        Raises:
          ValueError: weights, widths or options that do not fit.
        """
        check_params(models, params)
        check_device(models)
        unknown = set(checkpoints) - set(CHECKPOINTS)
        if unknown:
            raise ValueError(f"checkpoints: expected some of {CHECKPOINTS}, got {sorted(unknown)}")
        self.models, self.params, self.tokenizer = models, params, tokenizer
        self._eos_ids = frozenset(plain_ids(eos_ids))
        self._numbers = itertools.count()
        self._busy = False
        self._lanes = Lanes(models, params)
        self._pools = Pools(models.draft, models.run)
        self._store = ImageStore(
            self._lanes, self._pools, device_bytes=device_bytes, host_bytes=host_bytes
        )
        self._schedule = Scheduler(
            models, self._lanes, self._pools, self._store, check_widths(models, tree_nodes),
            checkpoints,
        )

    # -- requests ------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        eos_ids: Collection[int] | None = None,
        stop_strings: Sequence[str] = (),
        stop_sequences: Sequence[Sequence[int]] = (),
        sampling: SamplingParams = GREEDY,
        embeddings: Embeddings | None = None,
        on_tokens: OnTokens | None = None,
        reuse: bool = True,
        wait: bool = True,
    ) -> Request:
        """Enters a request; `step` and the iterators run it.

        Args:
          prompt: token ids, text, or messages for the tokenizer's chat template.
          max_new_tokens: outputs, at least 1.
          eos_ids: ids that end it; None for the engine's.
          stop_strings: strings that end it; its text ends before them.
          stop_sequences: id sequences that end it.
          sampling: its controls and seed.
          embeddings: rows in place of the embedding at some places. Such a prompt neither starts
            from an image nor leaves one for others.
          on_tokens: called with (number, new ids) after each commit; False cancels the request.
          reuse: whether it may start from an image that its prompt begins with.
          wait: whether it may wait for a lane, a slot or pages.
        Returns:
          the request, which shows its progress; ``request.output()`` once it has ended.
        Raises:
          ValueError: what it asks for cannot be run.
          CapacityError: it would never fit the pools, or ``wait`` is False and it does not fit now.
        """
        ids = prompt_ids(prompt, self.tokenizer)
        request = Request(
            row=next(self._numbers),
            prompt=ids,
            max_new_tokens=max_new_tokens,
            eos_ids=self._eos_ids if eos_ids is None else frozenset(plain_ids(eos_ids)),
            **plain_stops({"stop_strings": stop_strings, "stop_sequences": stop_sequences}),
            decode=None if self.tokenizer is None else self.tokenizer.decode,
            sampling=sampling,
            embeddings=embeddings,
            on_tokens=on_tokens,
            statistics=Statistics(prompt_tokens=len(ids)),
        )
        check_request(self.models, request)
        self._enqueue(
            Waiting(request=request, image=None, reuse=reuse and embeddings is None), wait
        )
        return request

    def generate(self, prompts: Sequence[Prompt], **options) -> list[Output]:
        """Runs prompts to their end, with the options of `submit`; other requests go on too.

        If anything is raised meanwhile, all of them are cancelled.
        """
        requests = []
        try:
            for prompt in prompts:
                requests.append(self.submit(prompt, **options))
            return [self.wait_for(request) for request in requests]
        except BaseException:
            for request in requests:
                self._withdraw(request)
            raise

    def wait_for(self, request: Request) -> Output:
        """Steps until a request has ended.

        Raises:
          CapacityError: it waits, and nothing that runs could ever make room for it.
        """
        while request.finish_reason is None:
            self._advance(request)
        return request.output()

    def stream(self, request: Request) -> Iterator[Piece]:
        """What a request publishes, as it comes, from its beginning.

        Closing it after it has begun cancels the request; what `step` raises does not.
        """
        shown = 0
        try:
            while True:
                while shown < len(request.pieces):
                    shown += 1
                    yield request.pieces[shown - 1]
                if request.finish_reason is not None:
                    return
                self._advance(request)
        except GeneratorExit:
            self.cancel(request)
            raise

    async def astream(self, request: Request) -> AsyncIterator[Piece]:
        """`stream` for asyncio: other tasks run between rounds and may stream other requests."""
        shown = 0
        try:
            while True:
                while shown < len(request.pieces):
                    shown += 1
                    yield request.pieces[shown - 1]
                if request.finish_reason is not None:
                    return
                self._advance(request)
                await asyncio.sleep(0)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancel(request)
            raise

    def cancel(self, request: Request) -> None:
        """Ends a request where it stands; what it has published stays. Nothing if it has ended.

        Raises:
          ValueError: it is no request of this engine.
          what a callback raises while earlier rounds are published; the request has ended then.
        """
        if request.finish_reason is None and not self._schedule.knows(request):
            raise ValueError(f"request: expected one of this engine, got number {request.row}")
        self._recover()
        try:
            self._schedule.settle()  # what the device has done is published
        finally:
            self._withdraw(request)

    def step(self) -> bool:
        """Admits what fits, reads a chunk of every unread prompt, and runs a round of the rest.

        Returns:
          False when nothing could be done.
        Raises:
          whatever a callback, a tokenizer or the device raises. The engine stays usable: no row is
          left half moved, and the next step goes on. If the device has lost the state itself, all
          rows end with a fault.
        """
        if self._busy:
            raise RuntimeError("step: expected no call from inside a callback")
        self._busy = True
        try:
            return self._schedule.step()
        finally:
            self._busy = False
            self._recover()

    def read(self, request: Request) -> int:
        """How many tokens of a request's prompt have been read so far; for a progress bar."""
        if request.tokens or request.finish_reason is not None:
            return len(request.prompt)
        row = self._schedule.row_of(request)
        return 0 if row is None else self._schedule.frontier(row)

    @property
    def idle(self) -> bool:
        """No request runs or waits."""
        return not self._schedule.rows and not self._schedule.waiting

    # -- images --------------------------------------------------------------------------------

    def find(self, ids: Sequence[int]) -> StateImage | None:
        """The image that a prompt of these ids would start from, to save or to restore."""
        return self._store.longest_prefix(plain_ids(ids))

    def checkpoint(self, request: Request) -> StateImage:
        """Keeps the state of a running request where it stands; it goes on unchanged.

        Raises:
          ValueError: the request has no lane.
          CapacityError: no slot, or no page for the tail, can be made free.
        """
        return self._schedule.capture(self._row(request), kept=True)

    def restore(self, image: StateImage, *, wait: bool = True, **changes) -> Request:
        """A new request that goes on from an image as the original would have.

        Args:
          changes: other ``max_new_tokens`` (counted from the prompt's end), ``sampling``,
            ``eos_ids``, ``on_tokens``, ...; see `Request`.
        Raises:
          ValueError: the image is gone, or nothing is left of the budget.
          CapacityError: as `submit`.
        """
        self._check_there(image)
        request = image.origin.continued(next(self._numbers), **plain_stops(changes))
        if (request.prompt, request.tokens) != (image.origin.prompt, image.origin.tokens):
            raise ValueError("changes: expected the image's own prompt and tokens, got others")
        check_request(self.models, request)
        image.users += 1
        try:
            self._enqueue(Waiting(request=request, image=image, reuse=False), wait)
        except BaseException:
            self._store.leave(image)
            raise
        return request

    def fork(
        self,
        request: Request,
        count: int = 1,
        *,
        sampling: Sequence[SamplingParams] | None = None,
        **changes,
    ) -> list[Request]:
        """New requests that go on from where a running one stands, which itself goes on.

        Args:
          count: how many.
          sampling: controls of each; None for the request's own.
          changes: as for `restore`.
        Raises:
          ValueError: the request has no lane, or the controls are not ``count``.
          CapacityError: as `checkpoint`.
        """
        controls = [request.sampling] * count if sampling is None else list(sampling)
        if count < 1 or len(controls) != count:
            raise ValueError(f"sampling: expected {count} entries, at least 1, got {len(controls)}")
        image = self._schedule.capture(self._row(request), temporary=True)
        image.users += 1  # until all have been entered
        made = []
        try:
            for one in controls:
                made.append(self.restore(image, sampling=one, **changes))
            return made
        except BaseException:
            for copy in made:
                self._withdraw(copy)
            raise
        finally:
            self._store.leave(image)

    def drop(self, image: StateImage) -> None:
        """Forgets an image; requests that wait for it are cancelled."""
        for waiting in tuple(self._schedule.waiting):
            if waiting.image is image:
                self.cancel(waiting.request)
        if not image.dropped:
            self._store.drop(image)

    def replicate(self, image: StateImage, *, drop_device: bool = False) -> None:
        """Makes a host copy of an image; it counts only once every byte has arrived.

        Args:
          drop_device: gives the slot and pages back then.
        Raises:
          ValueError: the image is gone.
          CapacityError: the host budget cannot hold it.
        """
        self._check_there(image)
        self._store.replicate(image)
        if drop_device:
            self._store.release_device(image)

    def save(self, image: StateImage, folder) -> None:
        """Writes an image to a folder; see `engine/saved.py`. Raises ValueError if it is gone."""
        self._check_there(image)
        replica = image.replica or self._lanes.to_host(image.holding)
        save_image(
            folder, Saved(tokens=image.tokens, origin=image.origin, replica=replica),
            self._identity,
        )

    def load(self, folder) -> StateImage:
        """Reads an image from a folder. It is kept, on the host, until it is dropped.

        Raises:
          ValueError: it is incomplete, or was made with other weights, models, dtypes, page size or
            format; or its ids do not fit the run.
        """
        decode = None if self.tokenizer is None else self.tokenizer.decode
        saved = load_image(folder, self._identity, self._lanes.like, decode)
        if len(saved.tokens) >= self.models.run.max_context:
            raise ValueError(
                f"max_context: expected more than {len(saved.tokens)}, "
                f"got {self.models.run.max_context}"
            )
        image = StateImage(
            tokens=saved.tokens, origin=saved.origin, holding=None, replica=saved.replica,
            kept=True,
        )
        self._store.add(image)
        return image

    # -- tokens of the caller's ----------------------------------------------------------------

    def force(self, request: Request, ids: Sequence[int]) -> None:
        """Publishes tokens of the caller's choice as if the request had said them.

        They are counted for penalties and charged to the budget, and consume no randomness. An EOS
        id, a stop or the budget among them ends the request there. Source: contracts 9.6.

        Raises:
          ValueError: the request has published no token yet or has ended, or no public ids.
        """
        row = self._row(request)
        if not row.decoding:
            raise ValueError("request: expected one that has published a token, got none")
        check_ids("ids", ids, self.models.target.public_vocab)
        if len(ids) == 0:
            raise ValueError("ids: expected at least one token, got none")
        self._schedule.force(row, plain_ids(ids))

    # -- inside --------------------------------------------------------------------------------

    def _enqueue(self, waiting: Waiting, wait: bool) -> None:
        request = waiting.request
        need, have = self._pools.pages_of(positions_of(request)), self.models.run.pages
        if need > have:
            raise CapacityError(f"pages: need {need}, have {have} in the whole pool")
        if wait:
            self._schedule.waiting.append(waiting)
        else:
            self._schedule.place_now(waiting)

    def _advance(self, request: Request) -> None:
        if self.step() or request.finish_reason is not None:
            return
        if not self._schedule.waiting:
            raise ValueError(f"request: expected one of this engine, got number {request.row}")
        raise CapacityError(self._schedule.shortage(self._schedule.waiting[0]))

    def _row(self, request: Request) -> Row:
        self._recover()
        self._schedule.settle()  # after a step that raised there may be something to enter
        row = self._schedule.row_of(request)
        if row is None or request.finish_reason is not None:
            raise ValueError(f"request: expected one that runs, got number {request.row}, which "
                             f"{'waits' if request.finish_reason is None else 'has ended'}")
        return row

    def _withdraw(self, request: Request) -> None:
        try:
            request.end(FinishReason.CANCELLED)
        finally:
            self._schedule.withdraw(request)

    def _check_there(self, image: StateImage) -> None:
        if image.dropped:
            raise ValueError("image: expected one that is kept, got one that has been dropped")
        if image not in self._store:
            raise ValueError("image: expected one of this engine, got another's")

    @functools.cached_property
    def _identity(self) -> dict:
        return identity(self.models, fingerprint(self.params))

    def _recover(self) -> None:
        if self._lanes.lost:
            self._lanes.reset()
            self._store.reset()
            self._schedule.release_all(FinishReason.FAULT)
