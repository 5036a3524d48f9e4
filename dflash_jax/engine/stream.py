"""What a request publishes, as an iterator that drives the engine, for loops and for asyncio."""

import asyncio

from dflash_jax.engine.request import Piece, Request


class Stream:
    """Pieces of a request from its beginning; each may take steps of the engine to come.

    ``for`` and ``async for`` both work. Leaving a stream cancels its request: closing it, breaking
    out of its loop, or letting go of it, whether anything has been read of it or not. What a step
    raises does not: the stream then waits for the next call, and lets its request go on without it.
    """

    def __init__(self, engine, request: Request):
        self._engine, self._request = engine, request
        self._shown = 0
        self._responsible = True  # for the request's end

    def __iter__(self) -> "Stream":
        return self

    def __aiter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        while not self._ready():
            self._step()
        return self._take(StopIteration)

    async def __anext__(self) -> Piece:
        try:
            while not self._ready():
                self._step()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.close()
            raise
        return self._take(StopAsyncIteration)

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        self._responsible = False
        self._engine.cancel(self._request)

    async def aclose(self) -> None:
        """`close`, by the name that asynchronous iterators have for it."""
        self.close()

    def __del__(self):
        if self._responsible and self._request.finish_reason is None:
            self._engine.abandon(self._request)

    def _ready(self) -> bool:
        return self._shown < len(self._request.pieces) or self._request.finish_reason is not None

    def _step(self) -> None:
        self._responsible = False
        self._engine.advance(self._request)
        self._responsible = True

    def _take(self, end: type[Exception]) -> Piece:
        if self._shown == len(self._request.pieces):
            raise end
        self._shown += 1
        return self._request.pieces[self._shown - 1]
