"""The radix tree over token ids that owns every shared KV page.

A node holds a run of whole pages: `key` int32 [n * page_size] and `pages` int32 [n]. Siblings
differ in their first page, which is also their key in the parent. `extra_key` (a tenant, an
adapter) enters the key of the first page only, so one root serves all of them."""

# A lock on a node holds the whole path to the root. An unlocked node therefore has no locked
# descendant, and every page of every unlocked node can be evicted, leaf by leaf. Splits keep the
# identity of the lower part, and so its locks.

import heapq
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ..errors import require
from .page_allocator import PageAllocator


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of whole pages below `parent`. `created` and `last_use` are times of the cache's
    logical clock; `lock_count` is the number of requests whose prefix passes through."""

    parent: "Node | None"  # None: the root, or cut off
    edge: Hashable  # key in parent.children
    key: np.ndarray  # int32 [n * page_size]
    pages: np.ndarray  # int32 [n]
    created: int = 0
    last_use: int = 0
    hits: int = 0
    lock_count: int = 0
    queued: bool = False  # has an entry in the leaf heap
    children: dict[Hashable, "Node"] = field(default_factory=dict)

    def path(self) -> Iterator["Node"]:
        """This node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Match(NamedTuple):
    """`length` tokens are cached in `pages`; `node` ends exactly there (lock it to keep them)."""

    length: int
    pages: np.ndarray
    node: Node


_PRIORITY = {
    "lru": attrgetter("last_use"),
    "lfu": attrgetter("hits", "last_use"),
    "fifo": attrgetter("created"),
}
_NONE = np.zeros(0, np.int32)


class RadixCache:
    """Longest-prefix cache of whole pages; `enabled=False` shares nothing and owns nothing.

    `total_pages` are in the tree, `evictable_pages` of them in no request's prefix. `version`
    changes whenever a match could come out longer or shorter."""

    def __init__(
        self, allocator: PageAllocator, *, eviction: str = "lru", enabled: bool = True
    ) -> None:
        self.allocator = allocator
        self.page_size = allocator.page_size
        self.enabled = enabled
        self.root = Node(parent=None, edge=None, key=_NONE, pages=_NONE)
        self.total_pages = 0
        self.evictable_pages = 0
        self.num_nodes = 0
        self.version = 0
        self.evicted_pages_total = 0
        self.lookups_total = 0
        self.hits_total = 0
        self._priority = _PRIORITY[eviction]
        self._now = 0  # logical clock
        self._heap: list[tuple[Any, int, Node]] = []

    # Reading ------------------------------------------------------------------------------

    def edge(self, node: Node, ids: np.ndarray, at: int, extra_key: str | None) -> Hashable:
        """The key under which the page `ids[at : at + page_size]` would hang from `node`."""
        page = ids[at : at + self.page_size].tobytes()
        return (extra_key, page) if node is self.root else page

    def match(self, ids: np.ndarray, extra_key: str | None = None) -> Match:
        """The longest cached prefix of `ids` (int32), in whole pages. Splits a node in which it
        ends; is no use yet."""
        node, parts, child = self._walk(ids, extra_key)
        if child is not None:
            node = self._split(child, len(parts[-1]))
        pages = np.concatenate([_NONE, *parts])
        return Match(length=len(pages) * self.page_size, pages=pages, node=node)

    def match_length(self, ids: np.ndarray, extra_key: str | None = None) -> int:
        """Tokens that `match` would find; leaves the tree as it is."""
        _, parts, _ = self._walk(ids, extra_key)
        return sum(len(pages) for pages in parts) * self.page_size

    def _walk(
        self, ids: np.ndarray, extra_key: str | None
    ) -> tuple[Node, list[np.ndarray], Node | None]:
        """(deepest node matched whole, pages of each node matched, child in which the match ends
        if it does)"""
        node = self.root
        at = 0
        parts: list[np.ndarray] = []
        while at + self.page_size <= len(ids):
            child = node.children.get(self.edge(node, ids, at, extra_key))
            if child is None:
                break
            part = ids[at : at + len(child.key)]
            differs = part != child.key[: len(part)]
            common = int(differs.argmax()) if differs.any() else len(part)
            pages = common // self.page_size
            parts.append(child.pages[:pages])
            if pages < len(child.pages):
                return node, parts, child
            at += len(child.key)
            node = child
        return node, parts, None

    # Owning -------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keeps the path from the root to `node` in the cache."""
        self._now += 1
        for at in node.path():
            if at.lock_count == 0:
                self.evictable_pages -= len(at.pages)
            at.lock_count += 1
            at.last_use = self._now

    def unlock(self, node: Node) -> None:
        """Takes one lock back. Raises InvariantViolation (I3) if there is none."""
        self._now += 1
        for at in node.path():
            require(at.lock_count > 0, "I3", "a cache node was unlocked more often than locked")
            at.lock_count -= 1
            at.last_use = self._now
            if at.lock_count == 0:
                self.evictable_pages += len(at.pages)
                self._queue(at)

    def record_use(self, node: Node) -> None:
        """Counts one request that looked its prefix up and ended at `node`."""
        self.lookups_total += 1
        if node is not self.root:
            self.hits_total += 1
        for at in node.path():
            at.hits += 1

    def insert(
        self, ids: np.ndarray, pages: np.ndarray, extra_key: str | None = None
    ) -> tuple[Match, np.ndarray]:
        """The tree takes the `pages` of `ids` that it lacks. What is cached now, and the duplicates
        to free."""
        if not self.enabled:
            return Match(length=0, pages=_NONE, node=self.root), _NONE
        filled = len(ids) == len(pages) * self.page_size
        require(filled, "I3", f"{len(ids)} tokens do not fill {len(pages)} pages")
        known = self.match(ids, extra_key)
        own = pages[: len(known.pages)]
        duplicates = own[own != known.pages]
        new = pages[len(known.pages) :].copy()
        if not len(new):
            return known, duplicates
        leaf = self._add_leaf(known.node, ids, known.length, new, extra_key)
        cached = np.concatenate([known.pages, new])
        return Match(length=len(ids), pages=cached, node=leaf), duplicates

    def _add_leaf(
        self, parent: Node, ids: np.ndarray, start: int, pages: np.ndarray, extra_key: str | None
    ) -> Node:
        """Hangs `ids[start:]` with their pages from `parent`."""
        self._now += 1
        leaf = Node(
            parent=parent,
            edge=self.edge(parent, ids, start, extra_key),
            key=ids[start:].copy(),
            pages=pages,
            created=self._now,
            last_use=self._now,
        )
        parent.children[leaf.edge] = leaf
        self.num_nodes += 1
        self.total_pages += len(pages)
        self.evictable_pages += len(pages)
        self.version += 1
        self._queue(leaf)
        return leaf

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cuts `node` after `num_pages` pages; the new upper part is returned."""
        parent = node.parent
        assert parent is not None
        cut = num_pages * self.page_size
        upper = Node(
            parent=parent,
            edge=node.edge,
            key=node.key[:cut],
            pages=node.pages[:num_pages],
            created=node.created,
            last_use=node.last_use,
            hits=node.hits,
            lock_count=node.lock_count,
        )
        parent.children[node.edge] = upper
        node.parent = upper
        node.key = node.key[cut:]
        node.pages = node.pages[num_pages:]
        node.edge = self.edge(upper, node.key, 0, None)
        upper.children[node.edge] = node
        self.num_nodes += 1
        return upper

    # Giving back --------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Frees `num_pages` pages, or all that are not locked, leaf by leaf from the end. Returns
        the number freed."""
        freed = 0
        while freed < num_pages and self._heap:
            priority, _, node = heapq.heappop(self._heap)
            node.queued = False
            if priority != self._priority(node):
                self._queue(node)  # used since it was queued
            elif self._is_evictable(node):  # or it is queued again when it becomes an unlocked leaf
                freed += self._cut(node, num_pages - freed)
        self.evicted_pages_total += freed
        return freed

    def prune(self, node: Node) -> int:
        """Drops bad KV: `node` and the ancestors that nobody else has locked or continues. Returns
        pages freed."""
        bad = itertools.takewhile(self._is_evictable, list(node.path()))
        return sum(self._cut(at, len(at.pages)) for at in bad)

    def reset(self) -> None:
        """Frees everything. Raises RuntimeError while a node is locked."""
        if self.evictable_pages != self.total_pages:
            raise RuntimeError("the cache is in use")
        self.evict(self.total_pages)
        self._heap.clear()

    @staticmethod
    def _is_evictable(node: Node) -> bool:
        # A node that was cut off has no parent; neither has the root.
        return node.parent is not None and not node.children and node.lock_count == 0

    def _cut(self, leaf: Node, num_pages: int) -> int:
        """Frees up to `num_pages` pages from the end of an unlocked leaf."""
        keep = max(0, len(leaf.pages) - num_pages)
        gone = leaf.pages[keep:]
        self.allocator.free(gone)
        self.total_pages -= len(gone)
        self.evictable_pages -= len(gone)
        self.version += 1
        if keep:
            leaf.pages = leaf.pages[:keep]
            leaf.key = leaf.key[: keep * self.page_size]
            self._queue(leaf)
        else:
            parent = leaf.parent
            leaf.parent = None
            assert parent is not None
            del parent.children[leaf.edge]
            self.num_nodes -= 1
            self._queue(parent)
        return len(gone)

    def _queue(self, node: Node) -> None:
        if not node.queued and self._is_evictable(node):
            node.queued = True
            self._now += 1  # a number that no other entry has
            heapq.heappush(self._heap, (self._priority(node), self._now, node))

    # Looking after itself -----------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Recounts everything that is kept as a counter or an invariant (I3). O(pages)."""
        nodes = set(self.nodes())
        for node in nodes:
            self._check_node(node)
        counts = (
            sum(len(node.pages) for node in nodes),
            sum(len(node.pages) for node in nodes if node.lock_count == 0),
            len(nodes),
        )
        kept = (self.total_pages, self.evictable_pages, self.num_nodes)
        require(counts == kept, "I3", f"counters {kept} are not {counts}")
        queued = [node for _, _, node in self._heap]
        require(len(queued) == len(set(queued)), "I3", "a node is in the heap twice")
        marked = {node for node in nodes if node.queued}
        require(marked == nodes & set(queued), "I3", "heap and its marks differ")

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        require(parent.children.get(node.edge) is node, "I3", "parent and child disagree")
        filled = 0 < len(node.pages) * self.page_size == len(node.key)
        require(filled, "I3", "key and pages differ in length")
        extra_key = node.edge[0] if parent is self.root else None  # type: ignore[index]
        edge = self.edge(parent, node.key, 0, extra_key)
        require(edge == node.edge, "I3", "edge is not the first page")
        locked = parent is self.root or parent.lock_count >= node.lock_count
        require(locked, "I3", "a child is locked more than its parent")
        found = node.queued or not self._is_evictable(node)
        require(found, "I3", "an unlocked leaf is missing from the heap")
