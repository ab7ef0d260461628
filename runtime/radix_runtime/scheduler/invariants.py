"""The states that must not exist, as code.

I1 partition   every page has exactly one owner: free list, tree, one request, pending
I2 idle        nothing waits or runs: no private or pending page, no lock, every row free
I3 tree        counters equal a recount; a node is locked once for each request on its path
I4 request     cached <= computed <= total; pages cover the computed tokens, no more; the cached
               prefix is the tree's, page for page
I5 lifecycle   a choice is in exactly one container, the one that its state names
I6 stream      sent <= output tokens; nothing is unsent once a choice has ended
I7 ids         sampled ids are in the vocabulary (checked as each result arrives)
I8 budget      pages that the next token of every running request needs can be had, or retraction
               can make room: the oldest running request always fits
I9 conserve    accepted = finished + aborted + failed + live
I10 epoch      no page or row that a step in flight touches is free, or has a new owner
I13 content    (tests) KV read equals KV written: the fake engine compares hashes

In production `check` runs when the runtime has gone idle; in tests after every step. It is
O(pages) numpy plus O(requests + tree nodes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvariantViolation
from .batch_builder import Step
from .lifecycle import Lifecycle
from .request import Request, State

if TYPE_CHECKING:
    from ..memory.radix_cache import Node
    from .scheduler import Scheduler

FREE, TREE, PENDING, FIRST_REQUEST = 0, 1, 2, 3


def check(scheduler: Scheduler) -> None:
    """Raises InvariantViolation with the first thing that is wrong."""
    life = scheduler.life
    owner = page_owners(life)
    life.cache.check()
    check_locks(life)
    check_lifecycle(scheduler)
    for request in resident(life):
        check_request(request, life, owner)
    check_budget(life)
    check_conservation(scheduler)
    check_in_flight(scheduler, owner)
    if scheduler.is_idle:
        check_idle(life, owner)


def _require(condition: bool, name: str, detail: str) -> None:
    if not condition:
        raise InvariantViolation(name, detail)


def resident(life: Lifecycle) -> list[Request]:
    """Requests that hold a row, in a fixed order: owner code FIRST_REQUEST + index."""
    return life.running + life.draining


def private_pages(request: Request, life: Lifecycle) -> np.ndarray:
    pages = life.table.pages(request.row, request.num_pages)
    return pages[request.cached_len // life.page_size :]


def page_owners(life: Lifecycle) -> np.ndarray:
    """int64 [num_pages] owner codes. Raises I1 unless each page has exactly one owner."""
    groups = [life.allocator.free_pages()]
    codes = [FREE]
    for node in life.cache.nodes():
        groups.append(node.pages)
        codes.append(TREE)
    for _, pages in life.pending:
        groups.append(pages)
        codes.append(PENDING)
    for index, request in enumerate(resident(life)):
        groups.append(private_pages(request, life))
        codes.append(FIRST_REQUEST + index)
    pages = np.concatenate(groups)
    n = life.allocator.num_pages
    _require(not len(pages) or 0 <= pages.min() <= pages.max() < n, "I1", "page id out of range")
    count = np.bincount(pages, minlength=n)
    if (count != 1).any():
        lost, shared = np.flatnonzero(count == 0), np.flatnonzero(count > 1)
        detail = f"pages without owner {lost[:8].tolist()}, with several {shared[:8].tolist()}"
        raise InvariantViolation("I1", detail)
    owner = np.empty(n, np.int64)
    owner[pages] = np.repeat(codes, [len(group) for group in groups])
    return owner


def check_idle(life: Lifecycle, owner: np.ndarray) -> None:
    _require(not (life.waiting or life.running), "I2", "requests nobody waits for")
    _require(bool((owner <= TREE).all()), "I2", "pages held while idle")
    held = life.cache.total_pages - life.cache.evictable_pages
    _require(held == 0, "I2", f"{held} cached pages locked while idle")
    rows = sorted(life.table.free_rows())
    _require(rows == list(range(life.table.max_rows)), "I2", "rows missing while idle")


def check_locks(life: Lifecycle) -> None:
    expected: dict[Node, int] = {}
    for request in resident(life):
        node = request.node
        _require(node is not None, "I4", f"{request.rid} holds a row but no node")
        while node is not None and node is not life.cache.root:
            expected[node] = expected.get(node, 0) + 1
            node = node.parent
    for node in life.cache.nodes():
        want = expected.pop(node, 0)
        _require(node.lock_count == want, "I3", f"{node.lock_count} locks for {want} requests")
    _require(not expected, "I3", "a request is locked on a node outside the tree")


_CONTAINER = {State.WAITING: "waiting", State.PREFILL: "running", State.DECODE: "running", State.DRAINING: "draining"}


def check_lifecycle(scheduler: Scheduler) -> None:
    life = scheduler.life
    seen: set[Request] = set()
    for name in ("waiting", "running", "draining"):
        for request in getattr(life, name):
            where = _CONTAINER.get(request.state)
            _require(where == name, "I5", f"{request.rid} is {request.state.name} in {name}")
            _require(request not in seen, "I5", f"{request.rid} is in two places")
            _require((request.row >= 0) == (name != "waiting"), "I5", f"{request.rid}: wrong row")
            _require(request.ended == (name == "draining"), "I5", f"{request.rid}: wrong end mark")
            seen.add(request)
            unsent = request.num_output - request.sent
            fits = 0 <= unsent and (request.started or request.sent == 0)
            if name == "draining" and request.keep_len is None:
                fits = unsent == 0
            _require(fits, "I6", f"{request.rid} sent {request.sent} of {request.num_output}")
    live = {request for choices in scheduler.live.values() for request in choices}
    held = {request for request in seen if request.state is not State.DRAINING}
    _require(live == held, "I5", "live requests and containers differ")
    rows = [request.row for request in resident(life)] + life.table.free_rows()
    _require(sorted(rows) == list(range(life.table.max_rows)), "I5", "a row has no or two owners")


def check_request(request: Request, life: Lifecycle, owner: np.ndarray) -> None:
    name, size = request.rid, life.page_size
    ordered = 0 <= request.cached_len <= request.computed_len <= request.total_len
    _require(ordered and request.total_len <= request.max_total_len, "I4", f"{name}: lengths")
    # The host knows every id but the one token whose step is in flight.
    ahead = request.total_len - request.num_ids
    _require(request.state is State.DRAINING or 0 <= ahead <= 2, "I4", f"{name}: {ahead} unseen")
    _require(request.cached_len % size == 0, "I4", f"{name}: cached prefix ends inside a page")
    want = life.allocator.pages_for(request.computed_len)
    _require(request.num_pages == want, "I4", f"{name}: {request.num_pages} pages, wants {want}")
    pages = life.table.pages(request.row, request.num_pages)
    prefix = pages[: request.cached_len // size]
    _require(bool((owner[prefix] == TREE).all()), "I4", f"{name}: prefix page is not the tree's")
    path: list[np.ndarray] = []
    node = request.node
    while node is not None and node is not life.cache.root:
        path.insert(0, node.pages)
        node = node.parent
    tree = np.concatenate(path) if path else prefix[:0]
    _require(np.array_equal(tree, prefix), "I4", f"{name}: row and tree path differ")


def check_budget(life: Lifecycle) -> None:
    if not life.running:
        return
    oldest = min(life.running, key=lambda r: r.seq)
    pages = life.allocator.pages_for(oldest.max_total_len)
    _require(pages <= life.allocator.num_pages, "I8", f"{oldest.rid} can never finish")
    evictable = sum(len(n.pages) for n in life.cache.nodes() if n.lock_count == 0)
    _require(evictable == life.cache.evictable_pages, "I8", "evictable pages are overcounted")


def check_conservation(scheduler: Scheduler) -> None:
    c = scheduler.counters
    ended = c.num_finished_requests_total + c.num_aborted_requests_total
    ended += c.num_failed_requests_total
    live = sum(len(choices) for choices in scheduler.live.values())
    detail = f"{c.num_requests_total} accepted, {ended} ended, {live} live"
    _require(c.num_requests_total == ended + live, "I9", detail)
    _require(all(scheduler.live.values()), "I9", "a request without choices is kept")


def note_pages(step: Step, life: Lifecycle) -> None:
    """Remembers what a step may touch, independently of how requests change later."""
    for entry in step.entries:
        request = entry.request
        step.page_sets.append(life.table.pages(request.row, request.num_pages).copy())


def check_in_flight(scheduler: Scheduler, owner: np.ndarray) -> None:
    life = scheduler.life
    code = {r: FIRST_REQUEST + index for index, r in enumerate(resident(life))}
    for step in scheduler.in_flight:
        _require(step.plan.step_id > life.completed_step, "I10", "a completed step is in flight")
        for entry, pages in zip(step.entries, step.page_sets, strict=False):
            request = entry.request
            detail = f"step {step.plan.step_id} of {request.rid}"
            _require(request in code, "I10", f"{detail}: its row was given back")
            _require(request.last_step >= step.plan.step_id, "I10", f"{detail}: last step forgot it")
            held = owner[pages]
            legal = (held == TREE) | (held == PENDING) | (held == code[request])
            _require(bool(legal.all()), "I10", f"{detail}: a page it touches has a new owner")
    for step_id, _ in life.pending:
        _require(step_id > life.completed_step, "I10", "a pending page was not given back")
    for request in life.draining:
        late = request.last_step > life.completed_step
        _require(late, "I10", f"{request.rid} should have been released")
