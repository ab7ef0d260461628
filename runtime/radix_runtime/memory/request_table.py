"""Rows of the request table: the host's mirror of every rank's page table.

A row is taken at admission and given back when the last step that contains the request has
completed. The next StepPlan carries what has changed to the ranks."""

import numpy as np

from ..errors import require


class RequestTable:
    """`max_rows` rows of `max_pages` page ids; row order has no meaning. `free_rows` are those that
    no request holds."""

    def __init__(self, max_rows: int, max_pages: int) -> None:
        self.max_rows = max_rows
        self.free_rows = list(range(max_rows - 1, -1, -1))
        self._pages = np.full((max_rows, max_pages), -1, np.int32)
        self._changes: list[tuple[int, np.ndarray]] = []  # (row, [3, n])

    def alloc(self) -> int:
        """A free row. Raises IndexError if there is none."""
        return self.free_rows.pop()

    def free(self, row: int) -> None:
        """Gives a row back. Its unsent changes are dropped, so that no plan names an entry
        twice."""
        require(row not in self.free_rows, "I5", f"row {row} was freed twice")
        self.forget_changes(row)
        self.free_rows.append(row)

    def forget_changes(self, row: int) -> None:
        """Nobody needs the row's unsent changes any more."""
        self._changes = [change for change in self._changes if change[0] != row]

    def assign(self, row: int, index: int, pages: np.ndarray) -> None:
        """Entries [index, index + len(pages)) of the row become `pages`."""
        end = index + len(pages)
        self._pages[row, index:end] = pages
        change = np.empty((3, len(pages)), np.int32)
        change[0] = row
        change[1] = np.arange(index, end)
        change[2] = pages
        self._changes.append((row, change))

    def pages(self, row: int, count: int) -> np.ndarray:
        """int32 [count], a view: the first pages of the row."""
        return self._pages[row, :count]

    def take_changes(self) -> np.ndarray:
        """int32 [3, n]: rows, indices and pages of all changes since the last call."""
        changes = [change for _, change in self._changes]
        self._changes = []
        return np.concatenate([np.empty((3, 0), np.int32), *changes], axis=1)
