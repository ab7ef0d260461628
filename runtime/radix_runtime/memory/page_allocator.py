"""The free list of KV pages. All accounting is in pages, never in tokens."""

import numpy as np

from ..errors import require


class PageAllocator:
    """Hands out page ids 0 .. num_pages - 1; a page is free or belongs to whoever took it."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"need at least one page of one token, got {num_pages} x {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_free = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._is_free = np.ones(num_pages, bool)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def alloc(self, n: int) -> np.ndarray:
        """int32 [n] page ids, most recently freed first. Raises InvariantViolation (I8) if nobody
        has made room."""
        enough = n <= self.num_free
        require(enough, "I8", f"{n} pages wanted, {self.num_free} of {self.num_pages} free")
        rest = self.num_free - n
        pages = self._stack[rest : self.num_free][::-1].copy()
        self._is_free[pages] = False
        self.num_free = rest
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Takes pages back. Raises InvariantViolation (I1) if one is free already."""
        require(not self._is_free[pages].any(), "I1", "a page was freed twice")
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

    def free_pages(self) -> np.ndarray:
        """int32 [num_free], for checks."""
        return self._stack[: self.num_free].copy()
