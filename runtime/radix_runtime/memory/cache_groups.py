"""Cached state beside the full pages: what a row holds of each group, and what the tree keeps.

A *handle* is a page of a window group (`window_pages.py`) or a slot of a snapshot group
(`row_snapshots.py`). The tree has at most one a page and group (`Node.handles`); a row's own are
known by the row's number. A cached prefix can be used up to a page border where every group has
what it needs (`usable`)."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..cache_spec import FullPagesSpec, GroupSpec, RowSnapshotsSpec, WindowPagesSpec
from .handle_pool import HandlePool
from .radix_node import Node, Part, handles_of
from .row_snapshots import RowSnapshots
from .window_pages import WindowPages


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


def make_groups(
    specs: tuple[GroupSpec, ...], *, page_size: int, max_rows: int, max_pages: int, max_samples: int
) -> list[WindowPages | RowSnapshots]:
    """The groups beside the full pages. `max_pages`: pages of a row. Raises ValueError unless full
    pages come first, and only there."""
    groups: list[WindowPages | RowSnapshots] = []
    if not specs or not isinstance(specs[0], FullPagesSpec):
        raise ValueError("the first cache group of a model must be its full pages")
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
