"""How many pages of a window group admission may give away."""

from collections.abc import Callable, Iterable

from ..memory.radix_node import Match
from ..memory.window_pages import WindowPages
from .decision import Entry
from .lifecycle import Lifecycle
from .request import Request


class WindowRoom:
    """Pages of a window group that first chunks may take: what the running requests take in this
    step, and what they are expected to fill their windows with, is set aside."""

    def __init__(
        self,
        window: WindowPages,
        life: Lifecycle,
        *,
        entries: Iterable[Entry],
        expect: Callable[[Request], int],
    ) -> None:
        """`entries` are the step's of running requests; `expect` gives the pages that a request is
        expected to need in all."""
        self._window = window
        self._allocator = life.allocator
        self._taken: set[int] = set()  # handles that requests of this step begin to use
        ends = {entry.request: entry.end for entry in entries}
        self._left = window.pool.available
        for request in life.running:
            now = self._allocator.pages_for(ends.get(request, 0)) - request.num_pages
            missing = window.span - window.held(request.row)
            later = min(expect(request) - request.num_pages, missing)
            self._left -= max(0, now, later)

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
