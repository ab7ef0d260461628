"""The free list of KV pages. All accounting is in pages, never in tokens."""

from __future__ import annotations

import numpy as np


class OutOfPages(RuntimeError):
    """More pages were asked for than are free: the caller did not make room first."""


class PageAllocator:
    """Hands out page ids 0 .. num_pages - 1; a page is free or belongs to whoever took it."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"need at least one page of one token, got {num_pages} x {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._is_free = np.ones(num_pages, bool)
        self.num_free = num_pages

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def alloc(self, n: int) -> np.ndarray:
        """int32 [n] page ids, most recently freed first. Raises OutOfPages."""
        if n > self.num_free:
            raise OutOfPages(f"{n} pages wanted, {self.num_free} of {self.num_pages} free")
        top = self.num_free
        pages = self._stack[top - n : top][::-1].copy()
        self._is_free[pages] = False
        self.num_free = top - n
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Takes pages back. Raises ValueError on a page that is free already."""
        n = len(pages)
        if n == 0:
            return
        if self._is_free[pages].any() or self.num_free + n > self.num_pages:
            raise ValueError(f"page freed twice among {np.asarray(pages).tolist()}")
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + n] = pages
        self.num_free += n

    def free_pages(self) -> np.ndarray:
        """int32 [num_free], for checks."""
        return self._stack[: self.num_free].copy()
