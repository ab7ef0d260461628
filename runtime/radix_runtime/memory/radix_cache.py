"""The radix tree over token ids that owns every shared KV page.

A node holds a run of whole pages: `key` int32 [n * page_size] and `pages` int32 [n]. Siblings
differ in their first page, which is also their key in the parent. `extra_key` (a tenant, an
adapter) enters the key of the first page only, so one root serves all of them.

A lock on a node holds the whole path to the root. An unlocked node therefore has no locked
descendant, and every page of every unlocked node can be evicted, leaf by leaf. Splits keep the
identity of the lower part, so a lock survives them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import InvariantViolation
from .page_allocator import PageAllocator


class Node:
    __slots__ = (  # noqa: RUF023
        "parent", "edge", "key", "pages", "children",
        "lock_count", "last_use", "hits", "created", "queued",
    )  # fmt: skip

    def __init__(self, parent: Node | None, edge: Hashable, key: np.ndarray, pages: np.ndarray, now: int) -> None:
        self.parent = parent
        self.edge = edge  # key in parent.children
        self.key = key
        self.pages = pages
        self.children: dict[Hashable, Node] = {}
        self.lock_count = 0
        self.last_use = now
        self.hits = 0
        self.created = now
        self.queued = False  # has an entry in the leaf heap


@dataclass(slots=True, frozen=True)
class Match:
    """`length` tokens are cached in `pages`; `node` ends exactly there (lock it to keep them)."""

    length: int
    pages: np.ndarray
    node: Node


@dataclass(slots=True, frozen=True)
class Insert:
    """`length` tokens now lie in the tree in `canonical_pages`; `node` ends there.
    `duplicate_pages` stay with the caller, who points its row at the canonical ones, then frees
    the duplicates."""

    length: int
    node: Node
    canonical_pages: np.ndarray
    duplicate_pages: np.ndarray


_PRIORITY: dict[str, Callable[[Node], tuple[int, ...]]] = {
    "lru": lambda node: (node.last_use,),
    "lfu": lambda node: (node.hits, node.last_use),
    "fifo": lambda node: (node.created,),
}
_NO_IDS = np.zeros(0, np.int32)


class RadixCache:
    """Longest-prefix cache of whole pages; `enabled=False` shares nothing and owns nothing."""

    def __init__(
        self, allocator: PageAllocator, page_size: int, *, eviction: str = "lru", enabled: bool = True
    ) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.enabled = enabled
        self.root = Node(None, None, _NO_IDS, _NO_IDS, 0)
        self.total_pages = 0
        self.evictable_pages = 0
        self.num_nodes = 0
        self.version = 0  # changes whenever a match could come out longer or shorter
        self.evicted_pages_total = 0
        self.lookups_total = 0
        self.hits_total = 0
        self._priority = _PRIORITY[eviction]
        self._now = 0  # logical clock
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._entries = 0

    # Reading ------------------------------------------------------------------------------

    def edge(self, node: Node, ids: np.ndarray, at: int, extra_key: str | None) -> Hashable:
        """The key under which the page `ids[at : at + page_size]` would hang from `node`."""
        page = ids[at : at + self.page_size].tobytes()
        return (extra_key, page) if node is self.root else page

    def match(self, ids: np.ndarray, extra_key: str | None = None) -> Match:
        """The longest cached prefix of `ids` (int32), in whole pages. Splits a node in which the
        match ends; counts as no use until it is locked."""
        node, length, parts, child, common = self._walk(ids, extra_key)
        if child is not None:
            node = self._split(child, common)
        pages = np.concatenate(parts) if parts else _NO_IDS
        return Match(length, pages, node)

    def match_length(self, ids: np.ndarray, extra_key: str | None = None) -> int:
        """Tokens that `match` would find; leaves the tree as it is."""
        return self._walk(ids, extra_key)[1]

    def _walk(self, ids: np.ndarray, extra_key: str | None) -> tuple[Node, int, list[np.ndarray], Node | None, int]:
        """(deepest node matched whole, tokens matched in all, their pages, child that matched in
        part or None, pages matched of it)."""
        node, at, size = self.root, 0, self.page_size
        parts: list[np.ndarray] = []
        while at + size <= len(ids) and node.children:
            child = node.children.get(self.edge(node, ids, at, extra_key))
            if child is None:
                break
            common = _common_prefix(child.key, ids[at : at + len(child.key)]) // size
            at += common * size
            if common < len(child.pages):
                parts.append(child.pages[:common])
                return node, at, parts, child, common
            parts.append(child.pages)
            node = child
        return node, at, parts, None, 0

    # Owning -------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keeps the path from the root to `node` in the cache."""
        self._now += 1
        at: Node | None = node
        while at is not None and at is not self.root:
            if at.lock_count == 0:
                self.evictable_pages -= len(at.pages)
            at.lock_count += 1
            at.last_use = self._now
            at = at.parent

    def unlock(self, node: Node) -> None:
        self._now += 1
        at: Node | None = node
        while at is not None and at is not self.root:
            if at.lock_count == 0:
                raise InvariantViolation("I3", "a cache node was unlocked more often than locked")
            at.lock_count -= 1
            at.last_use = self._now
            if at.lock_count == 0:
                self.evictable_pages += len(at.pages)
                self._queue(at)
            at = at.parent

    def record_use(self, node: Node) -> None:
        """Counts one request that looked its prefix up and ended at `node`."""
        self.lookups_total += 1
        self.hits_total += node is not self.root
        at: Node | None = node
        while at is not None and at is not self.root:
            at.hits += 1
            at = at.parent

    def insert(self, ids: np.ndarray, pages: np.ndarray, extra_key: str | None = None) -> Insert:
        """Gives `pages` (KV of the whole pages of `ids`) to the tree, less those it has already."""
        if not self.enabled:
            return Insert(0, self.root, _NO_IDS, _NO_IDS)
        if len(ids) != len(pages) * self.page_size:
            raise ValueError(f"{len(ids)} tokens do not fill {len(pages)} pages")
        node, length, parts, child, common = self._walk(ids, extra_key)
        if child is not None:
            node = self._split(child, common)
        known = length // self.page_size
        canonical = np.concatenate([*parts, pages[known:]]).astype(np.int32, copy=False)
        duplicates = pages[:known][pages[:known] != canonical[:known]].copy()
        if known < len(pages):
            edge = self.edge(node, ids, length, extra_key)
            self._now += 1
            leaf = Node(node, edge, ids[length:].copy(), pages[known:].copy(), self._now)
            node.children[edge] = leaf
            self.num_nodes += 1
            self.total_pages += len(leaf.pages)
            self.evictable_pages += len(leaf.pages)
            self.version += 1
            self._queue(leaf)
            node = leaf
        return Insert(len(ids), node, canonical, duplicates)

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cuts `node` after `num_pages` pages; the new upper part is returned."""
        parent, cut = node.parent, num_pages * self.page_size
        assert parent is not None
        upper = Node(parent, node.edge, node.key[:cut], node.pages[:num_pages], node.created)
        upper.lock_count, upper.last_use, upper.hits = node.lock_count, node.last_use, node.hits
        parent.children[node.edge] = upper
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[num_pages:]
        node.edge = self.edge(upper, node.key, 0, None)
        upper.children[node.edge] = node
        self.num_nodes += 1
        return upper

    # Giving back --------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Frees pages of unlocked leaves until `num_pages` are free or nothing is left to evict;
        the last leaf only loses its tail. Returns the number freed."""
        freed = 0
        while freed < num_pages and self._heap:
            priority, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not self._is_evictable(node):
                continue  # it is queued again when it becomes an unlocked leaf
            if priority != self._priority(node):
                self._queue(node)  # used since it was queued
                continue
            freed += self._cut(node, num_pages - freed)
        self.evicted_pages_total += freed
        return freed

    def prune(self, node: Node) -> int:
        """Drops `node` and its ancestors as far as they are unlocked and have no other child:
        for KV that turned out to be bad. Returns the number of pages freed."""
        freed = 0
        while self._is_evictable(node):
            assert node.parent is not None
            freed, node, gone = freed + len(node.pages), node.parent, node
            self._cut(gone, len(gone.pages))
        return freed

    def reset(self) -> None:
        """Frees everything. Raises RuntimeError while a node is locked."""
        if self.evictable_pages != self.total_pages:
            raise RuntimeError("the cache is in use")
        self.evict(self.total_pages)
        self._heap.clear()

    def _is_evictable(self, node: Node) -> bool:
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
            leaf.pages, leaf.key = leaf.pages[:keep], leaf.key[: keep * self.page_size]
            self._queue(leaf)
        else:
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.edge]
            leaf.parent = None
            self.num_nodes -= 1
            self._queue(parent)
        return len(gone)

    def _queue(self, node: Node) -> None:
        if not node.queued and self._is_evictable(node):
            node.queued = True
            self._entries += 1
            heapq.heappush(self._heap, (self._priority(node), self._entries, node))

    # Looking after itself -----------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def stats(self) -> dict[str, float]:
        return {
            "cache_pages": self.total_pages,
            "cache_evictable_pages": self.evictable_pages,
            "cache_nodes": self.num_nodes,
            "cache_lookups_total": self.lookups_total,
            "cache_hits_total": self.hits_total,
            "evicted_pages_total": self.evicted_pages_total,
        }

    def check(self) -> None:
        """Recounts everything that is kept as a counter or an invariant (I3). O(pages)."""
        total = evictable = count = 0
        queued = {id(node) for _, _, node in self._heap}
        for node in self.nodes():
            count += 1
            total += len(node.pages)
            evictable += len(node.pages) * (node.lock_count == 0)
            self._check_node(node)
            _require(node.queued == (id(node) in queued), "leaf heap and its marks differ")
            if self._is_evictable(node):
                _require(node.queued, "an unlocked leaf is missing from the heap")
        _require(total == self.total_pages, f"{total} pages, counted {self.total_pages}")
        _require(evictable == self.evictable_pages, "count of evictable pages is off")
        _require(count == self.num_nodes, "count of nodes is off")
        _require(len(queued) == len(self._heap), "a node is in the heap twice")

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            raise InvariantViolation("I3", "a node in the tree has no parent")
        _require(parent.children.get(node.edge) is node, "parent and child disagree")
        _require(len(node.pages) > 0, "a node without pages")
        _require(len(node.key) == len(node.pages) * self.page_size, "key and pages differ in length")
        extra_key = node.edge[0] if parent is self.root else None  # type: ignore[index]
        _require(self.edge(parent, node.key, 0, extra_key) == node.edge, "edge is not the first page")
        if parent is not self.root:
            _require(parent.lock_count >= node.lock_count, "a child is locked more than its parent")


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _require(condition: bool, detail: str) -> None:
    if not condition:
        raise InvariantViolation("I3", detail)
