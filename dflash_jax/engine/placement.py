"""How a request gets a slot and its pages: empty, or with the state of an image in them.

All pages that a request can ever need are taken when it is placed, so a running one never lacks
any. State comes, in this order: from the image's device copy, of which the full pages are shared;
from its host replica; or, when nothing else fits, the image itself is taken over.
"""

import dataclasses

from dflash_jax.engine.images import ImageStore, StateImage
from dflash_jax.engine.lanes import Lanes
from dflash_jax.engine.pools import Holding, Pools
from dflash_jax.engine.request import Request


@dataclasses.dataclass(kw_only=True, eq=False)
class Waiting:
    """A request without a lane.

    Fields:
      image: where it has to start; None to start from what its prompt finds.
      reuse: whether the prompt may find an image.
      failed: placing it has raised; a second time in a row ends the request.
    """

    request: Request
    image: StateImage | None
    reuse: bool
    failed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """What a request got: its slot and pages, and how many tokens an image supplied."""

    holding: Holding
    reused: int


class Placement:
    """Finds room and state for requests."""

    def __init__(self, lanes: Lanes, pools: Pools, store: ImageStore):
        self._lanes, self._pools, self._store = lanes, pools, store

    def place(self, waiting: Waiting, lane: int) -> Placed | None:
        """Puts a request's state into a lane; None, and nothing given up for it, without room."""
        image = waiting.image
        if image is None and waiting.reuse:
            image = self._store.longest_prefix(waiting.request.prompt)
        if image is None:
            holding = self._empty(waiting.request, lane)
            return holding and Placed(holding=holding, reused=0)
        self._store.touch(image)
        frontier = image.frontier
        if image.holding is None:
            holding = self._restored(waiting.request, image, lane)
        else:
            holding = self._branched(waiting.request, image, lane)
            if holding is None and not image.kept and image.users == int(waiting.image is image):
                holding = self._moved(waiting.request, image, lane)
        return holding and Placed(holding=holding, reused=frontier)

    def _empty(self, request: Request, lane: int) -> Holding | None:
        positions = positions_of(request)
        if not self._store.make_room(1, self._pools.pages_of(positions)):
            return None
        holding = self._pools.take(positions)
        return self._filled(holding, lambda: self._lanes.begin(lane, holding, request))

    def _restored(self, request: Request, image: StateImage, lane: int) -> Holding | None:
        positions, replica = positions_of(request), image.replica  # whatever the budget does
        if not self._store.make_room(1, self._pools.pages_of(positions), spare=image):
            return None
        holding = self._pools.take(positions)

        def fill():
            self._lanes.from_host(holding, replica)
            self._lanes.resume(lane, holding, request, image.frontier)

        return self._filled(holding, fill)

    def _branched(self, request: Request, image: StateImage, lane: int) -> Holding | None:
        frontier, positions = image.frontier, positions_of(request)
        new = self._pools.branch_pages(frontier, positions)
        if not self._store.make_room(1, new, spare=image):
            return None
        holding, tail = self._pools.branch(image.holding, frontier, positions)

        def fill():
            self._lanes.copy(image.holding, holding, tail)
            self._lanes.resume(lane, holding, request, frontier)

        return self._filled(holding, fill)

    def _moved(self, request: Request, image: StateImage, lane: int) -> Holding | None:
        """The image's own slot and pages; the image is gone then."""
        positions = positions_of(request)
        more = self._pools.pages_of(positions) - len(image.holding.target_pages)
        if not self._store.make_room(0, more, spare=image):
            return None
        holding = self._pools.grow(image.holding, positions)
        try:
            self._lanes.resume(lane, holding, request, image.frontier)
        except BaseException:
            self._pools.shrink(holding, image.frontier)
            raise
        image.holding = holding
        return self._store.detach(image)

    def _filled(self, holding: Holding, fill) -> Holding:
        """The holding after the device calls of `fill`; it goes back if they fail."""
        try:
            fill()
        except BaseException:
            self._pools.give(holding)
            raise
        return holding


def positions_of(request: Request) -> int:
    """Positions the request's K/V can come to: the last token it may publish is not processed."""
    return len(request.prompt) + request.max_new_tokens - 1
