from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_runtime.errors import InvariantViolation
from radix_runtime.memory.page_allocator import PageAllocator


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_every_page_is_free_or_taken_once(num_pages: int, actions: list[tuple[bool, int]]) -> None:
    allocator = PageAllocator(num_pages, 4)
    taken: list[int] = []
    for take, n in actions:
        if take and n > num_pages - len(taken):
            with pytest.raises(InvariantViolation, match="I8"):
                allocator.alloc(n)
        elif take:
            taken += allocator.alloc(n).tolist()
        else:
            back, taken = taken[:n], taken[n:]
            allocator.free(np.array(back, np.int32))
        everything = taken + allocator.free_pages().tolist()
        assert sorted(everything) == list(range(num_pages))
        assert allocator.num_free == num_pages - len(taken)


def test_a_page_freed_twice_is_refused() -> None:
    allocator = PageAllocator(4, 1)
    pages = allocator.alloc(2)
    allocator.free(pages[:1])
    with pytest.raises(InvariantViolation, match="I1: .*freed twice"):
        allocator.free(pages)
    with pytest.raises(InvariantViolation, match="I1: .*freed twice"):
        allocator.free(np.array([3], np.int32))
    assert allocator.num_free == 3


def test_pages_for_rounds_up() -> None:
    allocator = PageAllocator(4, 16)
    assert [allocator.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 1), (1, 0)])
def test_an_empty_pool_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError):
        PageAllocator(num_pages, page_size)
