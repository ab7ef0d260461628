"""The radix tree over token ids that owns every shared KV page.

A node (`radix_node.py`) holds a run of whole pages. Siblings differ in their first page, which is
also their key in the parent. `extra_key` (a tenant, an adapter) enters the key of the first page
only, so one root serves all of them."""

# A lock on a node holds the whole path to the root. An unlocked node therefore has no locked
# descendant, and every page of every unlocked node can be evicted, leaf by leaf. Splits keep the
# identity of the lower part, and so its locks. With a host tier an evicted node may stay, with a
# copy of its pages there; a leaf is then a node without children on the device.

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from ..errors import require
from .cache_groups import CacheGroup, usable_parts
from .host_tier import HostTier
from .radix_node import Match, Node, Part, handles_of

_PRIORITY = {
    "lru": attrgetter("last_use"),
    "lfu": attrgetter("hits", "last_use"),
    "fifo": attrgetter("created"),
}
_NONE = np.zeros(0, np.int32)


class RadixCache:
    """Longest-prefix cache of whole pages; `enabled=False` shares nothing and owns nothing.

    `total_pages` of the device are in the tree, `evictable_pages` of them in no request's prefix.
    `groups` are the cache groups beside the full pages: a match ends where each of them has what it
    needs."""

    def __init__(
        self,
        page_size: int,
        *,
        eviction: str = "lru",
        enabled: bool = True,
        groups: Sequence[CacheGroup] = (),
        host: HostTier | None = None,
    ) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.groups = groups
        self.host = host
        self.root = Node(parent=None, edge=None, key=_NONE, pages=_NONE)
        self.total_pages = 0
        self.evictable_pages = 0
        self.num_nodes = 0
        self.evicted_pages_total = 0  # from the device, to the host too
        self.lookups_total = 0
        self.hits_total = 0
        self._changes = 0
        self._priority = _PRIORITY[eviction]
        self._now = 0  # logical clock
        self._heap: list[tuple[Any, int, Node]] = []

    # Reading ------------------------------------------------------------------------------

    def edge(self, node: Node, ids: np.ndarray, at: int, extra_key: Hashable) -> Hashable:
        """The key under which the page `ids[at : at + page_size]` would hang from `node`."""
        page = ids[at : at + self.page_size].tobytes()
        return (extra_key, page) if node is self.root else page

    @property
    def version(self) -> int:
        """Changes whenever a match could come out longer or shorter."""
        return self._changes + sum(group.pool.evictions for group in self.groups)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def queued(self) -> list[Node]:
        """The nodes in the heap, for checks."""
        return [node for _, _, node in self._heap]

    def match(self, ids: np.ndarray, extra_key: Hashable = None) -> Match:
        """The longest cached prefix of `ids` (int32), in whole pages, that can be used. Splits a
        node in which it ends; is no use yet."""
        return self._match_of(usable_parts(self._walk(ids, extra_key), self.groups))

    def match_length(self, ids: np.ndarray, extra_key: Hashable = None) -> int:
        """Tokens that `match` would find; leaves the tree as it is."""
        parts = usable_parts(self._walk(ids, extra_key), self.groups)
        return sum(pages for _, pages in parts) * self.page_size

    def _walk(self, ids: np.ndarray, extra_key: Hashable) -> list[Part]:
        """(node, pages of it that match) from the first below the root to the last."""
        node = self.root
        at = 0
        parts: list[Part] = []
        while at + self.page_size <= len(ids):
            child = node.children.get(self.edge(node, ids, at, extra_key))
            if child is None:
                break
            part = ids[at : at + len(child.key)]
            differs = part != child.key[: len(part)]
            common = int(differs.argmax()) if differs.any() else len(part)
            pages = common // self.page_size
            parts.append((child, pages))
            if pages < len(child.pages):
                break
            at += len(child.key)
            node = child
        return parts

    def _match_of(self, parts: list[Part]) -> Match:
        node = self.root
        if parts:
            node, pages = parts[-1]
            if pages < len(node.pages):
                node = self._split(node, pages)
                parts[-1] = (node, pages)
        on_device = [part.pages for part, _ in parts if not part.on_host]
        num_pages = sum(pages for _, pages in parts)
        return Match(
            length=num_pages * self.page_size,
            num_pages=num_pages,
            pages=np.concatenate([_NONE, *on_device]),
            node=node,
            handles=handles_of(parts, len(self.groups)),
        )

    # Owning -------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keeps the path from the root to `node` in the cache."""
        self._now += 1
        for at in node.path():
            if at.lock_count == 0 and not at.on_host:
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
            if at.lock_count == 0 and not at.on_host:
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
        self, ids: np.ndarray, pages: np.ndarray, extra_key: Hashable = None
    ) -> tuple[Match, np.ndarray]:
        """The tree takes the `pages` of `ids` that it lacks. What is cached now, and the duplicates
        to free."""
        if not self.enabled:
            return Match(length=0, num_pages=0, pages=_NONE, node=self.root), _NONE
        filled = len(ids) == len(pages) * self.page_size
        require(filled, "I3", f"{len(ids)} tokens do not fill {len(pages)} pages")
        parts = self._walk(ids, extra_key)
        known = self._match_of(parts)
        if len(known.pages) < known.num_pages:
            self._replace_on_host(parts, pages)
            known = self._match_of(parts)
        own = pages[: len(known.pages)]
        duplicates = own[own != known.pages]
        new = pages[len(known.pages) :].copy()
        if not len(new):
            return known, duplicates
        leaf = self._add_leaf(known.node, ids, known.length, new, extra_key)
        cached = np.concatenate([known.pages, new])
        match = Match(length=len(ids), num_pages=len(cached), pages=cached, node=leaf)
        return match, duplicates

    def _add_leaf(
        self, parent: Node, ids: np.ndarray, start: int, pages: np.ndarray, extra_key: Hashable
    ) -> Node:
        """Hangs `ids[start:]` with their pages from `parent`."""
        self._now += 1
        leaf = Node(
            parent=parent,
            edge=self.edge(parent, ids, start, extra_key),
            key=ids[start:].copy(),
            pages=pages,
            handles=tuple(np.full(len(pages), -1, np.int32) for _ in self.groups),
            created=self._now,
            last_use=self._now,
        )
        parent.children[leaf.edge] = leaf
        parent.num_device_children += 1
        self.num_nodes += 1
        self.total_pages += len(pages)
        self.evictable_pages += len(pages)
        self._changes += 1
        self._queue(leaf)
        return leaf

    def _replace_on_host(self, parts: list[Part], pages: np.ndarray) -> None:
        """Whoever computed a prefix again has its KV on the device: `pages`, one for each page of
        `parts`. Nodes on the host take them over."""
        assert self.host is not None
        start = 0
        for node, count in parts:
            if node.on_host:
                self.host.replace(node, pages[start : start + count].copy())
                self._arrived(node)
            start += count

    def load(self, node: Node, pages: np.ndarray) -> None:
        """A locked node comes back from the host to `pages` of the device, which become the
        tree's; the next step makes the copies."""
        assert self.host is not None
        self.host.load(node, pages)
        self._arrived(node)

    def _arrived(self, node: Node) -> None:
        """The node's pages have just become pages of the device."""
        assert node.parent is not None
        node.parent.num_device_children += 1
        self.total_pages += len(node.pages)
        if node.lock_count == 0:
            self.evictable_pages += len(node.pages)
        self._queue(node)

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
            handles=tuple(handles[:num_pages] for handles in node.handles),
            on_host=node.on_host,
            created=node.created,
            last_use=node.last_use,
            hits=node.hits,
            lock_count=node.lock_count,
        )
        parent.children[node.edge] = upper
        node.parent = upper
        node.key = node.key[cut:]
        node.pages = node.pages[num_pages:]
        node.handles = tuple(handles[num_pages:] for handles in node.handles)
        node.edge = self.edge(upper, node.key, 0, None)
        upper.children[node.edge] = node
        for group in self.groups:
            group.pool.split(upper)
        if node.on_host:
            assert self.host is not None
            self.host.split(upper)
        else:
            upper.num_device_children = 1
        self.num_nodes += 1
        return upper

    # Giving back --------------------------------------------------------------------------

    def evict(self, num_pages: int) -> np.ndarray:
        """Takes `num_pages` pages of the device out of the tree, or all that are not locked, leaf
        by leaf from the end. Returns them, int32 [<= num_pages]: they are the caller's."""
        victims = [_NONE]
        missing = num_pages
        while missing > 0 and self._heap:
            priority, _, node = heapq.heappop(self._heap)
            node.queued = False
            if priority != self._priority(node):
                self._queue(node)  # used since it was queued
            elif self.is_evictable(node):  # or it is queued again when it becomes an unlocked leaf
                victims.append(self._evict_from(node, missing))
                missing -= len(victims[-1])
        self.evicted_pages_total += num_pages - missing
        return np.concatenate(victims)

    def prune(self, node: Node) -> np.ndarray:
        """Drops bad KV: `node` and the ancestors that nobody else has locked or continues. Returns
        their pages, which are the caller's."""
        bad = itertools.takewhile(self.is_evictable, list(node.path()))
        return np.concatenate([_NONE, *[self._cut(part, len(part.pages)) for part in bad]])

    def reset(self) -> np.ndarray:
        """Forgets everything, and returns all pages: they are the caller's. Raises RuntimeError
        while a node is locked."""
        if self.evictable_pages != self.total_pages:
            raise RuntimeError("the cache is in use")
        pages = [_NONE]
        while self._heap:
            _, _, node = heapq.heappop(self._heap)
            node.queued = False
            if self.is_evictable(node):
                pages.append(self._cut(node, len(node.pages)))
        for node in list(self.root.children.values()):
            self._drop_from_host(node)
        return np.concatenate(pages)

    @staticmethod
    def is_evictable(node: Node) -> bool:
        """Whether pages of the device can be taken from the end of `node`."""
        # A node that was cut off has no parent; neither has the root.
        if node.parent is None or node.on_host:
            return False
        return node.lock_count == 0 and node.num_device_children == 0

    def _evict_from(self, leaf: Node, num_pages: int) -> np.ndarray:
        """Up to `num_pages` pages from the end of an unlocked leaf. They go to the host if it has
        room."""
        count = min(num_pages, len(leaf.pages))
        if self.host is None or not self._make_host_room(count):
            return self._cut(leaf, count)
        if count < len(leaf.pages):
            self._split(leaf, len(leaf.pages) - count)
        parent = leaf.parent
        assert parent is not None
        pages = leaf.pages
        self.host.store(leaf)
        parent.num_device_children -= 1
        self.total_pages -= count
        self.evictable_pages -= count
        self._queue(parent)
        return pages

    def _make_host_room(self, num_pages: int) -> bool:
        """Drops nodes from the host, the oldest first, until `num_pages` pages are free there."""
        assert self.host is not None
        free = self.host.allocator
        if num_pages > free.num_pages:
            return False
        for node in list(self.host.nodes):
            if free.num_free >= num_pages:
                break
            if not node.children and node.lock_count == 0:
                self._drop_from_host(node)
        return free.num_free >= num_pages

    def _drop_from_host(self, node: Node) -> None:
        """A node on the host leaves the tree, with all below it."""
        assert self.host is not None
        for child in list(node.children.values()):
            self._drop_from_host(child)
        self.host.drop(node)
        self._forget_handles(node, 0)
        self._detach(node)

    def _cut(self, leaf: Node, num_pages: int) -> np.ndarray:
        """Takes `num_pages` pages from the end of an unlocked leaf, and what is below it."""
        for child in list(leaf.children.values()):
            self._drop_from_host(child)
        keep = len(leaf.pages) - num_pages
        gone = leaf.pages[keep:]
        self.total_pages -= num_pages
        self.evictable_pages -= num_pages
        self._forget_handles(leaf, keep)
        if keep:
            leaf.pages = leaf.pages[:keep]
            leaf.key = leaf.key[: keep * self.page_size]
            leaf.handles = tuple(handles[:keep] for handles in leaf.handles)
            self._changes += 1
            self._queue(leaf)
        else:
            parent = leaf.parent
            assert parent is not None
            parent.num_device_children -= 1
            self._detach(leaf)
            self._queue(parent)
        return gone

    def _forget_handles(self, node: Node, start: int) -> None:
        """The other groups lose the node's pages from `start` on."""
        for group, handles in zip(self.groups, node.handles, strict=True):
            group.pool.forget(handles[start:])

    def _detach(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.edge]
        node.parent = None
        self.num_nodes -= 1
        self._changes += 1

    def _queue(self, node: Node) -> None:
        if not node.queued and self.is_evictable(node):
            node.queued = True
            self._now += 1  # a number that no other entry has
            heapq.heappush(self._heap, (self._priority(node), self._now, node))
