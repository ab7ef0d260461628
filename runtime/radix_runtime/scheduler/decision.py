"""What one step computes, and why each waiting request is not part of it."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from ..memory.radix_node import Match
from .request import Request


class Entry(NamedTuple):
    """A chunk: tokens [start, end) of a request, of which it samples `num_samples`. `match` is set
    when this admits the request."""

    request: Request
    start: int
    end: int
    num_samples: int
    match: Match | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecodeEntries:
    """The streams of a step, by row. Entry i runs the tokens of row `rows[i]` from `start[i]` on,
    as many as it samples: the last one accepted and `num_samples[i] - 1` drafts. int64 [n] each;
    `total_samples` is the sum of `num_samples`."""

    rows: np.ndarray
    start: np.ndarray
    num_samples: np.ndarray
    total_samples: int

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, chosen: np.ndarray) -> "DecodeEntries":
        """Those for which `chosen` (bool [n]) holds."""
        num_samples = self.num_samples[chosen]
        return DecodeEntries(
            rows=self.rows[chosen],
            start=self.start[chosen],
            num_samples=num_samples,
            total_samples=int(num_samples.sum()),
        )


_NO_ROWS = np.zeros(0, np.int64)
NO_STREAMS = DecodeEntries(rows=_NO_ROWS, start=_NO_ROWS, num_samples=_NO_ROWS, total_samples=0)


def chunk(request: Request, start: int, length: int, match: Match | None = None) -> Entry:
    """A part of what the request has to compute; the last one samples unless nothing is asked."""
    end = start + length
    samples = end == request.total_len < request.max_total_len
    return Entry(
        request=request,
        start=start,
        end=end,
        num_samples=1 if samples else 0,
        match=match,
    )


def chunk_length(left: int, most: int) -> int:
    """Tokens of the next chunk, at most `most` of the `left`: neither one alone nor all but one. A
    row's only token in a step takes attention's decode kernel, which gives it other last bits than
    it has in the whole prompt."""
    length = min(left, most)
    if left - length == 1:
        length -= 1
    if length == 1 and left > 1:
        return 0
    return length


class Blocked(Enum):
    """Why a waiting request is not in the step."""

    NO_ROW = auto()  # as many requests run as may
    NO_BUDGET = auto()  # the step computes as many tokens as it may
    NO_PAGES = auto()  # the pages that it is expected to need are not there
    SAME_PREFIX = auto()  # another request is computing its next page
    BEHIND = auto()  # nobody passes a request that waits for pages


@dataclass(slots=True)
class Decision:
    """What a step computes, and why each waiting request is not part of it. `shortage`: pages are
    missing for a step that has to be made; launch nothing."""

    decode: DecodeEntries = NO_STREAMS
    chunks: list[Entry] = field(default_factory=list)
    shortage: bool = False
    blocked: dict[Request, Blocked] = field(default_factory=dict)
    rest: Blocked = Blocked.BEHIND  # the reason of waiting requests that are not in `blocked`

    def __bool__(self) -> bool:
        return len(self.decode) > 0 or len(self.chunks) > 0

    @property
    def dedup_waits(self) -> int:
        return sum(1 for reason in self.blocked.values() if reason is Blocked.SAME_PREFIX)
