"""Who owns which row and page, from admission to release.

A page is free, in the tree, private to one request, or pending. Pages `[: cached_len / page_size]`
of a request's row belong to the tree, the rest of its `num_pages` to the request. Ending a request
only marks it; its row and pages go back when the last step that contains it has completed. The
same holds for duplicates that a request in flight still reads: they are pending until then.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ..errors import InvariantViolation
from ..memory.page_allocator import OutOfPages, PageAllocator
from ..memory.radix_cache import Match, RadixCache
from ..memory.request_table import RequestTable
from .request import Request, State


class Lifecycle:
    def __init__(self, allocator: PageAllocator, cache: RadixCache, table: RequestTable) -> None:
        self.allocator = allocator
        self.cache = cache
        self.table = table
        self.page_size = allocator.page_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # PREFILL and DECODE, in order of admission
        self.draining: list[Request] = []
        self.pending: list[tuple[int, np.ndarray]] = []  # (last step that reads, pages)
        self.completed_step = -1

    # Taking -------------------------------------------------------------------------------

    def admit(self, request: Request, match: Match) -> None:
        """WAITING -> PREFILL, on the cached prefix `match`. The caller has taken it off the
        queue; locking comes before any eviction of the same step."""
        self.cache.lock(match.node)
        request.node = match.node
        request.row = self.table.alloc()
        request.cached_len = request.computed_len = match.length
        request.num_pages = len(match.pages)
        request.prefill_end = request.total_len
        self.table.assign(request.row, 0, match.pages)
        request.move(State.PREFILL)
        self.running.append(request)

    def take_pages(self, num_pages: int) -> np.ndarray:
        """int32 [num_pages]; evicts as needed. The policy has made sure that this works (I8)."""
        self.cache.evict(num_pages - self.allocator.num_free)
        try:
            return self.allocator.alloc(num_pages)
        except OutOfPages as error:
            raise InvariantViolation("I8", str(error)) from error

    def grow(self, request: Request, pages: np.ndarray) -> None:
        """The request's row continues with `pages`, which are private to it."""
        self.table.assign(request.row, request.num_pages, pages)
        request.num_pages += len(pages)

    # Sharing ------------------------------------------------------------------------------

    def share(self, request: Request, computed: int) -> None:
        """Full pages of the first `computed` tokens enter the tree. The KV is committed: the
        steps that wrote it have completed."""
        count = computed // self.page_size
        if count * self.page_size <= request.cached_len or not self.cache.enabled:
            return
        assert request.node is not None
        known = request.cached_len // self.page_size
        pages = self.table.pages(request.row, count)
        ids = request.ids[: count * self.page_size]
        inserted = self.cache.insert(ids, pages, request.extra_key)
        self.cache.lock(inserted.node)
        self.cache.unlock(request.node)
        request.node = inserted.node
        request.cached_len = inserted.length
        if len(inserted.duplicate_pages):
            # The row changes first; who still reads the duplicates is in flight.
            self.table.assign(request.row, known, inserted.canonical_pages[known:])
            self._free_after(request.last_step, inserted.duplicate_pages)

    def _free_after(self, step_id: int, pages: np.ndarray) -> None:
        if step_id <= self.completed_step:
            self.allocator.free(pages)
        else:
            self.pending.append((step_id, pages))

    # Giving back --------------------------------------------------------------------------

    def end(self, request: Request) -> None:
        """No further step will contain the request; called once, from any live state."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
            request.move(State.DONE)
            return
        self.running.remove(request)
        request.move(State.DRAINING)
        self.draining.append(request)
        if request.last_step <= self.completed_step:
            self._finish_draining()

    def complete(self, step_id: int) -> None:
        """Step `step_id` and all before it have completed."""
        self.completed_step = step_id

    def reclaim(self) -> None:
        """Gives back what no step in flight reads."""
        due = [pages for step_id, pages in self.pending if step_id <= self.completed_step]
        self.pending = [entry for entry in self.pending if entry[0] > self.completed_step]
        for pages in due:
            self.allocator.free(pages)
        self._finish_draining()

    def _finish_draining(self) -> None:
        for request in [r for r in self.draining if r.last_step <= self.completed_step]:
            self.draining.remove(request)
            self._release(request)
            request.move(State.DONE)

    def retract(self, request: Request) -> None:
        """PREFILL or DECODE -> WAITING, at the head of the queue. Nothing is in flight, so every
        sampled id is known and all KV is committed. Ids, seed, what was sent and scored stay."""
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
        private = request.cached_len // self.page_size
        pages = self.table.pages(request.row, request.num_pages)[private:].copy()
        self.cache.unlock(request.node)
        if request.poisoned:
            self.cache.prune(request.node)
        self.table.free(request.row)
        self.allocator.free(pages)
        request.row, request.node, request.num_pages = -1, None, 0
        request.cached_len = request.computed_len = 0
