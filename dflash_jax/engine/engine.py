"""Many requests on one device: submit, stream, cancel, fork, keep and restore, step by step.

The engine is plain synchronous Python. Nothing happens between calls; ``step`` moves everything by
one round, and the iterators call it for the caller. A request's tokens depend on its prompt,
controls and seed alone: who joins or leaves, what is cancelled and where state comes from changes
nothing.
"""

import itertools
from collections.abc import Collection, Sequence

from dflash_jax.engine.checks import (
    check_bytes,
    check_device,
    check_flag,
    check_ids,
    check_params,
    check_request,
    listed,
    plain_ids,
)
from dflash_jax.engine.generate import GREEDY, check_widths
from dflash_jax.engine.images import ImageStore
from dflash_jax.engine.keeping import Keeping
from dflash_jax.engine.lanes import Lanes
from dflash_jax.engine.options import Prompt, plain_options, prompt_ids
from dflash_jax.engine.pages import CapacityError
from dflash_jax.engine.placement import Waiting, positions_of
from dflash_jax.engine.pools import Pools
from dflash_jax.engine.request import (
    Embeddings,
    FinishReason,
    OnTokens,
    Output,
    Request,
    Statistics,
)
from dflash_jax.engine.rows import Row
from dflash_jax.engine.schedule import Scheduler
from dflash_jax.engine.stream import Stream
from dflash_jax.engine.text import TextTokenizer
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.steps import Models, Params

CHECKPOINTS = ("prompt", "turn")


class Engine(Keeping):
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
        for name in listed("checkpoints", "names", checkpoints):
            if name not in CHECKPOINTS:
                raise ValueError(f"checkpoints: expected some of {CHECKPOINTS}, got {name!r}")
        check_bytes("device_bytes", device_bytes)
        check_bytes("host_bytes", host_bytes)
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise ValueError(f"tokenizer: expected one that decodes, or None, got {tokenizer!r}")
        self.models, self.params, self.tokenizer = models, params, tokenizer
        check_ids("eos_ids", plain_ids("eos_ids", eos_ids), models.target.vocab_rows)
        self._eos_ids = frozenset(plain_ids("eos_ids", eos_ids))
        self._numbers = itertools.count()
        self._busy = False
        self._abandoned: list[Request] = []
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
        check_flag("reuse", reuse)
        check_flag("wait", wait)
        ids = prompt_ids(prompt, self.tokenizer)
        given = dict(
            max_new_tokens=max_new_tokens, eos_ids=eos_ids, stop_strings=stop_strings,
            stop_sequences=stop_sequences, sampling=sampling, on_tokens=on_tokens,
        )
        request = Request(
            row=next(self._numbers),
            prompt=ids,
            decode=None if self.tokenizer is None else self.tokenizer.decode,
            embeddings=embeddings,
            statistics=Statistics(prompt_tokens=len(ids)),
            **plain_options(given, self._eos_ids),
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
            for prompt in listed("prompts", "prompts", prompts):
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
        self._own(request)
        while request.finish_reason is None:
            self.advance(request)
        return request.output()

    def stream(self, request: Request) -> Stream:
        """What a request publishes, as it comes, from its beginning; see `Stream`."""
        return Stream(self, self._own(request))

    def astream(self, request: Request) -> Stream:
        """`stream` for asyncio: other tasks run between rounds and may stream other requests."""
        return self.stream(request)

    def cancel(self, request: Request) -> None:
        """Ends a request where it stands; what it has published stays. Nothing if it has ended.

        Raises:
          ValueError: it is no request of this engine.
          what a callback raises while earlier rounds are published; the request has ended then.
        """
        self._own(request)
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
            while self._abandoned:
                self.cancel(self._abandoned.pop())

    def advance(self, request: Request) -> None:
        """A step for the sake of one request, which has not ended.

        Raises:
          CapacityError: nothing could be done; it waits, and nothing will ever make room for it.
        """
        if not self.step() and request.finish_reason is None:
            raise CapacityError(self._schedule.shortage(self._schedule.waiting[0]))

    def abandon(self, request: Request) -> None:
        """`cancel` for whoever may call in the middle of a step: it waits for the step's end."""
        if self._busy:
            self._abandoned.append(request)
        else:
            self.cancel(request)

    def read(self, request: Request) -> int:
        """How many tokens of a request's prompt have been read so far; for a progress bar."""
        self._own(request)
        if request.tokens or request.finish_reason is not None:
            return len(request.prompt)
        row = self._schedule.row_of(request)
        return 0 if row is None else self._schedule.frontier(row)

    @property
    def idle(self) -> bool:
        """No request runs or waits."""
        return not self._schedule.rows and not self._schedule.waiting

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
        ids = plain_ids("ids", ids)
        check_ids("ids", ids, self.models.target.public_vocab)
        if not ids:
            raise ValueError("ids: expected at least one token, got none")
        self._schedule.force(row, ids)

    # -- inside --------------------------------------------------------------------------------

    def _enqueue(self, waiting: Waiting, wait: bool) -> None:
        request = waiting.request
        need, have = self._pools.pages_of(positions_of(request)), self.models.run.pages
        if need > have:
            raise CapacityError(f"pages: need {need}, have {have} in the whole pool")
        if wait:
            self._schedule.waiting.append(waiting)
        else:
            if not self._busy:  # a step recovers at its end
                self._recover()
            self._schedule.place_now(waiting)

    def _own(self, request: Request) -> Request:
        """The request, unless it is none of this engine's; one that has ended may be anybody's."""
        if not isinstance(request, Request):
            raise ValueError(f"request: expected a Request, got {request!r}")
        if request.finish_reason is None and not self._schedule.knows(request):
            raise ValueError(f"request: expected one of this engine, got number {request.row}")
        return request

    def _row(self, request: Request) -> Row:
        self._own(request)
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

    def _recover(self) -> None:
        if self._lanes.lost:
            self._lanes.reset()
            self._store.reset()
            self._schedule.release_all(FinishReason.FAULT)
