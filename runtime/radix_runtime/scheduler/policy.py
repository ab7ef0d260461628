"""What the next step computes: a pure function of host state.

Each step gives one token to every running request first and fills the rest of the token budget
with prompt chunks, so a long prompt never stops the streams. All room is counted in pages. A
request is admitted when the pages that it and the running ones are *expected* to need are there;
how much of `max_new_tokens` that counts is adaptive (`OutputRatio`). Too much trust costs a
retraction, never a failure: `plan_step` reports a shortage before anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from ..memory.radix_cache import Match, Node, RadixCache
from ..registry import Registry
from .request import Request, State

# Order of the queue ---------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class QueueContext:
    now: float
    age_bound: float  # seconds after which a request may not be passed any more
    prefix_length: Callable[[Request], int]  # tokens of it that are cached right now


class SchedulePolicy(Protocol):
    def __call__(self, waiting: Sequence[Request], context: QueueContext) -> Iterable[Request]:
        """The order in which requests are offered admission; `waiting` is in order of arrival,
        retracted requests first. It may leave requests out; it must not change them."""
        ...


LPM_WINDOW = 128  # oldest requests among which the longest prefix is looked for


def fcfs(waiting: Sequence[Request], context: QueueContext) -> Iterable[Request]:
    """First come, first served."""
    return waiting


def lpm(waiting: Sequence[Request], context: QueueContext) -> Iterable[Request]:
    """Longest cached prefix first, after the retracted and those older than the age bound."""

    def rank(request: Request) -> tuple[int, int]:
        if request.retractions or context.now - request.arrival >= context.age_bound:
            return 0, 0
        return 1, -context.prefix_length(request)

    return sorted(islice(waiting, LPM_WINDOW), key=rank)


schedule_policies: Registry[SchedulePolicy] = Registry(
    "--schedule-policy", "radix.schedule_policies", {"fcfs": fcfs, "lpm": lpm}
)


# How long outputs are expected to get ---------------------------------------------------------


class OutputRatio:
    """Share of the output still allowed that admission counts on. It sinks step by step towards
    a floor and jumps when a retraction shows that it was too low."""

    START, FLOOR, STEPS, JUMP = 0.7, 0.1, 600, 0.1

    def __init__(self, conservativeness: float) -> None:
        self._start = min(1.0, self.START * conservativeness)
        self._floor = self._start * self.FLOOR
        self.value = self._start

    def after_step(self) -> None:
        self.value = max(self._floor, self.value - (self._start - self._floor) / self.STEPS)

    def after_retraction(self, running: Sequence[Request]) -> None:
        allowed = sum(r.max_total_len - r.prompt_len for r in running)
        seen = sum(r.total_len - r.prompt_len for r in running) / max(1, allowed)
        self.value = min(1.0, max(self.value, seen) + self.JUMP)


# Counting pages -------------------------------------------------------------------------------

OUTPUT_HORIZON = 4096  # no more output tokens than this are counted on ahead of time


def expected_len(request: Request, ratio: float, page_size: int) -> int:
    """Tokens the request is expected to reach: at least a page more than it has now."""
    left = request.max_total_len - request.total_len
    ahead = max(int(ratio * min(left, OUTPUT_HORIZON)), page_size)
    return request.total_len + min(left, ahead)


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


# The step -------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class View:
    """The host state that a plan depends on."""

    running: Sequence[Request]
    waiting: Sequence[Request]
    order: Callable[[], Iterable[Request]]  # of the queue; called only when someone can get in
    cache: RadixCache
    free_pages: int
    free_rows: int
    token_budget: int
    ratio: float


@dataclass(slots=True, frozen=True)
class Chunk:
    """`length` tokens of prefill; `match` is set when this admits the request."""

    request: Request
    length: int
    match: Match | None = None


@dataclass(slots=True)
class Decision:
    """`shortage`: pages are missing for a step that has to be made; launch nothing."""

    decode: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    shortage: bool = False
    dedup_waits: int = 0

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)


def plan_step(view: View) -> Decision:
    """Changes nothing but the cut of tree nodes at a match."""
    size = view.cache.page_size
    decode = [r for r in view.running if r.wants_token]
    room = view.free_pages + view.cache.evictable_pages
    room -= sum(r.computed_len == r.num_pages * size for r in decode)
    if room < 0:
        return Decision(shortage=True)
    decision = Decision(decode)
    budget = view.token_budget - len(decode)
    starved = False
    for request in view.running:
        if request.state is not State.PREFILL:
            continue
        held = request.num_pages * size
        length = min(request.total_len - request.computed_len, budget, held + room * size - request.computed_len)
        if length > 0:
            decision.chunks.append(Chunk(request, length))
            budget -= length
            room -= _pages(max(0, request.computed_len + length - held), size)
        starved |= length < min(request.total_len - request.computed_len, budget)
    if view.waiting and view.free_rows and budget > 0 and not starved:
        _admit(view, decision, budget)
    decision.shortage = starved and not decision
    return decision


def _admit(view: View, decision: Decision, budget: int) -> None:
    cache, size, rows = view.cache, view.cache.page_size, view.free_rows
    room = view.free_pages + cache.evictable_pages
    for request in view.running:
        expected = _pages(expected_len(request, view.ratio, size), size)
        room -= max(0, expected - request.num_pages)
    computing = _pages_being_computed(view) if cache.enabled else set()
    locked: set[Node] = set()
    for request in view.order():
        if rows == 0 or budget <= 0:
            break
        limit = request.match_limit
        match = cache.match(request.ids[:limit], request.extra_key)
        page_end = match.length + size
        edge = cache.edge(match.node, request.ids, match.length, request.extra_key)
        key = (match.node, edge)
        if page_end <= limit and key in computing:
            decision.dedup_waits += 1
            continue  # another request is computing this request's next page
        expected = _pages(expected_len(request, view.ratio, size), size) - len(match.pages)
        path = _unlocked_path(match.node, locked)
        need = expected + sum(len(node.pages) for node in path)
        if need > room:
            break  # nobody passes it, or it might never get in
        length = min(request.total_len - match.length, budget)
        decision.chunks.append(Chunk(request, length, match))
        locked.update(path)
        if cache.enabled and page_end <= request.total_len:
            computing.add(key)
        room, budget, rows = room - need, budget - length, rows - 1


def _pages_being_computed(view: View) -> set[tuple[Node, Hashable]]:
    """(node, first page after it) for all whose next full prompt page is not in the tree yet."""
    cache = view.cache
    result: set[tuple[Node, Hashable]] = set()
    for request in view.running:
        if request.cached_len + cache.page_size <= request.prefill_end:
            assert request.node is not None
            edge = cache.edge(request.node, request.ids, request.cached_len, request.extra_key)
            result.add((request.node, edge))
    return result


def _unlocked_path(node: Node, counted: set[Node]) -> list[Node]:
    """Nodes from `node` up that admission would lock for the first time."""
    path = []
    at: Node | None = node
    while at is not None and at.parent is not None and at.lock_count == 0 and at not in counted:
        path.append(at)
        at = at.parent
    return path
