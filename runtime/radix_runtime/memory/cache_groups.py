"""Cached state beside the full pages: what a row holds of each group, and what the tree keeps.

A *handle* is a page of a window group or a slot of a snapshot group. The tree has at most one a
page and group (`Node.handles`); a row's own are known by the row's number. A cached prefix can be
used up to a page border where every group has what it needs (`usable`)."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from ..cache_spec import FullPagesSpec, GroupSpec, RowSnapshotsSpec, WindowPagesSpec
from ..errors import require
from .page_allocator import PageAllocator
from .radix_node import Node, Part, handles_of
from .request_table import RequestTable


class HandlePool:
    """Handles 0 .. num_handles-1 of group `index`: each is free, private to a row, or in the tree.

    A handle in the tree is used by a number of rows. Those that nobody uses are evicted, least
    recently used first, when free ones run out; the node stays."""

    def __init__(self, index: int, num_handles: int) -> None:
        self.index = index
        self.allocator = PageAllocator(num_handles, page_size=1)
        self.evictions = 0
        self.uses = np.zeros(num_handles, np.int32)
        self._node: dict[int, Node] = {}  # of each handle in the tree
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Handles that `take` can give."""
        return self.allocator.num_free + len(self._unused)

    def in_tree(self, handle: int) -> bool:
        return handle in self._node

    def take(self, count: int) -> np.ndarray:
        """int32 [count], private to the caller; evicts as needed. Raises InvariantViolation (I8)
        if there are not so many."""
        while self.allocator.num_free < count and self._unused:
            handle, _ = self._unused.popitem(last=False)
            handles = self._node.pop(handle).handles[self.index]
            handles[handles == handle] = -1
            self.allocator.free(np.array([handle]))
            self.evictions += 1
        return self.allocator.alloc(count)

    def enter(self, handle: int, node: Node, offset: int, uses: int) -> None:
        """A private handle becomes the tree's, at page `offset` of `node`."""
        node.handles[self.index][offset] = handle
        self._node[handle] = node
        self.uses[handle] = uses
        if uses == 0:
            self._unused[handle] = None

    def use(self, handles: np.ndarray) -> None:
        """One row more uses these handles of the tree."""
        for handle in handles.tolist():
            self.uses[handle] += 1
            self._unused.pop(handle, None)

    def touch(self, handle: int) -> None:
        """An unused handle of the tree was useful: it is the last one to go."""
        if handle in self._unused:
            self._unused.move_to_end(handle)

    def release(self, handles: np.ndarray) -> None:
        """A row is done with them: private ones are free, others stay in the tree."""
        for handle in handles.tolist():
            if handle not in self._node:
                self.allocator.free(np.array([handle]))
                continue
            require(self.uses[handle] > 0, "I11", f"handle {handle} was released too often")
            self.uses[handle] -= 1
            if self.uses[handle] == 0:
                self._unused[handle] = None

    def split(self, upper: Node) -> None:
        """`upper` has taken the first pages of a node, and their handles."""
        for handle in upper.handles[self.index].tolist():
            if handle >= 0:
                self._node[handle] = upper

    def forget(self, handles: np.ndarray) -> None:
        """The tree loses the pages of `handles` (-1: none), which nobody uses."""
        for handle in handles[handles >= 0].tolist():
            require(self.uses[handle] == 0, "I11", f"handle {handle} of a cut node is in use")
            del self._node[handle]
            del self._unused[handle]
            self.allocator.free(np.array([handle]))

    def check(self, nodes: set[Node], private: np.ndarray) -> None:
        """Raises InvariantViolation (I11) unless each handle is free, one of `private`, or once in
        the tree."""
        hung = [node.handles[self.index] for node in nodes]
        in_tree = np.concatenate([np.zeros(0, np.int32), *hung])
        in_tree = in_tree[in_tree >= 0]
        everything = np.concatenate([in_tree, private, self.allocator.free_pages()])
        whole = np.array_equal(np.sort(everything), np.arange(self.allocator.num_pages))
        require(whole, "I11", "a handle has no or two owners")
        for node in nodes:
            for handle in node.handles[self.index].tolist():
                known = handle < 0 or self._node.get(handle) is node
                require(known, "I11", f"handle {handle} hangs from another node")
        require(len(in_tree) == len(self._node), "I11", "a handle is known that the tree lacks")
        unused = {handle for handle in in_tree.tolist() if self.uses[handle] == 0}
        require(unused == set(self._unused), "I11", "unused handles are not those that can go")


class CacheGroup(Protocol):
    """State of one group for every row, and its share of the tree.

    A row lives from `admit` to `release`; `share` and `trim` come after each of its steps."""

    pool: HandlePool

    def usable(self, handles: np.ndarray) -> np.ndarray:
        """bool [n + 1]: whether a prefix of i pages whose handles are `handles[:i]` (int32 [n]) has
        all that the group needs of it."""

    def admit(self, row: int, handles: np.ndarray) -> None:
        """The row starts on a cached prefix, whose pages have `handles`."""

    def share(self, row: int, node: Node, num_pages: int) -> None:
        """What the row has of its first `num_pages` pages and the tree lacks becomes the tree's;
        `node` ends with them."""

    def trim(self, row: int, committed: int) -> None:
        """Gives back what no step needs any more once `committed` tokens have been computed."""

    def release(self, row: int) -> None:
        """Gives back everything of the row."""

    def private(self) -> np.ndarray:
        """int32: the handles of rows that are not the tree's. For checks."""


def usable_parts(parts: list[Part], groups: Sequence[CacheGroup]) -> list[Part]:
    """A prefix up to its last page border where every group has what it needs."""
    if not groups:
        return parts
    usable = np.ones(1 + sum(pages for _, pages in parts), bool)
    for group, handles in zip(groups, handles_of(parts, len(groups)), strict=True):
        usable &= group.usable(handles)
    left = int(np.flatnonzero(usable)[-1])
    kept = []
    for node, pages in parts:
        if left > 0:
            kept.append((node, min(pages, left)))
        left -= pages
    return kept


def pages_before(node: Node, num_pages: int) -> Iterator[tuple[int, Node, int]]:
    """(page of the prefix, node, page within the node), from the last page of a prefix of
    `num_pages` pages, which `node` ends, to the first."""
    page = num_pages
    for part in node.path():
        for offset in range(len(part.pages) - 1, -1, -1):
            page -= 1
            yield page, part, offset


class WindowPages:
    """Pages of the last `window` tokens of each row. A row's pages before `first` are given back;
    its other entries up to `end` are in `table`."""

    def __init__(
        self,
        spec: WindowPagesSpec,
        index: int,
        *,
        page_size: int,
        max_rows: int,
        max_pages: int,
        max_samples: int,
    ) -> None:
        """Raises ValueError for a pool that cannot hold one row's window and its next tokens."""
        self.window = spec.window
        self.page_size = page_size
        self.pool = HandlePool(index, spec.num_pages)
        # Pages that a row's window and its next tokens touch at most: a chunk of four tokens is
        # the shortest that can always be made.
        self.span = -(-(spec.window - 1 + max(4, max_samples)) // page_size) + 1
        if spec.window < 1 or spec.num_pages < min(self.span, max_pages):
            raise ValueError(
                f"a window of {spec.window} tokens needs {self.span} pages, got {spec.num_pages}"
            )
        self.table = RequestTable(max_rows, max_pages)
        self.first = np.zeros(max_rows, np.int64)
        self.end = np.zeros(max_rows, np.int64)

    def first_page(self, committed: int) -> int:
        """The first page that the token at position `committed` looks at."""
        return max(0, committed - self.window + 1) // self.page_size

    def held(self, row: int) -> int:
        """Pages that the row holds."""
        return int(self.end[row] - self.first[row])

    def usable(self, handles: np.ndarray) -> np.ndarray:
        ends = np.arange(len(handles) + 1)
        firsts = np.maximum(0, ends * self.page_size - self.window + 1) // self.page_size
        missing = np.concatenate([[0], np.cumsum(handles < 0)])
        return missing[ends] == missing[firsts]

    def prefix(self, handles: np.ndarray) -> np.ndarray:
        """Those of a cached prefix that a row needs which starts there."""
        return handles[self.first_page(len(handles) * self.page_size) :]

    def admit(self, row: int, handles: np.ndarray) -> None:
        used = self.prefix(handles)
        self.pool.use(used)
        self.end[row] = len(handles)
        self.first[row] = len(handles) - len(used)
        if len(used):
            self.table.assign(row, int(self.first[row]), used)

    def extend(self, row: int, pages: np.ndarray) -> None:
        """The row's next pages."""
        self.table.assign(row, int(self.end[row]), pages)
        self.end[row] += len(pages)

    def share(self, row: int, node: Node, num_pages: int) -> None:
        own = self.table.pages(row, int(self.end[row]))
        for page, part, offset in pages_before(node, num_pages):
            if page < self.first[row]:
                return
            handle = int(own[page])
            if part.handles[self.pool.index][offset] < 0 and not self.pool.in_tree(handle):
                self.pool.enter(handle, part, offset, uses=1)

    def trim(self, row: int, committed: int) -> None:
        first = self.first_page(committed)
        if first > self.first[row]:
            self.pool.release(self.table.pages(row, first)[self.first[row] :])
            self.first[row] = first

    def release(self, row: int) -> None:
        self.pool.release(self.pages_of(row))
        self.table.forget_changes(row)
        self.first[row] = 0
        self.end[row] = 0

    def pages_of(self, row: int) -> np.ndarray:
        """int32 [held]: the pages of the row, in order."""
        return self.table.pages(row, int(self.end[row]))[self.first[row] :]

    def private(self) -> np.ndarray:
        rows = [self.pages_of(row) for row in range(self.table.max_rows)]
        pages = np.concatenate([np.zeros(0, np.int32), *rows])
        return np.array([p for p in pages.tolist() if not self.pool.in_tree(p)], np.int32)


class RowSnapshots:
    """Snapshots of a state a row. The state itself lies at the row's number and needs no handle.

    A snapshot is optional: where no slot can be had none is taken. Of a row's own ones the newest
    is kept until it enters the tree."""

    def __init__(self, spec: RowSnapshotsSpec, index: int, *, page_size: int) -> None:
        self.page_size = page_size
        self.pool = HandlePool(index, spec.num_slots)
        self._own: dict[int, dict[int, int]] = {}  # row -> position -> slot
        self.planned: set[int] = set()  # slots that steps in flight write
        self._restores: list[tuple[int, int, int]] = []  # (row, slot, position)

    def usable(self, handles: np.ndarray) -> np.ndarray:
        return np.concatenate([[True], handles >= 0])

    def admit(self, row: int, handles: np.ndarray) -> None:
        self._own[row] = {}
        if len(handles):
            slot = int(handles[-1])
            self.pool.touch(slot)
            self._restores.append((row, slot, len(handles) * self.page_size))

    def take_restores(self) -> list[tuple[int, int, int]]:
        """(row, slot, position) of the rows that start from a snapshot, since the last call."""
        restores = self._restores
        self._restores = []
        return restores

    def rows(self) -> set[int]:
        """Rows between `admit` and `release`."""
        return set(self._own)

    def plan(self) -> int | None:
        """A slot for a snapshot of the step that is being built, if there is one; `settle` it."""
        if self.pool.available == 0:
            return None
        slot = int(self.pool.take(1)[0])
        self.planned.add(slot)
        return slot

    def settle(self, row: int, position: int, slot: int, taken: bool) -> None:
        """The step of a planned snapshot has completed. `taken`: it holds the row's state after
        `position` tokens, and somebody still wants it."""
        self.planned.remove(slot)
        own = self._own.get(row)
        if not taken or own is None or position in own:
            self.pool.release(np.array([slot]))
            return
        own[position] = slot

    def share(self, row: int, node: Node, num_pages: int) -> None:
        own = self._own[row]
        wanted = [position for position in own if position <= num_pages * self.page_size]
        if not wanted:
            return
        earliest = min(wanted) // self.page_size
        for page, part, offset in pages_before(node, num_pages):
            if page + 1 < earliest:
                return
            slot = own.get((page + 1) * self.page_size)
            if slot is not None and part.handles[self.pool.index][offset] < 0:
                del own[(page + 1) * self.page_size]
                self.pool.enter(slot, part, offset, uses=0)

    def trim(self, row: int, committed: int) -> None:
        own = self._own[row]
        for position in sorted(own)[:-1]:
            self.pool.release(np.array([own.pop(position)]))

    def release(self, row: int) -> None:
        self.pool.release(np.array(list(self._own.pop(row).values()), np.int32))

    def private(self) -> np.ndarray:
        own = [slot for slots in self._own.values() for slot in slots.values()]
        return np.array([*own, *self.planned], np.int32)


def make_groups(
    specs: tuple[GroupSpec, ...], *, page_size: int, max_rows: int, max_pages: int, max_samples: int
) -> list[WindowPages | RowSnapshots]:
    """The groups beside the full pages. `max_pages`: pages of a row. Raises ValueError unless full
    pages come first, and only there."""
    groups: list[WindowPages | RowSnapshots] = []
    if not specs or not isinstance(specs[0], FullPagesSpec):
        raise ValueError("the first cache group of a model are its full pages")
    for index, spec in enumerate(specs[1:]):
        match spec:
            case WindowPagesSpec():
                window = WindowPages(
                    spec,
                    index,
                    page_size=page_size,
                    max_rows=max_rows,
                    max_pages=max_pages,
                    max_samples=max_samples,
                )
                groups.append(window)
            case RowSnapshotsSpec():
                groups.append(RowSnapshots(spec, index, page_size=page_size))
            case FullPagesSpec():
                raise ValueError("a model has one group of full pages")
    return groups
