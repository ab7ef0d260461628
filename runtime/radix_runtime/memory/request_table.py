"""Rows of the request table: the host's mirror of every rank's page table.

A row is taken at admission and given back when the last step that contains the request has
completed. The next StepPlan carries what has changed to the ranks."""

import numpy as np

from ..errors import require

_NO_CHANGES = np.empty((3, 0), np.int32)


class RequestTable:
    """`max_rows` rows of `max_pages` page ids; row order has no meaning. `free_rows` are those that
    no request holds."""

    def __init__(self, max_rows: int, max_pages: int) -> None:
        self.max_rows = max_rows
        self.free_rows = list(range(max_rows - 1, -1, -1))
        self._is_free = [True] * max_rows
        self._pages = np.full((max_rows, max_pages), -1, np.int32)
        # int64 [4, n] each: rows, indices, pages, and how often the row's had been forgotten.
        self._changes: list[np.ndarray] = []
        self._times_forgotten = np.zeros(max_rows, np.int64)

    def alloc(self) -> int:
        """A free row. Raises IndexError if there is none."""
        row = self.free_rows.pop()
        self._is_free[row] = False
        return row

    def free(self, row: int) -> None:
        """Gives a row back. Its unsent changes are dropped, so that no plan names an entry
        twice."""
        require(not self._is_free[row], "I5", f"row {row} was freed twice")
        self._is_free[row] = True
        self.forget_changes(row)
        self.free_rows.append(row)

    def forget_changes(self, row: int) -> None:
        """Nobody needs the row's unsent changes any more."""
        self._times_forgotten[row] += 1

    def assign(self, row: int, index: int, pages: np.ndarray) -> None:
        """Entries [index, index + len(pages)) of the row become `pages`."""
        end = index + len(pages)
        self._pages[row, index:end] = pages
        self._record(np.full(len(pages), row, np.int64), np.arange(index, end), pages)

    def assign_each(self, rows: np.ndarray, index: np.ndarray, pages: np.ndarray) -> None:
        """Entry `index[i]` of `rows[i]` becomes `pages[i]`."""
        self._pages[rows, index] = pages
        self._record(rows, index, pages)

    def _record(self, rows: np.ndarray, index: np.ndarray, pages: np.ndarray) -> None:
        change = np.empty((4, len(pages)), np.int64)
        change[0] = rows
        change[1] = index
        change[2] = pages
        change[3] = self._times_forgotten[rows]
        self._changes.append(change)

    def pages(self, row: int, count: int) -> np.ndarray:
        """int32 [count], a view: the first pages of the row."""
        return self._pages[row, :count]

    def take_changes(self) -> np.ndarray:
        """int32 [3, n]: rows, indices and pages of all changes since the last call."""
        if not self._changes:
            return _NO_CHANGES
        changes = np.concatenate(self._changes, axis=1)
        self._changes = []
        valid = changes[3] == self._times_forgotten[changes[0]]
        return changes[:3, valid].astype(np.int32)
