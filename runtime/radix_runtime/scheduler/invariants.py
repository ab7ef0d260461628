"""The states that must not exist, as code.

`check` runs when the runtime has gone idle, in tests after every step: O(pages) numpy, O(requests
+ tree nodes).

    I1 partition   every page has exactly one owner: free list, tree, one request, deferred release
    I2 idle        nothing waits or runs: no private or deferred page, no lock, every row free
    I3 tree        counters equal a recount; a node is locked once for each request on its path
    I4 request     cached <= computed <= total; what the host has not seen is just what steps in
                   flight sample; pages cover the highest length launched; the cached prefix is the
                   tree's
    I5 lifecycle   a choice is in exactly one container, the one that its state names
    I6 stream      sent <= output tokens; nothing is unsent once a choice has ended
    I7 ids         sampled ids are in the vocabulary (checked as each result arrives)
    I8 budget      retraction can always make room for the next tokens: the oldest running request
                   fits alone
    I9 conserve    accepted = finished + aborted + failed + live
    I10 epoch      no page or row that a step in flight touches is free, or has a new owner
    I11 groups     each page and slot of the other cache groups has exactly one owner; a row holds
                   the pages of its window
    I12 host       each page of the host tier is free or one node's; nothing locked, and nothing
                   that a node on the device hangs from, is on the host
    I13 content    (tests) KV read equals KV written: the fake engine compares hashes
"""

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np

from ..errors import require
from ..memory.radix_check import check_tree
from .batch_builder import Step
from .figures import Counters
from .group_invariants import check_groups, check_host, resident
from .lifecycle import Lifecycle
from .live import LiveRequests
from .request import Request, State
from .rows import Flag

# Owner codes of pages; FIRST_REQUEST + i is the i-th request of `resident`.
FREE = 0
TREE = 1
DEFERRED = 2
FIRST_REQUEST = 3


def check(
    life: Lifecycle, live: LiveRequests, counters: Counters, in_flight: Collection[Step]
) -> None:
    """Raises InvariantViolation, which names the invariant, unless all of them hold between two
    iterations of the scheduler."""
    owner = page_owners(life)
    check_tree(life.cache)
    check_locks(life)
    check_lifecycle(life, live)
    unseen = samples_in_flight(life, in_flight)
    for request in resident(life):
        check_request(request, life, owner)
        check_lengths(request, life, unseen[request])
    check_counts(life, live, counters)
    check_in_flight(life, in_flight, owner)
    check_groups(life, in_flight)
    check_host(life)
    if not (in_flight or live or life.draining):
        check_idle(life, owner)


def page_owners(life: Lifecycle) -> np.ndarray:
    """int64 [num_pages] owner codes. Raises I1 unless each page has exactly one owner."""
    groups = [(FREE, life.allocator.free_pages())]
    groups += [(TREE, node.pages) for node in life.cache.nodes() if not node.on_host]
    groups += [(DEFERRED, pages) for _, pages in life.deferred]
    for code, request in enumerate(resident(life), FIRST_REQUEST):
        pages = life.table.pages(request.row, request.num_pages)
        groups.append((code, pages[request.cached_len // life.page_size :]))
    num_pages = life.allocator.num_pages
    pages = np.concatenate([pages for _, pages in groups])
    if len(pages):
        in_range = 0 <= pages.min() and pages.max() < num_pages
        require(in_range, "I1", "page id out of range")
    count = np.bincount(pages, minlength=num_pages)
    lost = np.flatnonzero(count == 0)[:8].tolist()
    shared = np.flatnonzero(count > 1)[:8].tolist()
    require(not lost and not shared, "I1", f"pages without owner {lost}, with several {shared}")
    owner = np.empty(num_pages, np.int64)
    owner[pages] = np.repeat([code for code, _ in groups], [len(pages) for _, pages in groups])
    return owner


def check_locks(life: Lifecycle) -> None:
    expected = Counter(node for r in resident(life) if r.node for node in r.node.path())
    for node in life.cache.nodes():
        want = expected.pop(node, 0)
        require(node.lock_count == want, "I3", f"{node.lock_count} locks for {want} requests")
    require(not expected, "I3", "a request is locked on a node outside the tree")


def check_lifecycle(life: Lifecycle, live: LiveRequests) -> None:
    containers: list[tuple[Collection[Request], set[State]]] = [
        (life.pending, {State.PENDING}),
        (life.waiting, {State.WAITING}),
        (life.running, {State.PREFILL, State.DECODE}),
        (life.draining, {State.DRAINING}),
    ]
    seen: set[Request] = set()
    for container, states in containers:
        for request in container:
            rid = request.rid
            fits = request.state in states
            require(fits, "I5", f"{rid} is {request.state.name} in another state's container")
            require(request not in seen, "I5", f"{rid} is in two places")
            has_row = request.state not in (State.PENDING, State.WAITING)
            require((request.row >= 0) == has_row, "I5", f"{rid}: wrong row")
            draining = request.state is State.DRAINING
            require(request.ended == draining, "I5", f"{rid}: wrong end mark")
            seen.add(request)
            check_stream(request)
    check_rows(life)
    waiting_tokens = sum(request.total_len for request in life.waiting)
    require(waiting_tokens == life.waiting.num_tokens, "I5", "tokens of the queue")
    living = {request for choices in live.values() for request in choices}
    require(living == seen - set(life.draining), "I5", "live requests and containers differ")
    rows = [request.row for request in resident(life)] + life.table.free_rows
    require(sorted(rows) == list(range(life.table.max_rows)), "I5", "a row has no or two owners")


def check_rows(life: Lifecycle) -> None:
    """The rows say of each request what it says itself."""
    holders = {request.row: request for request in resident(life)}
    for row, holder in enumerate(life.rows.requests):
        require(holder is holders.get(row), "I5", f"row {row} is entered for another request")
    for request in resident(life):
        marked = bool(life.rows.flags[request.row] & Flag.ENDED)
        require(marked == request.ended, "I5", f"{request.rid}: wrong end mark of its row")
    decoding = sorted(r.row for r in life.running if r.state is State.DECODE)
    same = sorted(life.rows.decoding.tolist()) == decoding
    require(same, "I5", "the rows that decode are not those of requests in DECODE")
    prefilling = {request for request in life.running if request.state is State.PREFILL}
    awaited = prefilling <= life.prompts.keys() <= set(life.running)
    require(awaited, "I5", "the prompts awaited are not those of running requests")


def check_stream(request: Request) -> None:
    unsent = request.num_output - request.sent
    fits = unsent >= 0 and (request.started or request.sent == 0)
    if request.ended and request.keep_len is None:
        fits = unsent == 0
    require(fits, "I6", f"{request.rid} sent {request.sent} of {request.num_output}")


def samples_in_flight(life: Lifecycle, in_flight: Iterable[Step]) -> Counter[Request]:
    """Tokens that the launched steps sample for each request, at most."""
    samples: Counter[Request] = Counter()
    for step in in_flight:
        counts = step.plan.num_samples.tolist()
        for request, count in zip(step.requests(life.rows), counts, strict=True):
            samples[request] += count
    return samples


def check_lengths(request: Request, life: Lifecycle, unseen: int) -> None:
    """`unseen`: samples of the request that are in flight."""
    rid = request.rid
    lengths = [
        0,
        request.cached_len,
        request.computed_len,
        request.total_len,
        request.max_total_len,
    ]
    require(lengths == sorted(lengths), "I4", f"{rid}: lengths")
    want = life.allocator.pages_for(request.reserved_len)
    require(request.num_pages == want, "I4", f"{rid}: {request.num_pages} pages, wants {want}")
    left = request.total_len - request.computed_len
    if request.state is State.PREFILL:
        written = request.computed_len == request.reserved_len and left > 0
        require(written, "I4", f"{rid}: the prompt's length is not what was launched")
    elif request.state is State.DECODE:
        # The last token's KV comes with the next step; without output there is none.
        no_output = request.max_total_len == request.prompt_len
        require(left == (0 if no_output else 1), "I4", f"{rid}: {left} tokens not computed")
        launched = request.computed_len <= request.reserved_len
        require(launched, "I4", f"{rid}: computed beyond what was launched")
    if request.state is not State.DRAINING:
        ahead = request.total_len - request.num_ids
        require(ahead == unseen, "I4", f"{rid}: {ahead} tokens unseen, {unseen} in flight")


def check_request(request: Request, life: Lifecycle, owner: np.ndarray) -> None:
    rid = request.rid
    size = life.page_size
    require(request.cached_len % size == 0, "I4", f"{rid}: cached prefix ends inside a page")
    prefix = life.table.pages(request.row, request.cached_len // size)
    require(bool((owner[prefix] == TREE).all()), "I4", f"{rid}: prefix page is not the tree's")
    require(request.node is not None, "I4", f"{rid} holds a row but no node")
    path = [node.pages for node in request.node.path()] if request.node else []
    tree = np.concatenate([prefix[:0], *reversed(path)])
    require(np.array_equal(tree, prefix), "I4", f"{rid}: row and tree path differ")


def check_counts(life: Lifecycle, live: LiveRequests, counters: Counters) -> None:
    if life.running:
        oldest = min(life.running, key=lambda request: request.seq)
        fits = life.allocator.pages_for(oldest.max_total_len) <= life.allocator.num_pages
        require(fits, "I8", f"{oldest.rid} can never finish")
    accepted = counters.num_requests_total
    ended = (
        counters.num_finished_requests_total
        + counters.num_aborted_requests_total
        + counters.num_failed_requests_total
    )
    living = sum(len(choices) for choices in live.values())
    balanced = accepted == ended + living
    require(balanced, "I9", f"{accepted} accepted, {ended} ended, {living} live")
    require(all(live.values()), "I9", "a request without choices is kept")


def check_in_flight(life: Lifecycle, in_flight: Iterable[Step], owner: np.ndarray) -> None:
    code = {request: code for code, request in enumerate(resident(life), FIRST_REQUEST)}
    for step in in_flight:
        number = step.plan.step_id
        require(number > life.completed_step, "I10", "a completed step is in flight")
        # Without page sets (they are kept for checks at every step) there is nothing to compare.
        for request, pages in zip(step.requests(life.rows), step.page_sets, strict=False):
            name = f"step {number} of {request.rid}"
            require(request in code, "I10", f"{name}: its row was given back")
            require(request.last_step >= number, "I10", f"{name}: last step forgot it")
            legal = np.isin(owner[pages], (TREE, DEFERRED, code[request]))
            require(bool(legal.all()), "I10", f"{name}: a page it touches has a new owner")
    for step_id, _ in life.deferred:
        require(step_id > life.completed_step, "I10", "a deferred page was kept")
    for request in life.draining:
        released = request.last_step <= life.completed_step
        require(not released, "I10", f"{request.rid} should have been released")


def check_idle(life: Lifecycle, owner: np.ndarray) -> None:
    queued = life.pending or life.waiting or life.running
    require(not queued, "I2", "requests nobody waits for")
    require(bool((owner <= TREE).all()), "I2", "pages held while idle")
    unlocked = life.cache.total_pages == life.cache.evictable_pages
    require(unlocked, "I2", "cached pages locked while idle")
    require(len(life.table.free_rows) == life.table.max_rows, "I2", "rows missing while idle")
