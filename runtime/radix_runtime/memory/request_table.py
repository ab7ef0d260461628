"""Rows of the request table: the host's mirror of every rank's page table.

A row is taken at admission and given back when the last step that contains the request has
completed. Whatever changes in a row is also recorded, and the next StepPlan carries it to the
ranks as (row, index, page).
"""

from __future__ import annotations

import numpy as np


class RequestTable:
    """`max_rows` rows of `max_pages` page ids; row order has no meaning."""

    def __init__(self, max_rows: int, max_pages: int) -> None:
        self.max_rows = max_rows
        self.max_pages = max_pages
        self._pages = np.full((max_rows, max_pages), -1, np.int32)
        self._free = list(range(max_rows - 1, -1, -1))
        self._changes: list[tuple[int, int, np.ndarray]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_rows(self) -> list[int]:
        return list(self._free)

    def alloc(self) -> int:
        return self._free.pop()

    def free(self, row: int) -> None:
        """Gives a row back; changes of it that were not sent yet are dropped, so that no plan
        names an entry twice."""
        if row in self._free:
            raise ValueError(f"row {row} freed twice")
        self._changes = [change for change in self._changes if change[0] != row]
        self._free.append(row)

    def assign(self, row: int, index: int, pages: np.ndarray) -> None:
        """Entries [index, index + len(pages)) of the row become `pages`."""
        if len(pages):
            self._pages[row, index : index + len(pages)] = pages
            self._changes.append((row, index, pages))

    def pages(self, row: int, count: int) -> np.ndarray:
        """int32 [count], a view: the first pages of a row."""
        return self._pages[row, :count]

    def take_changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rows, indices, pages), int32 each: all changes since the last call."""
        changes, self._changes = self._changes, []
        if not changes:
            return _EMPTY, _EMPTY, _EMPTY
        sizes = [len(pages) for _, _, pages in changes]
        rows = np.repeat(np.array([row for row, _, _ in changes], np.int32), sizes)
        starts = np.array([index for _, index, _ in changes], np.int32)
        ends = np.cumsum(sizes, dtype=np.int32)
        offsets = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - sizes, sizes)
        indices = (np.repeat(starts, sizes) + offsets).astype(np.int32)
        return rows, indices, np.concatenate([pages for _, _, pages in changes])


_EMPTY = np.zeros(0, np.int32)
