"""The numbers of all requests that hold a row, in columns: a step changes those of every row at
once."""

import numpy as np

from .columns import Column
from .request import Request

BLOCK = 64  # tokens that a row may gather before its request takes them over


class Flag:
    """What keeps a decoding row from being treated like most: a stream that needs nothing else."""

    # Not an enum: looking a member up would take longer than the operation on all rows.
    ENDED = 1  # tokens that still come are dropped
    BY_TOKEN = 2  # each token needs more than to be appended: it has log-probabilities
    IN_BLOCKS = 4  # nobody waits for each token: they are sent in blocks
    COUNTED_LATE = 8  # a stop string may take tokens back: they are counted at the end
    NO_DRAFTS = 16  # how a token is drawn depends on the one before it: penalties, a constraint


class Rows:
    """The requests that hold a row and what steps change of them, by row of the request table.

    A column is int64 [max_rows], named like the attribute of `Request` that reads it; `flags` uint8
    [max_rows] are sums of `Flag`. `requests[row]` is the request, None for a free row. `decoding`
    int64 [n] are the rows in state DECODE, in the order in which they got there; it is replaced and
    never written, so that a step in flight can keep it.

    `recent` int32 [max_rows, 2 * BLOCK] holds sampled tokens that a request has not taken over:
    position p of row r at [r, p % (2 * BLOCK)]; see `Request.settle`.

    Owned by the lifecycle, which enters and removes rows. Columns are written by `build_step`
    (lengths that are launched), `Results` (tokens that are accepted) and `Output` (what was
    sent)."""

    def __init__(self, max_rows: int) -> None:
        self._table = np.zeros((len(Column), max_rows), np.int64)
        self.seq = self._table[Column.SEQ]
        self.prompt_len = self._table[Column.PROMPT_LEN]
        self.max_total_len = self._table[Column.MAX_TOTAL_LEN]
        self.num_ids = self._table[Column.NUM_IDS]
        self.total_len = self._table[Column.TOTAL_LEN]
        self.computed_len = self._table[Column.COMPUTED_LEN]
        self.reserved_len = self._table[Column.RESERVED_LEN]
        self.num_pages = self._table[Column.NUM_PAGES]
        self.last_step = self._table[Column.LAST_STEP]
        self.sent = self._table[Column.SENT]
        self.flags = np.zeros(max_rows, np.uint8)
        self.recent = np.zeros((max_rows, 2 * BLOCK), np.int32)
        self.requests: list[Request | None] = [None] * max_rows
        self.decoding = np.zeros(0, np.int64)

    def request(self, row: int) -> Request:
        """The request that holds the row."""
        request = self.requests[row]
        assert request is not None
        return request

    def enter(self, request: Request, flags: int) -> None:
        """`request` has got its row: from now on its numbers are the row's."""
        row = request.row
        self._table[:, row] = request.numbers
        request.numbers = self._table[:, row]
        request.recent = self.recent[row]
        self.flags[row] = flags
        self.requests[row] = request

    def leave(self, request: Request) -> None:
        """The row is about to be given back: the request keeps its numbers and ids."""
        request.settle()
        request.numbers = request.numbers.copy()
        request.recent = None
        self.requests[request.row] = None

    def start_decoding(self, row: int) -> None:
        """The row's next steps decode."""
        self.decoding = np.append(self.decoding, row)

    def stop_decoding(self, row: int) -> None:
        """No further step decodes the row, if any did."""
        self.decoding = self.decoding[self.decoding != row]

    def append(self, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> None:
        """`counts[i]` more tokens for row i, at most BLOCK; `tokens` has them row after row."""
        before = self.num_ids[rows]
        after = before + counts
        self.num_ids[rows] = after
        if len(tokens) == len(rows):
            self.recent[rows, before % (2 * BLOCK)] = tokens
        else:
            ends = counts.cumsum()
            positions = np.arange(len(tokens)) + np.repeat(before - ends + counts, counts)
            self.recent[np.repeat(rows, counts), positions % (2 * BLOCK)] = tokens
        full = after % BLOCK < counts  # a border of blocks has been reached
        if np.count_nonzero(full):
            for row in rows[full].tolist():
                self.request(row).settle()
