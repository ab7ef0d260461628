"""Who owns which row and page, from the queue to release."""

# A page is free, in the tree, private to one request, or deferred. Pages `[: cached_len /
# page_size]` of a request's row belong to the tree, the rest of its `num_pages` to the request.
# Ending a request only marks it; its row and pages go back when the last step that contains it has
# completed. The same holds for duplicates that a request in flight still reads: their release is
# deferred until then.
#
# Most models have full pages only. What others keep beside them is owned in the same way by
# `groups` (memory/cache_groups.py), whose state of a request is found by its row.

from concurrent.futures import Future

import numpy as np

from ..cache_spec import ONLY_FULL_PAGES, GroupSpec
from ..memory.cache_groups import make_groups
from ..memory.host_tier import HostTier
from ..memory.page_allocator import PageAllocator
from ..memory.radix_cache import RadixCache
from ..memory.radix_node import Match
from ..memory.request_table import RequestTable
from ..memory.row_snapshots import RowSnapshots
from ..memory.window_pages import WindowPages
from .request import Request, State
from .rows import Flag, Rows
from .waiting import WaitingQueue


class Lifecycle:
    """Every request that has not been released, by state, and the memory that it holds.

    `pending`, `waiting`, `running` (PREFILL and DECODE, in the order of admission) and `draining`
    hold a request each while its state says so; `rows` has the numbers of those with a row.
    `prompts` are the running requests whose prompt has not been computed to its end by completed
    steps. `completed_step` is the newest step that has completed; steps complete in order."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_len: int,
        eviction: str,
        sharing: bool,
        cache_groups: tuple[GroupSpec, ...] = ONLY_FULL_PAGES,
        max_samples: int = 1,
        host_pages: int = 0,
    ) -> None:
        """`max_len`: tokens that a request may have. `sharing` False: no prefix is cached.
        `max_samples`: tokens that a decode entry may have. `host_pages`: pages that the cache may
        keep in host memory."""
        self.allocator = PageAllocator(num_pages, page_size)
        self.page_size = page_size
        max_pages = min(self.allocator.pages_for(max_len), num_pages)
        self.table = RequestTable(max_rows, max_pages)
        self.groups = make_groups(
            cache_groups,
            page_size=page_size,
            max_rows=max_rows,
            max_pages=max_pages,
            max_samples=max_samples,
        )
        self.windows = [group for group in self.groups if isinstance(group, WindowPages)]
        self.snapshots = [group for group in self.groups if isinstance(group, RowSnapshots)]
        self.host = HostTier(host_pages) if host_pages else None
        self.cache = RadixCache(
            page_size, eviction=eviction, enabled=sharing, groups=self.groups, host=self.host
        )
        self.pending: dict[Request, Future[None]] = {}  # and what each waits for
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.draining: list[Request] = []
        self.rows = Rows(max_rows)
        self.prompts: dict[Request, None] = {}
        self.deferred: list[tuple[int, np.ndarray]] = []  # (last step that reads, pages)
        self.completed_step = -1

    @property
    def available_pages(self) -> int:
        """Full pages that `take_pages` can give: free ones and those the cache can evict."""
        return self.allocator.num_free + self.cache.evictable_pages

    @property
    def step_room(self) -> int:
        """Pages by which the requests of a step can grow: they take as many of every window group
        as full ones."""
        room = self.available_pages
        for window in self.windows:
            room = min(room, window.pool.available)
        return room

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
        self.prompts[request] = None
        request.move(State.PREFILL)
        self.cache.lock(match.node)
        request.node = match.node
        request.row = self.table.alloc()
        self.rows.enter(request, _flags(request))
        request.cached_len = match.length
        request.computed_len = match.length
        request.reserved_len = match.length
        request.prefill_end = request.total_len
        if len(match.pages):
            self._append(request, match.pages)
        for group, handles in zip(self.groups, match.handles, strict=True):
            group.admit(request.row, handles)

    def load(self, request: Request) -> None:
        """Brings the part of an admitted request's prefix back that is on the host. Every prefix of
        the step must be locked before, as this may evict others."""
        assert request.node is not None
        start = 0
        for node in reversed(list(request.node.path())):
            start += len(node.pages)
            if start <= request.num_pages:
                continue
            if node.on_host:  # another request of the step may have been first
                self.cache.load(node, self.take_pages(len(node.pages)))
            self._append(request, node.pages)

    def take_pages(self, num_pages: int) -> np.ndarray:
        """int32 [num_pages]; evicts as needed. The policy has made sure that this works (I8)."""
        missing = num_pages - self.allocator.num_free
        if missing > 0:
            self.allocator.free(self.cache.evict(missing))
        return self.allocator.alloc(num_pages)

    def extend(self, rows: np.ndarray, needs: np.ndarray) -> None:
        """Row i gets `needs[i]` > 0 more pages of every group that has pages; one allocation a
        group for all of them."""
        total = int(needs.sum())
        held = self.rows.num_pages[rows]
        owners = rows
        index = held
        if total > len(rows):
            owners = np.repeat(rows, needs)
            index = np.arange(total) + np.repeat(held - needs.cumsum() + needs, needs)
        self.table.assign_each(owners, index, self.take_pages(total))
        self.rows.num_pages[rows] = held + needs
        for window in self.windows:
            pages = window.pool.take(total)
            start = 0
            for row, need in zip(rows.tolist(), needs.tolist(), strict=True):
                window.extend(row, pages[start : start + need])
                start += need

    def start_decoding(self, request: Request) -> None:
        """PREFILL -> DECODE: the step that ends its prompt is about to be launched."""
        request.move(State.DECODE)
        self.rows.start_decoding(request.row)

    def _append(self, request: Request, pages: np.ndarray) -> None:
        self.table.assign(request.row, request.num_pages, pages)
        request.num_pages += len(pages)

    # Sharing ------------------------------------------------------------------------------

    def share(self, request: Request, computed: int) -> None:
        """Full pages of the first `computed` tokens, whose steps have completed, enter the tree."""
        if computed >= request.prefill_end:
            self.prompts.pop(request, None)
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
        for group in self.groups:
            group.share(request.row, cached.node, len(cached.pages))

    def trim(self, request: Request, committed: int) -> None:
        """`committed` tokens of a running request are computed: the groups give back what no later
        step looks at."""
        for group in self.groups:
            group.trim(request.row, committed)

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
            self._stop(request)
            self.rows.flags[request.row] |= Flag.ENDED
            request.move(State.DRAINING)
            self._release_or_keep(request)

    def reclaim(self) -> None:
        """Gives back what no step in flight reads."""
        deferred = self.deferred
        self.deferred = []
        for step_id, pages in deferred:
            self._free_after(step_id, pages)
        draining = self.draining
        self.draining = []
        for request in draining:
            self._release_or_keep(request)

    def _release_or_keep(self, request: Request) -> None:
        """A DRAINING request is DONE once no step in flight contains it."""
        if request.last_step > self.completed_step:
            self.draining.append(request)
        else:
            self._release(request)
            request.move(State.DONE)

    def _stop(self, request: Request) -> None:
        """No further step will contain a running request."""
        self.running.remove(request)
        self.prompts.pop(request, None)
        self.rows.stop_decoding(request.row)

    def retract(self, request: Request) -> None:
        """To the head of the queue, while nothing is in flight. Ids, seed, what was sent and scored
        stay."""
        assert request.last_step <= self.completed_step and request.num_ids == request.total_len
        self._stop(request)
        self._release(request)
        request.retractions += 1
        request.move(State.WAITING)
        self.waiting.push_front(request)

    def reset_cache(self) -> None:
        """Forgets every cached prefix. Raises RuntimeError while a request holds one."""
        self.allocator.free(self.cache.reset())

    def _release(self, request: Request) -> None:
        if not request.poisoned:
            self.share(request, request.shareable_len)
        assert request.node is not None
        pages = self.table.pages(request.row, request.num_pages)
        private = pages[request.cached_len // self.page_size :]
        self.allocator.free(private)
        for group in self.groups:
            group.release(request.row)
        self.cache.unlock(request.node)
        if request.poisoned:
            self.allocator.free(self.cache.prune(request.node))
        self.rows.leave(request)
        self.table.free(request.row)
        request.row = -1
        request.node = None
        request.num_pages = 0
        request.cached_len = 0
        request.computed_len = 0
        request.reserved_len = 0


def _flags(request: Request) -> int:
    flags = 0
    if request.logprobs is not None:
        flags |= Flag.BY_TOKEN
    if not request.is_streamed:
        flags |= Flag.IN_BLOCKS
    if request.params.stop:
        flags |= Flag.COUNTED_LATE
    if request.params.has_penalties or request.source.constraint is not None:
        flags |= Flag.NO_DRAFTS
    return flags
