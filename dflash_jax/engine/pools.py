"""What sequences and state images hold on the device: a slot, and pages of two pools. Host only."""

import dataclasses

from dflash_jax.config import DraftConfig, RunConfig
from dflash_jax.engine.pages import CapacityError, PageAllocator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holding:
    """A slot, and pages in order of position.

    Fields:
      slot: of the state image.
      target_pages: of the target's K/V.
      draft_pages: of the draft's full layers; none without such layers.
    """

    slot: int
    target_pages: tuple[int, ...]
    draft_pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tail:
    """The partial pages a copy of a prefix needs, as (from, to); None where there is none."""

    target: tuple[int, int] | None
    draft: tuple[int, int] | None


class Pools:
    """Slots and pages of a run. Every operation happens whole or raises and changes nothing."""

    def __init__(self, draft: DraftConfig | None, run: RunConfig):
        self._paged_draft = draft is not None and bool(draft.full_layers)
        self.target = PageAllocator(run.pages, run.page_size)
        self.draft = PageAllocator(run.pages if self._paged_draft else 0, run.page_size)
        self._slots = run.slots
        self._free_slots = list(range(run.slots - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free_slots)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.target.page_size

    def pages_of(self, tokens: int) -> int:
        """Pages of either pool that so many positions occupy."""
        return self.target.pages_of(tokens)

    def shortage(self, slots: int, pages: int, freed=((), ())) -> str | None:
        """What lacks for so many slots, and pages of each pool, in words; None for nothing.

        Args:
          freed: holders that would go away, as counts by page of the target's and of the draft's
            pool; a page that has no other holder then counts as free.
        """
        lacks = []
        if slots > len(self._free_slots):
            lacks.append(f"slots: need {slots}, have {len(self._free_slots)} of {self._slots}")
        named = [("pages", self.target), ("draft pages", self.draft)]
        for (name, pool), going in zip(named, freed, strict=True):
            if pool is self.draft and not self._paged_draft:
                continue
            have = pool.num_free + sum(pool.references(page) == going[page] for page in going)
            if pages > have:
                lacks.append(f"{name}: need {pages}, have {have} of {pool.num_pages}")
        return "; ".join(lacks) or None

    def take(self, tokens: int) -> Holding:
        """A slot and pages for so many positions. Raises CapacityError."""
        count = self.pages_of(tokens)
        self._require(1, count)
        return Holding(
            slot=self._free_slots.pop(),
            target_pages=tuple(self.target.allocate(count)),
            draft_pages=tuple(self.draft.allocate(count if self._paged_draft else 0)),
        )

    def branch(self, source: Holding, prefix: int, tokens: int) -> tuple[Holding, Tail]:
        """A slot and pages for ``tokens`` positions, the first ``prefix`` of them the source's.

        Full pages of the prefix are shared; its partial tail is a new page, whose bytes and those
        of the slot the caller has to copy. Raises CapacityError.
        """
        new = self.branch_pages(prefix, tokens)
        self._require(1, new)
        pages, tails = [], []
        for pool, held in ((self.target, source.target_pages), (self.draft, source.draft_pages)):
            if pool is self.draft and not self._paged_draft:
                pages.append(())
                tails.append(None)
                continue
            fork = pool.fork(held, prefix)
            more = pool.allocate(self.pages_of(tokens) - len(fork.pages))
            pages.append((*fork.pages, *more))
            tails.append(None if fork.copy_to is None else (fork.copy_from, fork.copy_to))
        holding = Holding(
            slot=self._free_slots.pop(), target_pages=pages[0], draft_pages=pages[1]
        )
        return holding, Tail(target=tails[0], draft=tails[1])

    def branch_pages(self, prefix: int, tokens: int) -> int:
        """New pages of each pool that `branch` takes."""
        return self.pages_of(tokens) - prefix // self.page_size

    def grow(self, holding: Holding, tokens: int) -> Holding:
        """The same with pages for at least so many positions. Raises CapacityError."""
        more = max(self.pages_of(tokens) - len(holding.target_pages), 0)
        self._require(0, more)
        draft = self.draft.allocate(more if self._paged_draft else 0)
        return Holding(
            slot=holding.slot,
            target_pages=(*holding.target_pages, *self.target.allocate(more)),
            draft_pages=(*holding.draft_pages, *draft),
        )

    def shrink(self, holding: Holding, tokens: int) -> Holding:
        """The same without the pages beyond so many positions."""
        return Holding(
            slot=holding.slot,
            target_pages=tuple(self.target.trim(holding.target_pages, tokens)),
            draft_pages=tuple(self.draft.trim(holding.draft_pages, tokens)),
        )

    def give(self, holding: Holding) -> None:
        """Takes a holding back."""
        self.target.release(holding.target_pages)
        self.draft.release(holding.draft_pages)
        self._free_slots.append(holding.slot)

    def check(self, holdings) -> None:
        """Raises AssertionError unless free lists and counts agree with all the holdings."""
        holdings = list(holdings)
        for pool, name in ((self.target, "target_pages"), (self.draft, "draft_pages")):
            pool.check()
            held = [page for holding in holdings for page in getattr(holding, name)]
            counted = sum(pool.references(page) for page in range(pool.num_pages))
            assert counted == len(held), f"{name}: {counted} references, {len(held)} held"
            assert len(set(held)) == pool.num_pages - pool.num_free, f"{name}: some are lost"
        slots = [holding.slot for holding in holdings]
        assert sorted(slots + self._free_slots) == list(range(self._slots)), "slots do not add up"

    def _require(self, slots: int, pages: int) -> None:
        if (shortage := self.shortage(slots, pages)) is not None:
            raise CapacityError(shortage)
