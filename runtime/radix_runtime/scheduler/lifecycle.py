"""Who owns which row and page, from the queue to release."""

# A page is free, in the tree, private to one request, or deferred. Pages `[: cached_len /
# page_size]` of a request's row belong to the tree, the rest of its `num_pages` to the request.
# Ending a request only marks it; its row and pages go back when the last step that contains it has
# completed. The same holds for duplicates that a request in flight still reads: their release is
# deferred until then.

from collections import deque
from concurrent.futures import Future

import numpy as np

from ..memory.page_allocator import PageAllocator
from ..memory.radix_cache import Match, RadixCache
from ..memory.request_table import RequestTable
from .request import Request, State


class Lifecycle:
    """Every request that has not been released, by state, and the memory that it holds.

    `pending`, `waiting`, `running` (PREFILL and DECODE, in the order of admission) and `draining`
    hold a request each while its state says so. `completed_step` is the newest step that has
    completed; steps complete in order."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_len: int,
        eviction: str,
        sharing: bool,
    ) -> None:
        """`max_len`: tokens that a request may have. `sharing` False: no prefix is cached."""
        self.allocator = PageAllocator(num_pages, page_size)
        self.page_size = page_size
        self.cache = RadixCache(self.allocator, eviction=eviction, enabled=sharing)
        self.table = RequestTable(max_rows, min(self.allocator.pages_for(max_len), num_pages))
        self.pending: dict[Request, Future[None]] = {}  # and what each waits for
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.draining: list[Request] = []
        self.deferred: list[tuple[int, np.ndarray]] = []  # (last step that reads, pages)
        self.completed_step = -1

    @property
    def available_pages(self) -> int:
        """Pages that `take_pages` can give: free ones and those the cache can evict."""
        return self.allocator.num_free + self.cache.evictable_pages

    # Queue --------------------------------------------------------------------------------

    def hold(self, request: Request, until: Future[None]) -> None:
        """Keeps a PENDING request out of the queue; `enqueue` it when `until` is done."""
        self.pending[request] = until

    def enqueue(self, request: Request) -> None:
        """PENDING -> WAITING, at the end of the queue."""
        self.pending.pop(request, None)
        request.move(State.WAITING)
        self.waiting.append(request)

    # Taking -------------------------------------------------------------------------------

    def admit(self, request: Request, match: Match) -> None:
        """WAITING -> PREFILL, on the cached prefix `match`. Locking comes before any eviction of
        the same step."""
        self.waiting.remove(request)
        self.running.append(request)
        request.move(State.PREFILL)
        self.cache.lock(match.node)
        request.node = match.node
        request.row = self.table.alloc()
        request.cached_len = match.length
        request.computed_len = match.length
        request.reserved_len = match.length
        request.prefill_end = request.total_len
        self.grow(request, match.pages)

    def take_pages(self, num_pages: int) -> np.ndarray:
        """int32 [num_pages]; evicts as needed. The policy has made sure that this works (I8)."""
        self.cache.evict(num_pages - self.allocator.num_free)
        return self.allocator.alloc(num_pages)

    def grow(self, request: Request, pages: np.ndarray) -> None:
        """Appends `pages` to the request's row."""
        if len(pages):
            self.table.assign(request.row, request.num_pages, pages)
            request.num_pages += len(pages)

    # Sharing ------------------------------------------------------------------------------

    def share(self, request: Request, computed: int) -> None:
        """Full pages of the first `computed` tokens, whose steps have completed, enter the tree."""
        count = computed // self.page_size
        known = request.cached_len // self.page_size
        if count <= known:
            return
        assert request.node is not None
        ids = request.ids[: count * self.page_size]
        pages = self.table.pages(request.row, count)
        cached, duplicates = self.cache.insert(ids, pages, request.extra_key)
        self.cache.lock(cached.node)
        self.cache.unlock(request.node)
        request.node = cached.node
        request.cached_len = cached.length
        if len(duplicates):
            # The row changes first; who still reads the duplicates is in flight.
            self.table.assign(request.row, known, cached.pages[known:])
            self._free_after(request.last_step, duplicates)

    def _free_after(self, step_id: int, pages: np.ndarray) -> None:
        if step_id <= self.completed_step:
            self.allocator.free(pages)
        else:
            self.deferred.append((step_id, pages))

    # Giving back --------------------------------------------------------------------------

    def end(self, request: Request) -> None:
        """No further step will contain the request; called once, from any live state."""
        if request.state is State.PENDING:
            del self.pending[request]
            request.move(State.DONE)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
            request.move(State.DONE)
        else:
            self.running.remove(request)
            self.draining.append(request)
            request.move(State.DRAINING)
            self._finish_draining()

    def reclaim(self) -> None:
        """Gives back what no step in flight reads."""
        deferred = self.deferred
        self.deferred = []
        for step_id, pages in deferred:
            self._free_after(step_id, pages)
        self._finish_draining()

    def _finish_draining(self) -> None:
        for request in [r for r in self.draining if r.last_step <= self.completed_step]:
            self.draining.remove(request)
            self._release(request)
            request.move(State.DONE)

    def retract(self, request: Request) -> None:
        """To the head of the queue, while nothing is in flight. Ids, seed, what was sent and scored
        stay."""
        assert request.last_step <= self.completed_step and request.num_ids == request.total_len
        self.running.remove(request)
        self._release(request)
        request.retractions += 1
        request.move(State.WAITING)
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        if not request.poisoned:
            self.share(request, request.shareable_len)
        assert request.node is not None
        pages = self.table.pages(request.row, request.num_pages)
        private = pages[request.cached_len // self.page_size :]
        self.allocator.free(private)
        self.cache.unlock(request.node)
        if request.poisoned:
            self.cache.prune(request.node)
        self.table.free(request.row)
        request.row = -1
        request.node = None
        request.num_pages = 0
        request.cached_len = 0
        request.computed_len = 0
        request.reserved_len = 0
