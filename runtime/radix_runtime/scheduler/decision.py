"""What one step computes: its entries, and why each waiting request is not among them."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from ..memory.radix_node import Match
from .request import Request


class Entry(NamedTuple):
    """One request in a step: its tokens [start, end), of which it samples `num_samples`. `match` is
    set when this admits the request."""

    request: Request
    start: int
    end: int
    num_samples: int
    is_chunk: bool
    match: Match | None = None


def decode(request: Request, num_samples: int) -> Entry:
    """The request's next tokens: the last one accepted and `num_samples - 1` drafts."""
    start = request.computed_len
    return Entry(
        request=request,
        start=start,
        end=start + num_samples,
        num_samples=num_samples,
        is_chunk=False,
    )


def chunk(request: Request, start: int, length: int, match: Match | None = None) -> Entry:
    """A part of what the request has to compute; the last one samples unless nothing is asked."""
    end = start + length
    samples = end == request.total_len < request.max_total_len
    return Entry(
        request=request,
        start=start,
        end=end,
        num_samples=1 if samples else 0,
        is_chunk=True,
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

    decode: list[Entry] = field(default_factory=list)
    chunks: list[Entry] = field(default_factory=list)
    shortage: bool = False
    blocked: dict[Request, Blocked] = field(default_factory=dict)
    rest: Blocked = Blocked.BEHIND  # the reason of waiting requests that are not in `blocked`

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)

    def why(self, waiting: Request) -> Blocked:
        """The reason for a request that is still waiting."""
        return self.blocked.get(waiting, self.rest)

    @property
    def entries(self) -> list[Entry]:
        """Decode entries, then chunks: the order of the plan."""
        return [*self.decode, *self.chunks]

    @property
    def dedup_waits(self) -> int:
        return sum(1 for reason in self.blocked.values() if reason is Blocked.SAME_PREFIX)
