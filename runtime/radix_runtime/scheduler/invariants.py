"""The states that must not exist, as code."""

# `check` runs when the runtime has gone idle, in tests after every step: O(pages) numpy, O(requests
# + tree nodes).

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from ..errors import require
from .lifecycle import Lifecycle
from .request import Request, State

if TYPE_CHECKING:
    from .scheduler import Scheduler

# I1 partition   every page has exactly one owner: free list, tree, one request, pending
# I2 idle        nothing waits or runs: no private or pending page, no lock, every row free
# I3 tree        counters equal a recount; a node is locked once for each request on its path
# I4 request     cached <= computed <= total; pages just cover what is computed; the cached prefix is the tree's
# I5 lifecycle   a choice is in exactly one container, the one that its state names
# I6 stream      sent <= output tokens; nothing is unsent once a choice has ended
# I7 ids         sampled ids are in the vocabulary (checked as each result arrives)
# I8 budget      retraction can always make room for the next tokens: the oldest running request fits alone
# I9 conserve    accepted = finished + aborted + failed + live
# I10 epoch      no page or row that a step in flight touches is free, or has a new owner
# I13 content    (tests) KV read equals KV written: the fake engine compares hashes

# Owner codes of pages; FIRST_REQUEST + i is the i-th request of `resident`.
FREE, TREE, PENDING, FIRST_REQUEST = 0, 1, 2, 3


def check(scheduler: "Scheduler") -> None:
    life = scheduler.life
    owner = page_owners(life)
    life.cache.check()
    check_locks(life)
    check_lifecycle(scheduler)
    for request in resident(life):
        check_request(request, life, owner)
    check_counts(scheduler)
    check_in_flight(scheduler, owner)
    if scheduler.is_idle:
        check_idle(life, owner)


def resident(life: Lifecycle) -> list[Request]:
    """Requests that hold a row."""
    return life.running + life.draining


def page_owners(life: Lifecycle) -> np.ndarray:
    """int64 [num_pages] owner codes. Raises I1 unless each page has exactly one owner."""
    groups = [(FREE, life.allocator.free_pages())]
    groups += [(TREE, node.pages) for node in life.cache.nodes()]
    groups += [(PENDING, pages) for _, pages in life.pending]
    for code, r in enumerate(resident(life), FIRST_REQUEST):
        groups.append(
            (code, life.table.pages(r.row, r.num_pages)[r.cached_len // life.page_size :])
        )
    pages = np.concatenate([group for _, group in groups])
    n = life.allocator.num_pages
    require(not len(pages) or 0 <= pages.min() <= pages.max() < n, "I1", "page id out of range")
    count = np.bincount(pages, minlength=n)
    lost, shared = np.flatnonzero(count == 0)[:8].tolist(), np.flatnonzero(count > 1)[:8].tolist()
    require(not lost and not shared, "I1", f"pages without owner {lost}, with several {shared}")
    owner = np.empty(n, np.int64)
    owner[pages] = np.repeat([code for code, _ in groups], [len(group) for _, group in groups])
    return owner


def check_locks(life: Lifecycle) -> None:
    expected = Counter(node for r in resident(life) if r.node for node in r.node.path())
    for node in life.cache.nodes():
        want = expected.pop(node, 0)
        require(node.lock_count == want, "I3", f"{node.lock_count} locks for {want} requests")
    require(not expected, "I3", "a request is locked on a node outside the tree")


_CONTAINER = {
    State.WAITING: "waiting",
    State.PREFILL: "running",
    State.DECODE: "running",
    State.DRAINING: "draining",
}


def check_lifecycle(scheduler: "Scheduler") -> None:
    life = scheduler.life
    seen: set[Request] = set()
    for name in ("waiting", "running", "draining"):
        for request in getattr(life, name):
            rid = request.rid
            require(
                _CONTAINER.get(request.state) == name,
                "I5",
                f"{rid} is {request.state.name} in {name}",
            )
            require(request not in seen, "I5", f"{rid} is in two places")
            require((request.row >= 0) == (name != "waiting"), "I5", f"{rid}: wrong row")
            require(request.ended == (name == "draining"), "I5", f"{rid}: wrong end mark")
            seen.add(request)
            unsent = request.num_output - request.sent
            fits = 0 <= unsent and (request.started or request.sent == 0)
            if request.ended and request.keep_len is None:
                fits = unsent == 0
            require(fits, "I6", f"{rid} sent {request.sent} of {request.num_output}")
    live = {request for choices in scheduler.live.values() for request in choices}
    require(live == seen - set(life.draining), "I5", "live requests and containers differ")
    rows = [request.row for request in resident(life)] + life.table.free_rows
    require(sorted(rows) == list(range(life.table.max_rows)), "I5", "a row has no or two owners")


def check_request(request: Request, life: Lifecycle, owner: np.ndarray) -> None:
    rid, size = request.rid, life.page_size
    ordered = (
        0
        <= request.cached_len
        <= request.computed_len
        <= request.total_len
        <= request.max_total_len
    )
    require(ordered, "I4", f"{rid}: lengths")
    # The host knows every id but the one token whose step is in flight.
    ahead = request.total_len - request.num_ids
    require(request.state is State.DRAINING or 0 <= ahead <= 2, "I4", f"{rid}: {ahead} unseen")
    require(request.cached_len % size == 0, "I4", f"{rid}: cached prefix ends inside a page")
    want = life.allocator.pages_for(request.computed_len)
    require(request.num_pages == want, "I4", f"{rid}: {request.num_pages} pages, wants {want}")
    prefix = life.table.pages(request.row, request.cached_len // size)
    require(bool((owner[prefix] == TREE).all()), "I4", f"{rid}: prefix page is not the tree's")
    require(request.node is not None, "I4", f"{rid} holds a row but no node")
    path = [node.pages for node in request.node.path()] if request.node else []
    tree = np.concatenate([prefix[:0], *reversed(path)])
    require(np.array_equal(tree, prefix), "I4", f"{rid}: row and tree path differ")


def check_counts(scheduler: "Scheduler") -> None:
    life, c = scheduler.life, scheduler.counters
    if life.running:
        oldest = min(life.running, key=lambda r: r.seq)
        fits = life.allocator.pages_for(oldest.max_total_len) <= life.allocator.num_pages
        require(fits, "I8", f"{oldest.rid} can never finish")
    ended = (
        c.num_finished_requests_total + c.num_aborted_requests_total + c.num_failed_requests_total
    )
    live = sum(len(choices) for choices in scheduler.live.values())
    require(
        c.num_requests_total == ended + live,
        "I9",
        f"{c.num_requests_total} accepted, {ended} ended, {live} live",
    )
    require(all(scheduler.live.values()), "I9", "a request without choices is kept")


def check_in_flight(scheduler: "Scheduler", owner: np.ndarray) -> None:
    life = scheduler.life
    code = {request: code for code, request in enumerate(resident(life), FIRST_REQUEST)}
    for step in scheduler.in_flight:
        number = step.plan.step_id
        require(number > life.completed_step, "I10", "a completed step is in flight")
        for entry, pages in zip(step.entries, step.page_sets, strict=False):
            request, name = entry.request, f"step {number} of {entry.request.rid}"
            require(request in code, "I10", f"{name}: its row was given back")
            require(request.last_step >= number, "I10", f"{name}: last step forgot it")
            legal = np.isin(owner[pages], (TREE, PENDING, code[request]))
            require(bool(legal.all()), "I10", f"{name}: a page it touches has a new owner")
    require(
        all(step_id > life.completed_step for step_id, _ in life.pending),
        "I10",
        "a pending page was kept",
    )
    for request in life.draining:
        require(
            request.last_step > life.completed_step,
            "I10",
            f"{request.rid} should have been released",
        )


def check_idle(life: Lifecycle, owner: np.ndarray) -> None:
    require(not (life.waiting or life.running), "I2", "requests nobody waits for")
    require(bool((owner <= TREE).all()), "I2", "pages held while idle")
    require(
        life.cache.total_pages == life.cache.evictable_pages, "I2", "cached pages locked while idle"
    )
    require(len(life.table.free_rows) == life.table.max_rows, "I2", "rows missing while idle")
