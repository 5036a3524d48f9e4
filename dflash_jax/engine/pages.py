"""Pages of one pool on the host: who holds which, and how often. Plain Python, no arrays.

The target's K/V and the K/V of a draft's full layers have a pool each, addressed by page tables. A
page is written by one sequence only; after that any number of sequences and state images may
share it. Source: contracts 3.3 and 10.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence


class CapacityError(RuntimeError):
    """There are not enough pages, slots or bytes; says what is needed and what there is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageFork:
    """Pages of a second holder of one prefix.

    Fields:
      pages: ids in order of position; the full ones are shared with the source.
      copy_from, copy_to: the partial tail page whose bytes have to be copied before either holder
        writes again; None for both when the prefix ends with a full page.
    """

    pages: list[int]
    copy_from: int | None
    copy_to: int | None


class PageAllocator:
    """Free list and reference counts of a pool.

    Invariant (`check`): a page is free exactly when nobody refers to it.
    """

    def __init__(self, num_pages: int, page_size: int):
        """``num_pages`` may be 0: such a pool serves requests for no pages."""
        self.page_size = page_size
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the last one is handed out next

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How many holders a page has."""
        return self._references[page]

    def pages_of(self, tokens: int) -> int:
        """Pages that so many positions occupy."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free pages; each has one holder, the caller.

        Raises:
          CapacityError: fewer are free; then none is taken.
        """
        if count > len(self._free):
            raise CapacityError(
                f"pages: need {count}, have {len(self._free)} free of {self.num_pages} "
                f"({self.page_size} tokens each)"
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to each page.

        Raises:
          ValueError: a page is free; then no count changes.
        """
        pages = list(pages)
        self._check_held(pages)
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Removes a holder from each page; one without any is free again.

        Raises:
          ValueError: a page is free already, or is named more often than it has holders.
        """
        pages = list(pages)
        self._check_held(pages)
        for page, count in Counter(pages).items():
            if count > self._references[page]:
                raise ValueError(
                    f"pages: expected page {page} at most {self._references[page]} times, "
                    f"got {count}"
                )
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def fork(self, pages: Sequence[int], tokens: int) -> PageFork:
        """Pages of a new holder of the first ``tokens`` positions: full ones shared, a tail new.

        Raises:
          CapacityError: the tail needs a page and none is free; then nothing changes.
          ValueError: the source does not cover that many positions.
        """
        if tokens > len(pages) * self.page_size:
            raise ValueError(
                f"tokens: expected at most {len(pages) * self.page_size} "
                f"({len(pages)} pages), got {tokens}"
            )
        full, partial = divmod(tokens, self.page_size)
        shared = list(pages[:full])
        self._check_held(shared)
        tail = self.allocate(1) if partial else []
        self.share(shared)
        return PageFork(
            pages=shared + tail,
            copy_from=pages[full] if partial else None,
            copy_to=tail[0] if partial else None,
        )

    def trim(self, pages: Sequence[int], tokens: int) -> list[int]:
        """Releases what lies beyond ``tokens`` positions; returns the pages that stay."""
        keep = self.pages_of(tokens)
        self.release(pages[keep:])
        return list(pages[:keep])

    def check(self) -> None:
        """Raises AssertionError unless the free list and the counts agree."""
        free = sorted(self._free)
        unused = [page for page, count in enumerate(self._references) if count == 0]
        assert free == unused, f"free list {free}, pages without a holder {unused}"

    def _check_held(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not 0 <= page < self.num_pages or self._references[page] == 0:
                raise ValueError(f"pages: expected held pages of {self.num_pages}, got {page}")
