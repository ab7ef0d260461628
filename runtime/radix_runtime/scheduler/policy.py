"""What the next step computes: a pure function of host state."""

# Each step gives one token to every running request first and fills the rest of the token budget
# with prompt chunks, so a long prompt never stops the streams; drafts get what is left. All room is counted in pages. A
# request is admitted when the pages that it and the running ones are *expected* to need are there;
# how much of `max_new_tokens` counts is adaptive (`OutputRatio`). Too much trust costs a
# retraction, never a failure: `plan_step` reports a shortage before anything is launched.

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import NamedTuple

from ..memory.cache_groups import WindowPages
from ..memory.radix_node import Match, Node
from ..registry import Registry
from .lifecycle import Lifecycle
from .request import Request, State

# Order of the queue ---------------------------------------------------------------------------


class QueueContext(NamedTuple):
    """What a schedule policy may look at beside the requests. Times are of the scheduler's clock,
    in seconds."""

    now: float
    age_bound: float  # seconds after which a request may not be passed any more
    prefix_length: Callable[[Request], int]  # tokens of it that are cached right now


# The order in which requests are offered admission. It gets them in order of arrival, retracted
# requests first; it may leave some out and must not change them.
SchedulePolicy = Callable[[Sequence[Request], QueueContext], Iterable[Request]]

# Requests in a row that wait for another's page before the rest is left for the next step.
MOST_WAITS = 256
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


schedule_policies = Registry[SchedulePolicy](
    "--schedule-policy", "radix.schedule_policies", {"fcfs": fcfs, "lpm": lpm}
)


# How long outputs are expected to get ---------------------------------------------------------

OUTPUT_HORIZON = 4096  # no more output tokens than this are counted on ahead of time


class OutputRatio:
    """Share of the output still allowed that admission counts on: sinks step by step, jumps after a
    retraction."""

    START = 0.7
    FLOOR = 0.1  # of the start
    STEPS = 600  # from the start to the floor
    JUMP = 0.1

    def __init__(self, conservativeness: float) -> None:
        self._start = min(1.0, self.START * conservativeness)
        self._floor = self._start * self.FLOOR
        self.value = self._start

    def after_step(self) -> None:
        """A step without a retraction: a little more trust."""
        self.value = max(self._floor, self.value - (self._start - self._floor) / self.STEPS)

    def after_retraction(self, running: Sequence[Request]) -> None:
        """Trust was too high: at least what `running` has turned out to use counts from now on."""
        allowed = sum(r.max_total_len - r.prompt_len for r in running)
        seen = sum(r.total_len - r.prompt_len for r in running) / max(1, allowed)
        self.value = min(1.0, max(self.value, seen) + self.JUMP)


def expected_len(request: Request, ratio: float, margin: int) -> int:
    """Tokens the request is expected to reach: at least `margin` more than it has now, where it may
    have them."""
    left = request.max_total_len - request.total_len
    ahead = max(int(ratio * min(left, OUTPUT_HORIZON)), margin)
    return request.total_len + min(left, ahead)


# The step -------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One request in a step: its tokens [start, end), of which it samples `num_samples`. `match` is
    set when this admits the request."""

    request: Request
    start: int
    end: int
    num_samples: int
    is_chunk: bool
    match: Match | None = None


def decode(request: Request, num_samples: int) -> Entry:
    """The request's next tokens: the last one accepted and `num_samples - 1` drafts."""
    start = request.computed_len
    return Entry(
        request=request,
        start=start,
        end=start + num_samples,
        num_samples=num_samples,
        is_chunk=False,
    )


def chunk(request: Request, start: int, length: int, match: Match | None = None) -> Entry:
    """A part of what the request has to compute; the last one samples unless nothing is asked."""
    end = start + length
    samples = end == request.total_len < request.max_total_len
    return Entry(
        request=request,
        start=start,
        end=end,
        num_samples=1 if samples else 0,
        is_chunk=True,
        match=match,
    )


def chunk_length(left: int, most: int) -> int:
    """Tokens of the next chunk, at most `most` of the `left`: neither one alone nor all but one. A
    row's only token in a step takes attention's decode kernel, which gives it other last bits than
    it has in the whole prompt."""
    length = min(left, most)
    if left - length == 1:
        length -= 1
    if length == 1 and left > 1:
        return 0
    return length


class Blocked(Enum):
    """Why a waiting request is not in the step."""

    NO_ROW = auto()  # as many requests run as may
    NO_BUDGET = auto()  # the step computes as many tokens as it may
    NO_PAGES = auto()  # the pages that it is expected to need are not there
    SAME_PREFIX = auto()  # another request is computing its next page
    BEHIND = auto()  # nobody passes a request that waits for pages


@dataclass(slots=True)
class Decision:
    """What a step computes, and why each waiting request is not part of it. `shortage`: pages are
    missing for a step that has to be made; launch nothing."""

    decode: list[Entry] = field(default_factory=list)
    chunks: list[Entry] = field(default_factory=list)
    shortage: bool = False
    blocked: dict[Request, Blocked] = field(default_factory=dict)
    rest: Blocked = Blocked.BEHIND  # the reason of waiting requests that are not in `blocked`

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)

    def why(self, waiting: Request) -> Blocked:
        """The reason for a request that is still waiting."""
        return self.blocked.get(waiting, self.rest)

    @property
    def dedup_waits(self) -> int:
        return sum(1 for reason in self.blocked.values() if reason is Blocked.SAME_PREFIX)


# The waiting requests in the policy's order; called only when someone can get in.
Queue = Callable[[], Iterable[Request]]


def plan_step(
    life: Lifecycle,
    queue: Queue,
    *,
    free_rows: int,
    token_budget: int,
    max_samples: int,
    ratio: float,
) -> Decision:
    """The next step. `token_budget` bounds the tokens of prompts and the first token of every
    stream; drafts, up to `max_samples - 1` a stream, come on top and take pages that nobody in the
    step needs more. Changes nothing but the cut of tree nodes at a match."""
    size = life.page_size
    streams = [r for r in life.running if r.state is State.DECODE and r.total_len < r.max_total_len]
    needs_page = [r for r in streams if r.computed_len == r.num_pages * size]
    room = life.step_room - len(needs_page)
    if room < 0:
        return Decision(shortage=True, rest=Blocked.NO_PAGES)
    decision = Decision()
    budget = token_budget - len(streams)
    starved = False
    for request in life.running:
        if request.state is not State.PREFILL:
            continue
        left = request.total_len - request.computed_len
        held = request.num_pages * size - request.computed_len
        length = chunk_length(left, min(budget, held + room * size))
        if length < min(left, budget):
            starved = True
        if length > 0:
            decision.chunks.append(chunk(request, request.computed_len, length))
            budget -= length
            room -= life.allocator.pages_for(max(0, length - held))
    decision.decode = _decode_entries(streams, room, max_samples, life)
    if starved:
        decision.rest = Blocked.NO_PAGES
    elif free_rows <= 0:
        decision.rest = Blocked.NO_ROW
    elif budget <= 0:
        decision.rest = Blocked.NO_BUDGET
    elif life.waiting:
        # What this step takes for a running request is within its expected length.
        margin = max(size, max_samples)
        _admit(
            life,
            queue(),
            decision,
            rows=free_rows,
            budget=budget,
            expect=lambda request: life.allocator.pages_for(expected_len(request, ratio, margin)),
        )
    decision.shortage = starved and not decision
    return decision


def _decode_entries(
    streams: list[Request], room: int, max_samples: int, life: Lifecycle
) -> list[Entry]:
    """An entry for each of `streams`, with as many drafts as fit its length and its pages; `room`
    is the number of pages beyond one token each."""
    entries = []
    for request in streams:
        wanted = min(max_samples, request.max_total_len - request.total_len)
        if wanted > 1 and request.params.has_penalties:
            wanted = 1  # each token's penalties depend on the one before it
        if wanted > 1:
            end = request.computed_len + wanted
            pages = max(request.num_pages, life.allocator.pages_for(request.computed_len + 1))
            more = min(room, max(0, life.allocator.pages_for(end) - pages))
            room -= more
            wanted = min(wanted, (pages + more) * life.page_size - request.computed_len)
        entries.append(decode(request, wanted))
    return entries


def _admit(
    life: Lifecycle,
    queue: Iterable[Request],
    decision: Decision,
    *,
    rows: int,
    budget: int,
    expect: Callable[[Request], int],
) -> None:
    """Adds first chunks of waiting requests to `decision`, in the order of `queue`, while rows,
    tokens and pages last. `expect` gives the pages that a request is expected to need in all."""
    cache = life.cache
    room = life.available_pages
    room -= sum(max(0, expect(request) - request.num_pages) for request in life.running)
    computing = _pages_being_computed(life)
    windows = [WindowRoom(window, life, decision, expect) for window in life.windows]
    locked: set[Node] = set()
    waits = 0
    for request in queue:
        if rows == 0:
            decision.rest = Blocked.NO_ROW
            return
        if budget <= 0:
            decision.rest = Blocked.NO_BUDGET
            return
        if waits == MOST_WAITS:
            return
        match = cache.match(request.ids[: request.match_limit], request.extra_key)
        next_page = match.node, cache.edge(match.node, request.ids, match.length, request.extra_key)
        page_end = match.length + life.page_size
        if page_end <= request.match_limit and next_page in computing:
            decision.blocked[request] = Blocked.SAME_PREFIX
            waits += 1
            continue
        waits = 0
        newly_locked = [
            node
            for node in match.node.path()
            if node.lock_count == 0 and node not in locked and not node.on_host
        ]
        need = expect(request) - len(match.pages)
        need += sum(len(node.pages) for node in newly_locked)
        most = min([budget, *[window.most_tokens(match) for window in windows]])
        if need > room or most <= 0:
            decision.blocked[request] = Blocked.NO_PAGES
            return  # nobody passes it, or it might never get in
        length = chunk_length(request.total_len - match.length, most)
        if length == 0:
            decision.blocked[request] = Blocked.NO_BUDGET
            return  # too little of the budget is left
        decision.chunks.append(chunk(request, match.length, length, match))
        locked.update(newly_locked)
        for window in windows:
            window.take(match, length)
        if cache.enabled and page_end <= request.total_len:
            computing.add(next_page)
        room -= need
        budget -= length
        rows -= 1


class WindowRoom:
    """Pages of a window group that first chunks may take: what the running requests take in this
    step, and what they are expected to fill their windows with, is set aside."""

    def __init__(
        self,
        window: WindowPages,
        life: Lifecycle,
        decision: Decision,
        expect: Callable[[Request], int],
    ) -> None:
        self._window = window
        self._allocator = life.allocator
        self._taken: set[int] = set()  # handles that requests of this step begin to use
        ends = {entry.request: entry.end for entry in [*decision.decode, *decision.chunks]}
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


def _pages_being_computed(life: Lifecycle) -> set[tuple[Node, Hashable]]:
    """(node, first page after it) for all whose next full prompt page is not in the tree yet."""
    if not life.cache.enabled:
        return set()
    return {
        (r.node, life.cache.edge(r.node, r.ids, r.cached_len, r.extra_key))
        for r in life.running
        if r.node is not None and r.cached_len + life.page_size <= r.prefill_end
    }
