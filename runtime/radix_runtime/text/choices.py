"""The choices of some requests as they come, and their log-probabilities."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..messages import Generate, Logprobs, TextDelta, num_ids, unpack_ids

FLOOR = -9999.0  # the lowest logprob that is given out: JSON has no infinity


def by_choice(requests: Sequence[Generate]) -> list[Generate]:
    """The request of each choice; choices are numbered through all requests."""
    request_of = []
    for request in requests:
        request_of += [request] * request.sampling.n
    return request_of


class Choices:
    """What has come of some requests: `pieces`, merged by choice. Choices are numbered through all
    requests; `request_of[i]` is the request of choice i. `prompt_logprobs`, by choice, come with
    the first piece of a request."""

    def __init__(self, requests: Sequence[Generate]) -> None:
        self.requests = requests
        self.request_of = by_choice(requests)
        self._first: dict[str, int] = {}  # number of the first choice, by rid
        for choice, request in enumerate(self.request_of):
            self._first.setdefault(request.rid, choice)
        self.unfinished = len(self.request_of)
        self.pieces: dict[int, TextDelta] = {}
        self.prompt_logprobs: dict[int, Logprobs] = {}

    def number_of(self, rid: str) -> int:
        """The number of a request's first choice."""
        return self._first[rid]

    def add(self, delta: TextDelta) -> int:
        """Takes ownership of `delta`; the number of its choice."""
        first = self._first[delta.rid]
        choice = first + delta.choice
        if delta.prompt_logprobs is not None:
            for sibling in range(first, first + self.request_of[first].sampling.n):
                self.prompt_logprobs[sibling] = delta.prompt_logprobs
        piece = self.pieces.get(choice)
        if piece is None:
            self.pieces[choice] = delta
        else:
            merge(piece, delta)
        if delta.finish is not None:
            self.unfinished -= 1
        return choice


def merge(into: TextDelta, new: TextDelta) -> None:
    """Appends `new`, the next delta of the same choice, to `into`."""
    into.text += new.text
    into.ids += new.ids
    into.finish = new.finish
    into.completion_tokens = new.completion_tokens
    into.cached_tokens = into.cached_tokens or new.cached_tokens
    if new.logprobs is None:
        return
    if into.logprobs is None:
        into.logprobs = new.logprobs
    else:
        into.logprobs.extend(new.logprobs)


class Scored(NamedTuple):
    """A token, its logprob (at least FLOOR; None: the first token of a prompt has none), the
    likeliest tokens of its position with theirs, and its rank, 0 where nobody has counted it."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]
    rank: int = 0


_UNPACKED = 64  # tokens that are unpacked at once


def num_scored(logprobs: Logprobs | None) -> int:
    """How many tokens `scored` gives."""
    return 0 if logprobs is None else num_ids(logprobs.ids)


def scored(logprobs: Logprobs | None) -> Iterator[Scored]:
    """The tokens of `logprobs`, in their order; none if it is None. They are unpacked some at a
    time, as there may be millions of values."""
    if logprobs is None:
        return
    ids = unpack_ids(logprobs.ids)
    values = logprobs.values()
    top_ids = unpack_ids(logprobs.top_ids).reshape(len(ids), logprobs.top_n)
    top_values = logprobs.top_values()
    ranks = unpack_ids(logprobs.ranks) if logprobs.ranks else np.zeros_like(ids)
    for start in range(0, len(ids), _UNPACKED):
        some = slice(start, start + _UNPACKED)
        rows = zip(
            ids[some].tolist(),
            np.maximum(values[some], FLOOR).tolist(),
            top_ids[some].tolist(),
            np.maximum(top_values[some], FLOOR).tolist(),
            ranks[some].tolist(),
            strict=True,
        )
        for token, value, others, their_values, rank in rows:
            if math.isnan(value):
                yield Scored(token=token, logprob=None, top=[])
            else:
                top = list(zip(others, their_values, strict=True))
                yield Scored(token=token, logprob=value, top=top, rank=rank)
