"""The choices of some requests as they come, and their log-probabilities."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..messages import Generate, Logprobs, TextDelta, unpack_ids

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

    def add(self, delta: TextDelta) -> int:
        """Takes ownership of `delta`; the number of its choice."""
        first = self._first[delta.rid]
        choice = first + delta.choice
        if delta.prompt_logprobs is not None:
            for sibling in range(first, first + self.request_of[first].sampling.n):
                self.prompt_logprobs[sibling] = delta.prompt_logprobs
        if choice in self.pieces:
            merge(self.pieces[choice], delta)
        else:
            self.pieces[choice] = delta
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
    if into.logprobs is None:
        into.logprobs = new.logprobs
    elif new.logprobs is not None:
        into.logprobs = into.logprobs.joined(new.logprobs)


class Scored(NamedTuple):
    """A token, its logprob (at least FLOOR; None: the first token of a prompt has none) and the
    likeliest tokens of its position with theirs."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


def scored(logprobs: Logprobs | None) -> list[Scored]:
    """The tokens of `logprobs`, in their order; none if it is None."""
    if logprobs is None:
        return []
    ids = unpack_ids(logprobs.ids).tolist()
    values = np.maximum(logprobs.values(), FLOOR).tolist()
    top_ids = unpack_ids(logprobs.top_ids).reshape(len(ids), logprobs.top_n).tolist()
    top_values = np.maximum(logprobs.top_values(), FLOOR).tolist()
    entries = []
    for i, token in enumerate(ids):
        if math.isnan(values[i]):
            entries.append(Scored(token=token, logprob=None, top=[]))
        else:
            top = list(zip(top_ids[i], top_values[i], strict=True))
            entries.append(Scored(token=token, logprob=values[i], top=top))
    return entries
