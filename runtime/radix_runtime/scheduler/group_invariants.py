"""Invariants of cached state beside the full pages (I11) and of the host tier (I12)."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from ..errors import require
from ..memory.row_snapshots import RowSnapshots
from ..memory.window_pages import WindowPages
from .batch_builder import Step
from .lifecycle import Lifecycle
from .request import Request, State


def resident(life: Lifecycle) -> list[Request]:
    """Requests that hold a row."""
    return life.running + life.draining


def check_groups(life: Lifecycle, in_flight: Iterable[Step]) -> None:
    """Raises InvariantViolation unless every handle is where it belongs."""
    if not life.groups:
        return
    nodes = set(life.cache.nodes())
    for group in life.groups:
        group.pool.check(nodes, group.private())
        for node in nodes:
            handles = node.handles[group.pool.index]
            used = group.pool.uses[handles[handles >= 0]] > 0
            require(node.lock_count > 0 or not used.any(), "I11", "an unlocked node's page is used")
    reads_from = _first_tokens_read(life, in_flight)
    for window in life.windows:
        _check_window(window, life, reads_from)
    for group in life.snapshots:
        _check_snapshots(group, life, in_flight)


def _first_tokens_read(life: Lifecycle, in_flight: Iterable[Step]) -> dict[Request, int]:
    """The lowest position of a token of each running request that a step in flight, or the next
    one, runs."""
    first = {}
    for request in life.running:
        first[request] = request.computed_len
        if request.state is State.DECODE:
            first[request] = request.num_ids - 1
    for step in in_flight:
        for entry in step.chunks:
            if entry.request in first:
                first[entry.request] = min(first[entry.request], entry.start)
    return first


def _check_window(window: WindowPages, life: Lifecycle, reads_from: dict[Request, int]) -> None:
    uses: Counter[int] = Counter()
    rows = set()
    for request in resident(life):
        rows.add(request.row)
        end = int(window.end[request.row])
        require(end == request.num_pages, "I11", f"{request.rid}: window and full pages differ")
        held = window.pages_of(request.row).tolist()
        uses.update(page for page in held if window.pool.in_tree(page))
        if request in reads_from:
            first = window.first_page(reads_from[request])
            covered = window.first[request.row] <= first
            require(bool(covered), "I11", f"{request.rid}: a page of its window was given back")
    expected = np.zeros(len(window.pool.uses), np.int32)
    for page, count in uses.items():
        expected[page] = count
    in_tree = [window.pool.in_tree(page) for page in range(len(expected))]
    same = np.array_equal(window.pool.uses[in_tree], expected[in_tree])
    require(same, "I11", "pages of the tree are not counted by the rows that use them")
    for row in set(range(life.table.max_rows)) - rows:
        require(window.held(row) == 0, "I11", f"row {row} is free and holds pages")


def _check_snapshots(group: RowSnapshots, life: Lifecycle, in_flight: Iterable[Step]) -> None:
    planned = {
        copy.slot
        for step in in_flight
        for copy in step.plan.snapshots
        if copy.group == group.pool.index + 1
    }
    rows = {request.row for request in resident(life)}
    require(group.rows() == rows, "I11", "snapshots of a row that is free")
    require(group.planned == planned, "I11", "awaited snapshots are not those of steps in flight")


def check_host(life: Lifecycle) -> None:
    """Raises InvariantViolation unless pages, nodes and marks of the host tier agree."""
    nodes = {node for node in life.cache.nodes() if node.on_host}
    if life.host is None:
        require(not nodes, "I12", "a node is on a host that is not there")
        return
    require(nodes == set(life.host.nodes), "I12", "nodes on the host are not those of the tree")
    for node in nodes:
        require(node.lock_count == 0, "I12", "a locked node is on the host")
    free = life.host.allocator.free_pages()
    pages = np.concatenate([free, *[node.pages for node in nodes]])
    whole = np.array_equal(np.sort(pages), np.arange(life.host.allocator.num_pages))
    require(whole, "I12", "a page of the host has no or two owners")
    require(life.host.num_waiting == 0, "I12", "a copy was left out of the plan")
