"""Free lists and reference counts against a naive model, and the errors by name."""

import random
from collections import Counter

import pytest

from dflash_jax.engine.pages import CapacityError, PageAllocator

PAGE = 4


class Holders:
    """The naive model: every holder is a list of pages; counts are recounted from all of them."""

    def __init__(self, num_pages):
        self.allocator = PageAllocator(num_pages, PAGE)
        self.held: list[tuple[list[int], int]] = []  # pages and tokens

    def check(self):
        self.allocator.check()
        counts = Counter(page for pages, _ in self.held for page in pages)
        for page in range(self.allocator.num_pages):
            assert self.allocator.references(page) == counts[page]
        assert self.allocator.num_free == self.allocator.num_pages - len(counts)

    def allocate(self, rng):
        tokens = rng.randrange(1, 4 * PAGE)
        count, free = self.allocator.pages_of(tokens), self.allocator.num_free
        if count > free:
            with pytest.raises(CapacityError, match=f"need {count}, have {free} free"):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count)
        assert len(set(pages)) == count
        self.held.append((pages, tokens))

    def fork(self, rng):
        if not self.held:
            return
        pages, tokens = rng.choice(self.held)
        tokens = rng.randrange(tokens + 1)
        full, partial = divmod(tokens, PAGE)
        if partial and not self.allocator.num_free:
            with pytest.raises(CapacityError, match="need 1, have 0"):
                self.allocator.fork(pages, tokens)
            return
        forked = self.allocator.fork(pages, tokens)
        assert forked.pages[:full] == pages[:full]
        assert len(forked.pages) == self.allocator.pages_of(tokens)
        if partial:
            assert (forked.copy_from, forked.copy_to) == (pages[full], forked.pages[-1])
            assert self.allocator.references(forked.copy_to) == 1
        else:
            assert forked.copy_from is forked.copy_to is None
        self.held.append((forked.pages, tokens))

    def release(self, rng):
        if self.held:
            pages, _ = self.held.pop(rng.randrange(len(self.held)))
            self.allocator.release(pages)

    def trim(self, rng):
        if self.held:
            place = rng.randrange(len(self.held))
            pages, tokens = self.held[place]
            tokens = rng.randrange(tokens + 1)
            self.held[place] = (self.allocator.trim(pages, tokens), tokens)


@pytest.mark.parametrize("seed", range(4))
def test_counts_and_free_list_agree_with_all_holders_after_every_operation(seed):
    rng = random.Random(seed)
    model = Holders(num_pages=rng.choice([1, 3, 12, 40]))
    for _ in range(1500):
        getattr(model, rng.choice(["allocate", "fork", "fork", "release", "trim"]))(rng)
        model.check()
    for pages, _ in model.held:
        model.allocator.release(pages)
    assert model.allocator.num_free == model.allocator.num_pages


def test_a_refused_allocation_takes_nothing():
    allocator = PageAllocator(2, PAGE)
    with pytest.raises(CapacityError, match=r"pages: need 3, have 2 free of 2 \(4 tokens each\)"):
        allocator.allocate(3)
    assert allocator.num_free == 2


def test_a_refused_fork_shares_nothing():
    allocator = PageAllocator(2, PAGE)
    pages = allocator.allocate(2)
    with pytest.raises(CapacityError):
        allocator.fork(pages, PAGE + 1)
    assert [allocator.references(page) for page in pages] == [1, 1]


def test_a_fork_at_a_page_edge_needs_no_page():
    allocator = PageAllocator(2, PAGE)
    pages = allocator.allocate(2)
    assert allocator.fork(pages, 2 * PAGE).pages == pages
    assert allocator.fork(pages, 0).pages == []


def test_releasing_twice_and_sharing_free_pages_are_errors_that_change_nothing():
    allocator = PageAllocator(3, PAGE)
    first, second = allocator.allocate(2)
    for pages in ([first, first], [first, 2], [first, 7], [first, -1]):
        with pytest.raises(ValueError, match="pages: expected"):
            allocator.release(pages)
    with pytest.raises(ValueError, match="pages: expected held pages"):
        allocator.share([first, 2])
    assert [allocator.references(page) for page in (first, second, 2)] == [1, 1, 0]
    with pytest.raises(ValueError, match=r"tokens: expected at most 4 \(1 pages\), got 5"):
        allocator.fork([first], PAGE + 1)


def test_a_pool_without_pages_serves_requests_for_none():
    allocator = PageAllocator(0, PAGE)
    assert allocator.allocate(0) == [] and allocator.fork([], 0).pages == []
    with pytest.raises(CapacityError, match="need 1, have 0"):
        allocator.allocate(1)
