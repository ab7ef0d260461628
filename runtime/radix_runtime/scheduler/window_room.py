"""How many pages of a window group admission may give away."""

from typing import NamedTuple

import numpy as np

from ..memory.radix_node import Match
from ..memory.window_pages import WindowPages
from .decision import Decision
from .lifecycle import Lifecycle


class Growth(NamedTuple):
    """Pages that running requests are expected to need beside those they have: `pages[i]` of row
    `rows[i]`, int64 [n]."""

    rows: np.ndarray
    pages: np.ndarray


class WindowRoom:
    """Pages of a window group that first chunks may take: what the running requests take in this
    step, and what they are expected to fill their windows with, is set aside."""

    def __init__(
        self,
        window: WindowPages,
        life: Lifecycle,
        decision: Decision,
        growth: Growth,
    ) -> None:
        """`decision` has the entries of running requests so far, `growth` all of these."""
        self._window = window
        self._allocator = life.allocator
        self._taken: set[int] = set()  # handles that requests of this step begin to use
        ends = np.zeros(life.table.max_rows, np.int64)
        ends[decision.decode.rows] = decision.decode.start + decision.decode.num_samples
        for entry in decision.chunks:
            ends[entry.request.row] = entry.end
        rows = growth.rows
        now = -(-ends[rows] // life.page_size) - life.rows.num_pages[rows]
        missing = window.span - (window.end[rows] - window.first[rows])
        later = np.minimum(growth.pages, missing)
        self._left = window.pool.available - int(np.maximum(np.maximum(now, later), 0).sum())

    def most_tokens(self, match: Match) -> int:
        """The longest first chunk of a request with this cached prefix."""
        return (self._left - len(self._newly_used(match))) * self._allocator.page_size

    def take(self, match: Match, length: int) -> None:
        """A request is admitted with a first chunk of `length` tokens."""
        used = self._newly_used(match)
        self._taken |= used
        self._left -= len(used) + self._allocator.pages_for(length)

    def _newly_used(self, match: Match) -> set[int]:
        """Handles of the prefix that could be evicted until now."""
        pool = self._window.pool
        prefix = self._window.prefix(match.handles[pool.index]).tolist()
        return {h for h in prefix if pool.uses[h] == 0 and h not in self._taken}
