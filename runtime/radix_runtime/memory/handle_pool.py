"""Handles of one cache group: pages of a window, or slots for snapshots."""

from collections import OrderedDict

import numpy as np

from ..errors import require
from .page_allocator import PageAllocator
from .radix_node import Node


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
