"""What the next step computes: a pure function of host state."""

# Each step gives one token to every running request first and fills the rest of the token budget
# with prompt chunks, so a long prompt never stops the streams; drafts get what is left. All room is
# counted in pages. A request is admitted when the pages that it and the running ones are *expected*
# to need are there; how much of `max_new_tokens` counts is adaptive (`OutputRatio`). Too much trust
# costs a retraction, never a failure: `plan_step` reports a shortage before anything is launched.

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from ..memory.radix_node import Match, Node
from ..registry import Registry
from .decision import Blocked, Decision, Entry, chunk, chunk_length, decode
from .lifecycle import Lifecycle
from .request import Request, State
from .window_room import WindowRoom

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
        if length < chunk_length(left, budget):
            starved = True  # of pages
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
    if max_samples == 1:
        return [decode(request, 1) for request in streams]
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
    windows = [WindowRoom(w, life, entries=decision.entries, expect=expect) for w in life.windows]
    locked: set[Node] = set()
    waits = 0
    for request in queue:
        if rows == 0 or budget <= 0:
            decision.rest = Blocked.NO_ROW if rows == 0 else Blocked.NO_BUDGET
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
        newly_locked = _evictable_path(match, locked)
        need = expect(request) - len(match.pages)
        need += sum(len(node.pages) for node in newly_locked)
        most = min([budget, *[window.most_tokens(match) for window in windows]])
        length = chunk_length(request.total_len - match.length, most)
        if need > room or length <= 0:
            lacks_pages = need > room or most < budget
            decision.blocked[request] = Blocked.NO_PAGES if lacks_pages else Blocked.NO_BUDGET
            return  # nobody passes it, or it might never get in
        decision.chunks.append(chunk(request, match.length, length, match))
        locked.update(newly_locked)
        for window in windows:
            window.take(match, length)
        if cache.enabled and page_end <= request.total_len:
            computing.add(next_page)
        room -= need
        budget -= length
        rows -= 1


def _evictable_path(match: Match, locked: set[Node]) -> list[Node]:
    """Nodes of the prefix on the device that could be evicted, but for those in `locked`."""
    path = match.node.path()
    return [n for n in path if n.lock_count == 0 and not n.on_host and n not in locked]


def _pages_being_computed(life: Lifecycle) -> set[tuple[Node, Hashable]]:
    """(node, first page after it) for all whose next full prompt page is not in the tree yet."""
    if not life.cache.enabled:
        return set()
    return {
        (r.node, life.cache.edge(r.node, r.ids, r.cached_len, r.extra_key))
        for r in life.running
        if r.node is not None and r.cached_len + life.page_size <= r.prefill_end
    }
