"""What the next step computes: a pure function of host state."""

# Each step gives one token to every running request first and fills the rest of the token budget
# with prompt chunks, so a long prompt never stops the streams. All room is counted in pages. A
# request is admitted when the pages that it and the running ones are *expected* to need are there;
# how much of `max_new_tokens` counts is adaptive (`OutputRatio`). Too much trust costs a
# retraction, never a failure: `plan_step` reports a shortage before anything is launched.

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ..memory.radix_cache import Match, Node
from ..registry import Registry
from .lifecycle import Lifecycle
from .request import Request, State

# Order of the queue ---------------------------------------------------------------------------


class QueueContext(NamedTuple):
    now: float
    age_bound: float  # seconds after which a request may not be passed any more
    prefix_length: Callable[[Request], int]  # tokens of it that are cached right now


# The order in which requests are offered admission. It gets them in order of arrival, retracted
# requests first; it may leave some out and must not change them.
SchedulePolicy = Callable[[Sequence[Request], QueueContext], Iterable[Request]]

MOST_WAITS = (
    256  # requests in a row that wait for another's page before the rest is left for the next step
)
LPM_WINDOW = 128  # oldest requests among which the longest prefix is looked for


def fcfs(waiting: Sequence[Request], context: QueueContext) -> Iterable[Request]:
    return waiting


def lpm(waiting: Sequence[Request], context: QueueContext) -> Iterable[Request]:
    """Longest cached prefix first, after the retracted and those older than the age bound."""

    def rank(request: Request) -> tuple[int, int]:
        if request.retractions or context.now - request.arrival >= context.age_bound:
            return 0, 0
        return 1, -context.prefix_length(request)

    return sorted(islice(waiting, LPM_WINDOW), key=rank)


schedule_policies = Registry[SchedulePolicy](
    "--schedule-policy", "radix.schedule_policies", {"fcfs": fcfs, "lpm": lpm}
)


# How long outputs are expected to get ---------------------------------------------------------

OUTPUT_HORIZON = 4096  # no more output tokens than this are counted on ahead of time


class OutputRatio:
    """Share of the output still allowed that admission counts on: sinks step by step, jumps after a
    retraction."""

    START, FLOOR, STEPS, JUMP = 0.7, 0.1, 600, 0.1

    def __init__(self, conservativeness: float) -> None:
        self.value = self._start = min(1.0, self.START * conservativeness)
        self._floor = self._start * self.FLOOR

    def after_step(self) -> None:
        self.value = max(self._floor, self.value - (self._start - self._floor) / self.STEPS)

    def after_retraction(self, running: Sequence[Request]) -> None:
        allowed = sum(r.max_total_len - r.prompt_len for r in running)
        seen = sum(r.total_len - r.prompt_len for r in running) / max(1, allowed)
        self.value = min(1.0, max(self.value, seen) + self.JUMP)


def expected_len(request: Request, ratio: float, page_size: int) -> int:
    """Tokens the request is expected to reach: at least a page more than it has now."""
    left = request.max_total_len - request.total_len
    ahead = max(int(ratio * min(left, OUTPUT_HORIZON)), page_size)
    return request.total_len + min(left, ahead)


# The step -------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One request in a step: its tokens [start, end); `match` is set when this admits the
    request."""

    request: Request
    start: int
    end: int
    samples: bool
    is_chunk: bool
    match: Match | None = None


def chunk(request: Request, start: int, length: int, match: Match | None = None) -> Entry:
    end = start + length
    samples = end == request.total_len < request.max_total_len
    return Entry(request, start, end, samples, is_chunk=True, match=match)


def chunk_length(left: int, most: int) -> int:
    """Tokens of the next chunk, at most `most` of the `left`: neither one alone nor all but one. A
    row's only token in a step takes attention's decode kernel, which gives it other last bits than
    it has in the whole prompt."""
    length = min(left, most)
    length -= left - length == 1
    return 0 if length == 1 < left else length


@dataclass(slots=True)
class Decision:
    """`shortage`: pages are missing for a step that has to be made; launch nothing."""

    decode: list[Entry] = field(default_factory=list)
    chunks: list[Entry] = field(default_factory=list)
    shortage: bool = False
    dedup_waits: int = 0

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)


Queue = Callable[
    [], Iterable[Request]
]  # in the policy's order; called only when someone can get in


def plan_step(
    life: Lifecycle, queue: Queue, free_rows: int, token_budget: int, ratio: float
) -> Decision:
    """Changes nothing but the cut of tree nodes at a match."""
    size = life.page_size
    going = [r for r in life.running if r.state is State.DECODE and r.total_len < r.max_total_len]
    decision = Decision(
        [Entry(r, r.computed_len, r.computed_len + 1, samples=True, is_chunk=False) for r in going]
    )
    room = life.allocator.num_free + life.cache.evictable_pages
    room -= sum(r.computed_len == r.num_pages * size for r in going)
    if room < 0:
        return Decision(shortage=True)
    budget, starved = token_budget - len(going), False
    for request in life.running:
        if request.state is State.PREFILL:
            left, held = (
                request.total_len - request.computed_len,
                request.num_pages * size - request.computed_len,
            )
            if (length := chunk_length(left, min(budget, held + room * size))) > 0:
                decision.chunks.append(chunk(request, request.computed_len, length))
                budget -= length
                room -= life.allocator.pages_for(max(0, length - held))
            starved |= length < min(left, budget)
    if life.waiting and free_rows > 0 and budget > 0 and not starved:
        _admit(life, queue(), decision, free_rows, budget, ratio)
    decision.shortage = starved and not decision
    return decision


def _admit(
    life: Lifecycle,
    queue: Iterable[Request],
    decision: Decision,
    rows: int,
    budget: int,
    ratio: float,
) -> None:
    cache, size, pages_for = life.cache, life.page_size, life.allocator.pages_for
    room = life.allocator.num_free + cache.evictable_pages
    room -= sum(max(0, pages_for(expected_len(r, ratio, size)) - r.num_pages) for r in life.running)
    computing = _pages_being_computed(life)
    locked: set[Node] = set()
    waits = 0
    for request in queue:
        if rows == 0 or budget <= 0 or waits == MOST_WAITS:
            break
        match = cache.match(request.ids[: request.match_limit], request.extra_key)
        key = match.node, cache.edge(match.node, request.ids, match.length, request.extra_key)
        page_end = match.length + size
        if page_end <= request.match_limit and key in computing:
            decision.dedup_waits += 1
            waits += 1
            continue  # another request is computing this request's next page
        path = [node for node in match.node.path() if node.lock_count == 0 and node not in locked]
        need = (
            pages_for(expected_len(request, ratio, size))
            - len(match.pages)
            + sum(len(n.pages) for n in path)
        )
        if need > room:
            break  # nobody passes it, or it might never get in
        if (length := chunk_length(request.total_len - match.length, budget)) == 0:
            break  # too little of the budget is left
        decision.chunks.append(chunk(request, match.length, length, match))
        waits = 0
        locked.update(path)
        if cache.enabled and page_end <= request.total_len:
            computing.add(key)
        room, budget, rows = room - need, budget - length, rows - 1


# (node, first page after it) for all whose next full prompt page is not in the tree yet.
def _pages_being_computed(life: Lifecycle) -> set[tuple[Node, Hashable]]:
    return {
        (r.node, life.cache.edge(r.node, r.ids, r.cached_len, r.extra_key))
        for r in life.running
        if life.cache.enabled
        and r.node is not None
        and r.cached_len + life.page_size <= r.prefill_end
    }
