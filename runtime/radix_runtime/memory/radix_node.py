"""Nodes of the radix tree, and what a lookup in it returns."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of n whole pages below `parent`.

    `pages` are pages of the device or, with `on_host`, of the host; all nodes below one on the host
    are there too. `handles` are those of the other cache groups, in their order: one a page, -1
    where the group has none. `created` and `last_use` are times of the cache's logical clock;
    `lock_count` is the number of requests whose prefix passes through."""

    parent: "Node | None"  # None: the root, or cut off
    edge: Hashable  # key in parent.children
    key: np.ndarray  # int32 [n * page_size]
    pages: np.ndarray  # int32 [n]
    handles: tuple[np.ndarray, ...] = ()  # int32 [n] a group
    on_host: bool = False
    created: int = 0
    last_use: int = 0
    hits: int = 0
    lock_count: int = 0
    queued: bool = False  # has an entry in the heap of leaves
    children: dict[Hashable, "Node"] = field(default_factory=dict)
    num_device_children: int = 0  # children that are not on the host

    def path(self) -> Iterator["Node"]:
        """This node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


Part = tuple[Node, int]  # a node of a prefix, and how many of its pages are in the prefix


def handles_of(parts: list[Part], num_groups: int) -> tuple[np.ndarray, ...]:
    """The handles of a prefix, int32 [its pages] for each group beside the full pages."""
    none = np.zeros(0, np.int32)
    return tuple(
        np.concatenate([none, *[node.handles[group][:pages] for node, pages in parts]])
        for group in range(num_groups)
    )


def pages_upwards(node: Node, num_pages: int) -> Iterator[tuple[int, Node, int]]:
    """(page of the prefix, node, page within the node), from the last page of a prefix of
    `num_pages` pages, which `node` ends, to the first."""
    page = num_pages
    for part in node.path():
        for offset in range(len(part.pages) - 1, -1, -1):
            page -= 1
            yield page, part, offset


class Match(NamedTuple):
    """`length` tokens in `num_pages` pages are cached, and `node` ends exactly there (lock it to
    keep them). `pages` are those on the device, which come first; the others are on the host.
    `handles` are those of the other cache groups, int32 [num_pages] each."""

    length: int
    num_pages: int
    pages: np.ndarray
    node: Node
    handles: tuple[np.ndarray, ...] = ()
