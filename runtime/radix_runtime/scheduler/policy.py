"""What the next step computes: a pure function of host state."""

# Each step gives one token to every running request first and fills the rest of the token budget
# with prompt chunks, so a long prompt never stops the streams; drafts get what is left. All room is
# counted in pages. A request is admitted when the pages that it and the running ones are *expected*
# to need are there; how much of `max_new_tokens` counts is adaptive (`OutputRatio`). Too much trust
# costs a retraction, never a failure: `plan_step` reports a shortage before anything is launched.

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..memory.radix_node import Match, Node
from ..registry import Registry
from .decision import Blocked, Decision, DecodeEntries, chunk, chunk_length
from .lifecycle import Lifecycle
from .request import Request, State
from .rows import Flag, Rows
from .window_room import Growth, WindowRoom

# Order of the queue ---------------------------------------------------------------------------


class QueueContext(NamedTuple):
    """What a schedule policy may look at beside the requests. Times are of the scheduler's clock,
    in seconds."""

    now: float
    age_bound: float  # seconds after which a request may not be passed any more
    prefix_length: Callable[[Request], int]  # tokens of it that are cached right now


# The order in which requests are offered admission. It gets them in order of arrival, retracted
# requests first; it may leave some out and must not change them.
SchedulePolicy = Callable[[Collection[Request], QueueContext], Iterable[Request]]

# Requests in a row that wait for another's page before the rest is left for the next step.
MOST_WAITS = 256
LPM_WINDOW = 128  # oldest requests among which the longest prefix is looked for


def fcfs(waiting: Collection[Request], context: QueueContext) -> Iterable[Request]:
    """First come, first served."""
    return waiting


def lpm(waiting: Collection[Request], context: QueueContext) -> Iterable[Request]:
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


def expected_len(
    total_len: np.ndarray, max_total_len: np.ndarray, ratio: float, margin: int
) -> np.ndarray:
    """Tokens that requests of these lengths are expected to reach: at least `margin` more than they
    have now, where they may have them."""
    left = max_total_len - total_len
    ahead = np.maximum((ratio * np.minimum(left, OUTPUT_HORIZON)).astype(np.int64), margin)
    return total_len + np.minimum(left, ahead)


@dataclass(frozen=True, slots=True)
class Expectation:
    """How many pages requests are expected to need in all."""

    ratio: float
    margin: int  # tokens
    page_size: int

    def pages(self, request: Request) -> int:
        """Of a waiting request."""
        return int(self._pages(np.array([request.total_len]), np.array([request.max_total_len]))[0])

    def pages_of_rows(self, rows: Rows, chosen: np.ndarray) -> np.ndarray:
        """int64 [n]: of the requests in the `chosen` rows."""
        return self._pages(rows.total_len[chosen], rows.max_total_len[chosen])

    def _pages(self, total_len: np.ndarray, max_total_len: np.ndarray) -> np.ndarray:
        expected = expected_len(total_len, max_total_len, self.ratio, self.margin)
        return -(-expected // self.page_size)


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
    streams, start = _streams(life.rows)
    full = np.count_nonzero(start == life.rows.num_pages[streams] * size)
    room = life.step_room - int(full)
    if room < 0:
        return Decision(shortage=True, rest=Blocked.NO_PAGES)
    decision = Decision()
    budget = token_budget - len(streams)
    starved = False
    for request in life.prompts:
        if request.state is not State.PREFILL:
            continue  # its last chunk is in flight
        left = request.total_len - request.computed_len
        held = request.num_pages * size - request.computed_len
        length = chunk_length(left, min(budget, held + room * size))
        if length < chunk_length(left, budget):
            starved = True  # of pages
        if length > 0:
            decision.chunks.append(chunk(request, request.computed_len, length))
            budget -= length
            room -= life.allocator.pages_for(max(0, length - held))
    decision.decode = _decode_entries(streams, start, room, max_samples, life)
    if starved:
        decision.rest = Blocked.NO_PAGES
    elif free_rows <= 0:
        decision.rest = Blocked.NO_ROW
    elif budget <= 0:
        decision.rest = Blocked.NO_BUDGET
    elif life.waiting:
        # What this step takes for a running request is within its expected length.
        margin = max(size, max_samples)
        expect = Expectation(ratio=ratio, margin=margin, page_size=size)
        _admit(life, queue(), decision, rows=free_rows, budget=budget, expect=expect)
    decision.shortage = starved and not decision
    return decision


def _streams(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """The rows that decode and have a token to come, and their `computed_len`."""
    streams = rows.decoding
    start = rows.computed_len[streams]
    # The last token of a request is never computed, and of one without output no token is awaited.
    going = start < rows.max_total_len[streams] - 1
    if np.count_nonzero(going) == len(streams):
        return streams, start
    return streams[going], start[going]


def _decode_entries(
    streams: np.ndarray, start: np.ndarray, room: int, max_samples: int, life: Lifecycle
) -> DecodeEntries:
    """An entry for each of `streams`, with as many drafts as fit its length and its pages; `room`
    is the number of pages beyond one token each."""
    if max_samples == 1:
        one = np.ones(len(streams), np.int64)
        return DecodeEntries(rows=streams, start=start, num_samples=one, total_samples=len(one))
    rows = life.rows
    size = life.page_size
    wanted = np.minimum(max_samples, rows.max_total_len[streams] - 1 - start)
    wanted[(rows.flags[streams] & Flag.NO_DRAFTS) > 0] = 1
    held = np.maximum(rows.num_pages[streams], start // size + 1)
    more = np.maximum(-(-(start + wanted) // size) - held, 0)
    # First come, first served, as long as there is room.
    more = np.clip(room - (more.cumsum() - more), 0, more)
    num_samples = np.minimum(wanted, (held + more) * size - start)
    return DecodeEntries(
        rows=streams,
        start=start,
        num_samples=num_samples,
        total_samples=int(num_samples.sum()),
    )


def _admit(
    life: Lifecycle,
    queue: Iterable[Request],
    decision: Decision,
    *,
    rows: int,
    budget: int,
    expect: Expectation,
) -> None:
    """Adds first chunks of waiting requests to `decision`, in the order of `queue`, while rows,
    tokens and pages last."""
    cache = life.cache
    growth = _expected_growth(life, expect)
    room = life.available_pages - int(np.maximum(growth.pages, 0).sum())
    computing = _pages_being_computed(life)
    windows = [WindowRoom(w, life, decision=decision, growth=growth) for w in life.windows]
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
        need = expect.pages(request) - len(match.pages)
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


def _expected_growth(life: Lifecycle, expect: Expectation) -> Growth:
    prefilling = [request.row for request in life.prompts if request.state is State.PREFILL]
    running = np.append(life.rows.decoding, np.array(prefilling, np.int64))
    pages = expect.pages_of_rows(life.rows, running) - life.rows.num_pages[running]
    return Growth(rows=running, pages=pages)


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
        for r in life.prompts
        if r.node is not None and r.cached_len + life.page_size <= r.prefill_end
    }
