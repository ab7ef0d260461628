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
        self._claimed: set[Label] = set()  # by calls that ask the other API processes for them
        self._yielded: set[Label] = set()  # the claimed ones that another process was given
        self._rids: dict[Label, set[str]] = {}  # of requests and calls
        self._aborted: dict[Label, float] = {}  # when, time.perf_counter(); the oldest first
        self._all_aborted = 0.0

    def __len__(self) -> int:
        return len(self._rids)

    @property
    def num_requests(self) -> int:
        """How many requests are open."""
        return len(self._requests)

    def check_new(self, labels: Collection[Label]) -> None:
        """Raises RequestError unless these may be labels of new requests."""
        new = set(labels)
        if len(new) < len(labels) or not self._requests.isdisjoint(new):
            raise name_in_use()

    @contextmanager
    def claimed(self, labels: Collection[Label]) -> Iterator[None]:
        """Keeps names for a call that is going to submit requests of these names, while the other
        API processes are asked about them. Raises RequestError if one is in use here."""
        self.check_new(labels)
        if not self._claimed.isdisjoint(labels):
            raise name_in_use()
        self._claimed.update(labels)
        try:
            yield
        finally:
            self._claimed.difference_update(labels)
            self._yielded.difference_update(labels)

    def are_in_use(self, labels: Collection[Label], is_first: bool) -> bool:
        """What another API process is told that asks about names: whether it may not have one of
        them. Of two processes that claim a name at once the first gets it (`is_first`: this one);
        the other yields it, also where its own question has been answered before."""
        if not self._requests.isdisjoint(labels):
            return True
        both = self._claimed.intersection(labels)
        if is_first:
            return bool(both)
        self._yielded |= both
        return False

    def has_yielded(self, labels: Collection[Label]) -> bool:
        """Whether one of these claimed names was given to another process meanwhile."""
        return not self._yielded.isdisjoint(labels)

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
