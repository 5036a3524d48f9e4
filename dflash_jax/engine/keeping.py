"""An engine's calls on state images: keep, find, fork, restore, copy to the host, save and load."""

import functools
from collections.abc import Sequence

from dflash_jax.engine.checks import check_flag, check_request, is_integer, listed, plain_ids
from dflash_jax.engine.images import StateImage
from dflash_jax.engine.options import plain_options
from dflash_jax.engine.placement import Waiting
from dflash_jax.engine.request import Request
from dflash_jax.engine.saved import Saved, identity, load_image, save_image
from dflash_jax.sampling.params import SamplingParams
from dflash_jax.weights.fingerprint import fingerprint


class Keeping:
    """What `Engine` does with images; it sets the attributes that are read here."""

    def find(self, ids: Sequence[int]) -> StateImage | None:
        """The image that a prompt of these ids would start from, to save or to restore."""
        return self._store.longest_prefix(plain_ids("ids", ids))

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
            ``eos_ids``, ``on_tokens``, ...: `CHANGES` of `engine/options.py`, as for `submit`.
        Raises:
          ValueError: the image is gone, nothing is left of the budget, or other changes.
          CapacityError: as `submit`.
        """
        self._check_there(image)
        check_flag("wait", wait)
        changes = plain_options(changes, self._eos_ids)
        request = image.origin.continued(next(self._numbers), **changes)
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
        wait: bool = True,
        **changes,
    ) -> list[Request]:
        """New requests that go on from where a running one stands, which itself goes on.

        Args:
          count: how many.
          sampling: controls of each; None for the request's own.
          wait, changes: as for `restore`.
        Raises:
          ValueError: the request has no lane, the controls are not ``count``, or wrong changes.
          CapacityError: as `checkpoint`.
        """
        self._own(request)
        check_flag("wait", wait)
        if not is_integer(count) or count < 1:
            raise ValueError(f"count: expected an integer >= 1, got {count!r}")
        if sampling is None:
            controls = (request.sampling,) * count
        else:
            controls = listed("sampling", "SamplingParams", sampling)
        if len(controls) != count:
            raise ValueError(f"sampling: expected {count} entries, got {len(controls)}")
        row, changes = self._row(request), plain_options(changes, self._eos_ids)
        for one in controls:
            copy = request.continued(request.row, **(changes | {"sampling": one}))
            check_request(self.models, copy)
        # The one user is this call, until all have been entered: no budget drops the image before.
        image, made = self._schedule.capture(row, temporary=True, users=1), []
        try:
            for one in controls:
                made.append(self.restore(image, wait=wait, **(changes | {"sampling": one})))
            return made
        except BaseException:
            for entered in made:
                self._withdraw(entered)
            raise
        finally:
            self._store.leave(image)

    def drop(self, image: StateImage) -> None:
        """Forgets an image; requests that wait for it are cancelled."""
        self._check_image(image)
        for waiting in tuple(self._schedule.waiting):
            if waiting.image is image:
                self.cancel(waiting.request)
        if not image.dropped:
            self._check_there(image)
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
        check_flag("drop_device", drop_device)
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

    def _check_image(self, image: StateImage) -> None:
        if not isinstance(image, StateImage):
            raise ValueError(f"image: expected a StateImage, got {image!r}")

    def _check_there(self, image: StateImage) -> None:
        self._check_image(image)
        if image.dropped:
            raise ValueError("image: expected one that is kept, got one that has been dropped")
        if image not in self._store:
            raise ValueError("image: expected one of this engine, got another's")

    @functools.cached_property
    def _identity(self) -> dict:
        return identity(self.models, fingerprint(self.params))
