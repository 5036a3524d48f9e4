"""State images the engine keeps: on the device, on the host, or both; found again by their tokens.

An image is immutable and covers the tokens [0, F): forks, checkpoints at the end of a prompt or a
turn, and what the caller asked to keep are all the same thing. The device copy holds a slot and
pages, full ones shared with whoever has the same prefix; a host copy (replica) is packed and has
everything, and is entered only when it is complete. Source: contracts 10.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

from dflash_jax.engine.lanes import Lanes, Replica
from dflash_jax.engine.pages import CapacityError
from dflash_jax.engine.pools import Holding, Pools
from dflash_jax.engine.request import Request


@dataclasses.dataclass(kw_only=True, eq=False)
class StateImage:
    """State after the tokens [0, F).

    Fields:
      tokens: their ids, F of them.
      origin: the request as it was, so that it can go on from here: its prompt, controls, stops and
        published tokens, of which the last is the anchor. It is never changed.
      holding: the device copy, or None.
      replica: the host copy, or None.
      kept: the caller's: no budget drops it.
      users: requests that wait to start from it; while there are any it is not dropped either.
      used: when it was last used, in operations.
      temporary: dropped with its last user.
    """

    tokens: tuple[int, ...]
    origin: Request
    holding: Holding | None
    replica: Replica | None = None
    kept: bool = False
    users: int = 0
    used: int = 0
    temporary: bool = False

    @classmethod
    def of(cls, request: Request, frontier: int, holding: Holding, **fields) -> "StateImage":
        """Of a request as it stands; the holding has its state at that frontier."""
        return cls(
            tokens=tuple(request.ledger[:frontier]), origin=request.continued(request.row),
            holding=holding, **fields,
        )

    @property
    def frontier(self) -> int:
        """F."""
        return len(self.tokens)

    @property
    def reusable(self) -> bool:
        """A prompt that begins with the tokens may start here: ids alone say what was read."""
        return self.origin.embeddings is None

    @property
    def dropped(self) -> bool:
        """No copy is left."""
        return self.holding is None and self.replica is None


class ImageStore:
    """All images, the budgets in bytes, and who makes room.

    A budget of None has no limit of its own: on the device slots and pages are the limit.
    """

    def __init__(
        self, lanes: Lanes, pools: Pools, *, device_bytes: int | None, host_bytes: int | None
    ):
        self._lanes, self._pools = lanes, pools
        self._device_budget, self._host_budget = device_bytes, host_bytes
        self._slot_bytes, self._page_bytes = lanes.slot_bytes, lanes.page_bytes
        self._images: list[StateImage] = []
        self._clock = itertools.count(1)

    def __iter__(self):
        return iter(tuple(self._images))

    def __contains__(self, image: StateImage) -> bool:
        return any(image is own for own in self._images)

    def __len__(self) -> int:
        return len(self._images)

    @property
    def device_bytes(self) -> int:
        """Bytes of all device copies; a shared page counts for each image that holds it."""
        return sum(self._bytes(image.holding) for image in self._images if image.holding)

    @property
    def host_bytes(self) -> int:
        """Bytes of all replicas."""
        return sum(image.replica.nbytes for image in self._images if image.replica)

    def add(self, image: StateImage) -> None:
        """Enters an image, and drops what the budgets no longer allow."""
        self.touch(image)
        self._images.append(image)
        try:
            self.trim()
        except BaseException:
            self.drop(image)  # nobody has learned of it
            raise

    def touch(self, image: StateImage) -> None:
        """Marks a use."""
        image.used = next(self._clock)

    def exact(self, tokens: Sequence[int]) -> StateImage | None:
        """An image that a prompt may start from and that has exactly these tokens."""
        tokens = tuple(tokens)
        for image in self._images:
            if image.reusable and image.tokens == tokens:
                return image
        return None

    def longest_prefix(self, prompt: tuple[int, ...]) -> StateImage | None:
        """The image with the most tokens that the prompt begins with, compared id by id."""
        fits = (
            image
            for image in self._images
            if image.reusable
            and 0 < image.frontier <= len(prompt)
            and image.tokens[-1] == prompt[image.frontier - 1]  # seldom so by chance
            and image.tokens == prompt[: image.frontier]
        )
        return max(fits, key=lambda one: (one.frontier, one.holding is not None), default=None)

    def drop(self, image: StateImage) -> None:
        """Forgets an image and gives back what it holds."""
        self._images.remove(image)
        holding, image.holding, image.replica = image.holding, None, None
        if holding is not None:
            self._pools.give(holding)

    def release_device(self, image: StateImage) -> None:
        """Drops the device copy.

        Raises:
          ValueError: there is no replica to come back from.
        """
        if image.replica is None:
            raise ValueError("image: expected one with a host replica, got none")
        holding, image.holding = image.holding, None
        if holding is not None:
            self._pools.give(holding)

    def replicate(self, image: StateImage) -> None:
        """Makes a host copy; it counts as one only when every byte has arrived.

        Raises:
          CapacityError: the host budget cannot hold it, whatever else is dropped.
        """
        if image.replica is not None:
            return
        need, have = self._bytes(image.holding), self._host_budget
        if have is not None:
            pinned = sum(i.replica.nbytes for i in self._images if i.replica and self._pinned(i))
            if need + pinned > have:
                raise CapacityError(f"host bytes: need {need}, have {have - pinned} of {have}")
        image.replica = self._lanes.to_host(image.holding)
        self.touch(image)
        self.trim()

    def make_room(self, slots: int, pages: int, spare: StateImage | None = None) -> bool:
        """Frees device copies, least recently used first, until so much is free.

        A copy moves to the host if the budget there has room, else an image without a replica is
        dropped. Kept and awaited images are never dropped, and ``spare`` is not touched.

        Returns:
          whether so many slots, and pages of each pool, are free. If giving up everything would
          not be enough, nothing is given up.
        """
        if not self._could_free(slots, pages, spare):
            return False
        while self._pools.shortage(slots, pages) is not None:
            victim = self._victim(spare)
            if victim is None:
                return False
            self._demote(victim)
        return True

    def trim(self) -> None:
        """Keeps the budgets."""
        if self._device_budget is not None:
            while self.device_bytes > self._device_budget:
                victim = self._victim(None)
                if victim is None:
                    break
                self._demote(victim)
        self._trim_host()

    def detach(self, image: StateImage) -> Holding:
        """Forgets an image whose holding the caller takes over."""
        self._images.remove(image)
        holding, image.holding, image.replica = image.holding, None, None
        return holding

    def leave(self, image: StateImage) -> None:
        """One user less; the last one takes a temporary image along."""
        image.users -= 1
        if image.users == 0 and image.temporary and image in self._images:
            self.drop(image)

    def _trim_host(self) -> None:
        if self._host_budget is not None:
            while self.host_bytes > self._host_budget:
                held = [i for i in self._images if i.replica and not self._pinned(i)]
                if not held:
                    break
                oldest = min(held, key=lambda image: image.used)
                if oldest.holding is None:
                    self.drop(oldest)
                else:
                    oldest.replica = None

    def reset(self) -> None:
        """Forgets the device copies after the device has lost its state."""
        for image in self:
            holding, image.holding = image.holding, None
            if holding is not None:
                self._pools.give(holding)
            if image.replica is None:
                self._images.remove(image)

    def _could_free(self, slots: int, pages: int, spare: StateImage | None) -> bool:
        """Whether giving up every copy that may go would be enough."""
        held = [image.holding for image in self._able(spare)]
        return self._pools.shortage(
            slots - len(held), pages, freed=(
                Counter(page for one in held for page in one.target_pages),
                Counter(page for one in held for page in one.draft_pages),
            ),
        ) is None

    def _victim(self, spare: StateImage | None) -> StateImage | None:
        """The least recently used image whose device copy may go."""
        return min(self._able(spare), key=lambda image: image.used, default=None)

    def _able(self, spare: StateImage | None) -> list[StateImage]:
        return [
            image
            for image in self._images
            if image.holding is not None
            and image is not spare
            and (image.replica or not self._pinned(image) or self._fits_on_host(image))
        ]

    def _demote(self, image: StateImage) -> None:
        if image.replica is None and self._fits_on_host(image):
            image.replica = self._lanes.to_host(image.holding)
        if image.replica is None:
            self.drop(image)
        else:
            self.release_device(image)
            self._trim_host()

    def _fits_on_host(self, image: StateImage) -> bool:
        if self._host_budget is None:
            return True
        pinned = sum(i.replica.nbytes for i in self._images if i.replica and self._pinned(i))
        return self._bytes(image.holding) + pinned <= self._host_budget

    def _pinned(self, image: StateImage) -> bool:
        return image.kept or image.users > 0

    def _bytes(self, holding: Holding) -> int:
        pages = max(len(holding.target_pages), len(holding.draft_pages))
        return self._slot_bytes + pages * self._page_bytes
