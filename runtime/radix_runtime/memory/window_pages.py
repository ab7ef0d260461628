"""KV of the last tokens of each row, in pages that are given back behind its window."""

import numpy as np

from ..cache_spec import WindowPagesSpec
from .handle_pool import HandlePool
from .radix_node import Node, pages_upwards
from .request_table import RequestTable


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
        """CacheGroup.usable."""
        ends = np.arange(len(handles) + 1)
        firsts = np.maximum(0, ends * self.page_size - self.window + 1) // self.page_size
        missing = np.concatenate([[0], np.cumsum(handles < 0)])
        return missing[ends] == missing[firsts]

    def prefix(self, handles: np.ndarray) -> np.ndarray:
        """Those of a cached prefix that a row needs which starts there."""
        return handles[self.first_page(len(handles) * self.page_size) :]

    def admit(self, row: int, handles: np.ndarray) -> None:
        """CacheGroup.admit."""
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
        """CacheGroup.share."""
        own = self.table.pages(row, int(self.end[row]))
        for page, part, offset in pages_upwards(node, num_pages):
            if page < self.first[row]:
                return
            handle = int(own[page])
            if part.handles[self.pool.index][offset] < 0 and not self.pool.in_tree(handle):
                self.pool.enter(handle, part, offset, uses=1)

    def trim(self, row: int, committed: int) -> None:
        """CacheGroup.trim."""
        first = self.first_page(committed)
        if first > self.first[row]:
            self.pool.release(self.table.pages(row, first)[self.first[row] :])
            self.first[row] = first

    def release(self, row: int) -> None:
        """CacheGroup.release."""
        self.pool.release(self.pages_of(row))
        self.table.forget_changes(row)
        self.first[row] = 0
        self.end[row] = 0

    def pages_of(self, row: int) -> np.ndarray:
        """int32 [held]: the pages of the row, in order."""
        return self.table.pages(row, int(self.end[row]))[self.first[row] :]

    def private(self) -> np.ndarray:
        """CacheGroup.private."""
        rows = [self.pages_of(row) for row in range(self.table.max_rows)]
        pages = np.concatenate([np.zeros(0, np.int32), *rows])
        return np.array([p for p in pages.tolist() if not self.pool.in_tree(p)], np.int32)
