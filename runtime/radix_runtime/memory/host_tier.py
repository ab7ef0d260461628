"""Host memory for pages that the device had no room for."""

from collections import OrderedDict

import numpy as np

from .page_allocator import PageAllocator
from .radix_node import Node


class HostTier:
    """`num_pages` pages of host memory, each free or of one node of the radix tree.

    Nothing is copied here: `take_copies` gives the copies that the next step must make before
    anything else, in their order. Because the engine runs them in that order a page may be given
    away as soon as the copy that empties it is noted."""

    def __init__(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages, page_size=1)
        # Nodes on the host in the order in which they came there: children before their parents.
        self.nodes: OrderedDict[Node, None] = OrderedDict()
        self.stored_pages_total = 0
        self.loaded_pages_total = 0
        self._copies: list[np.ndarray] = []  # [3, n]: source, target, 1 if that is on the host

    def store(self, node: Node) -> None:
        """The node's pages move from the device to the host. There must be room."""
        pages = self.allocator.alloc(len(node.pages))
        self._copy(node.pages, pages, to_host=True)
        self.stored_pages_total += len(pages)
        node.pages = pages
        node.on_host = True
        self.nodes[node] = None

    def load(self, node: Node, pages: np.ndarray) -> None:
        """The node's pages move back, to `pages` of the device."""
        self._copy(node.pages, pages, to_host=False)
        self.loaded_pages_total += len(pages)
        self.replace(node, pages)

    def replace(self, node: Node, pages: np.ndarray) -> None:
        """The node gets `pages` of the device, which hold the same KV; no copy is needed."""
        self.drop(node)
        node.pages = pages
        node.on_host = False

    def drop(self, node: Node) -> None:
        """The node's pages on the host are free."""
        self.allocator.free(node.pages)
        del self.nodes[node]

    def split(self, upper: Node) -> None:
        """`upper` has taken the first pages of a node on the host."""
        self.nodes[upper] = None

    def _copy(self, source: np.ndarray, target: np.ndarray, to_host: bool) -> None:
        copy = np.empty((3, len(source)), np.int32)
        copy[0] = source
        copy[1] = target
        copy[2] = 1 if to_host else 0
        self._copies.append(copy)

    @property
    def num_waiting(self) -> int:
        """Copies that no plan has taken yet, counted by nodes."""
        return len(self._copies)

    def take_copies(self) -> np.ndarray:
        """int32 [3, n] of all copies since the last call: source page, target page, and 1 where the
        target is on the host and the source on the device, 0 the other way round."""
        copies = self._copies
        self._copies = []
        return np.concatenate([np.empty((3, 0), np.int32), *copies], axis=1)
