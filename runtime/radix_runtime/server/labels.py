"""Labels: what clients call their calls and requests, for /abort_request."""

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import RequestError, refusal
from .auth import Caller

_MEMORY = 120.0  # seconds for which an abort holds for calls whose text is still being read,
_MOST_KEPT = 4096  # of the last so many
_OPERATOR = "operator"  # no key looks like that


class Label(NamedTuple):
    """A name, and whose it is: `Caller.key`. Holders of different keys share no names."""

    key: str
    name: str


class Labels:
    """The labels of all open requests and of the calls that they are parts of, and those that were
    aborted lately."""

    def __init__(self) -> None:
        self._requests: set[Label] = set()
        self._unsettled: set[Label] = set()
        self._rids: dict[Label, set[str]] = {}  # of requests and calls
        self._aborted: dict[Label, float] = {}  # when, time.perf_counter(); the oldest first
        self._all_aborted = 0.0

    def __len__(self) -> int:
        return len(self._rids)

    def check_new(self, labels: Collection[Label]) -> None:
        """Raises RequestError unless these may be labels of new requests."""
        new = set(labels)
        if len(new) < len(labels) or not self._requests.isdisjoint(new):
            raise name_in_use()

    @contextmanager
    def unsettled(self, labels: Collection[Label]) -> Iterator[None]:
        """While the other API processes are asked whether they have open requests of these names,
        which this one has."""
        self._unsettled |= set(labels)
        try:
            yield
        finally:
            self._unsettled -= set(labels)

    def are_in_use(self, labels: Collection[Label], is_first: bool) -> bool:
        """Whether an open request has one of these names. Of two processes that take a name at once
        the first has it (`is_first`: this one)."""
        taken = self._requests if is_first else self._requests - self._unsettled
        return not taken.isdisjoint(labels)

    def add(self, rid: str, label: Label, call: str) -> None:
        """Request `rid` is open under its own label and the name of its call."""
        self._requests.add(label)
        for each in {label, Label(label.key, call)}:
            self._rids.setdefault(each, set()).add(rid)

    def remove(self, rid: str, label: Label, call: str) -> None:
        """It has ended."""
        self._requests.discard(label)
        for each in {label, Label(label.key, call)}:
            rids = self._rids[each]
            rids.discard(rid)
            if not rids:
                del self._rids[each]

    def abort(self, name: str, caller: Caller) -> set[str]:
        """The requests that the caller means by a name, which also holds for a call of it that has
        not been submitted yet. The holder of the admin key means those of everybody."""
        now = time.perf_counter()
        label = Label(_OPERATOR if caller.is_operator else caller.key, name)
        self._aborted.pop(label, None)
        self._aborted[label] = now
        while self._aborted:
            oldest = next(iter(self._aborted))
            if len(self._aborted) <= _MOST_KEPT and self._aborted[oldest] > now - _MEMORY:
                break
            del self._aborted[oldest]
        if not caller.is_operator:
            return set(self._rids.get(label, ()))
        meant: set[str] = set()
        for other, rids in self._rids.items():
            if other.name == name:
                meant |= rids
        return meant

    def abort_all(self) -> None:
        """Every request that came before now is aborted."""
        self._all_aborted = time.perf_counter()

    def was_aborted(self, label: Label, call: str, since: float) -> bool:
        """Whether a request that came at `since` (time.perf_counter()) was aborted afterwards."""
        return self._all_aborted > since or any(
            self._aborted.get(each, 0.0) > since for each in _meanings(label, call)
        )


def name_in_use() -> RequestError:
    """Two open requests may not share a name."""
    return refusal("invalid_value", "this rid is in use", "rid")


def _meanings(label: Label, call: str) -> Iterable[Label]:
    for name in (label.name, call):
        yield Label(label.key, name)
        yield Label(_OPERATOR, name)
