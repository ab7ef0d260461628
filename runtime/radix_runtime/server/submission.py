"""Submission: the open requests of one HTTP call and the mailbox that their deltas fall into."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import RequestError
from ..messages import Generate, Logprobs, TextDelta

Batch = dict[int, TextDelta]


@dataclass(slots=True, eq=False)
class OpenRequest:
    """What the manager keeps of one rid until its last choice has ended. Choice c of this request
    is number `offset + c` of the submission. Times are of time.perf_counter()."""

    rid: str
    submission: Submission
    offset: int
    choices_left: int
    aborted: bool = False
    first_token: float = 0.0
    last_token: dict[int, float] = field(default_factory=dict)


class Submission:
    """Deltas of several choices, merged while nobody reads: what a lagging client gets is one
    longer delta a choice. Lives on the event loop's thread. Use it in a `with` block: leaving that
    aborts what still runs.

    Choices are numbered through all requests.
    """

    def __init__(self, name: str, close: Callable[[Submission], None], started: float | None = None) -> None:
        self.name = name
        self.started = time.perf_counter() if started is None else started
        self.rids: list[str] = []
        self._choices = self._choices_left = 0
        self._close = close
        self._pending: Batch = {}
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def add(self, request: Generate) -> OpenRequest:
        n = request.sampling.n
        opened = OpenRequest(request.rid, self, self._choices, n)
        self.rids.append(request.rid)
        self._choices += n
        self._choices_left += n
        return opened

    def push(self, choice: int, delta: TextDelta) -> None:
        """Takes ownership of `delta`."""
        waiting = self._pending.setdefault(choice, delta)
        if waiting is not delta:
            merge(waiting, delta)
        if delta.finish is not None:
            self._choices_left -= 1
        self._wake()

    def fail(self, error: RequestError) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_batch(self, *, whole: bool = False) -> Batch:
        """New deltas by choice number, {} when every choice has ended; `whole`: all of every
        choice, at its end. Raises RequestError, after what came before it unless `whole`."""
        while True:
            if self._error is not None and (whole or not self._pending):
                raise self._error
            if self._choices_left == 0 or (self._pending and not whole):
                batch, self._pending = self._pending, {}
                return batch
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def collect(self) -> list[TextDelta]:
        """The whole output, one delta a choice. Raises RequestError."""
        whole = await self.next_batch(whole=True)
        return [whole[i] for i in range(self._choices)]

    def __enter__(self) -> Submission:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts what still runs; may be called again."""
        self._close(self)


def merge(into: TextDelta, new: TextDelta) -> None:
    """Appends `new`, the next delta of the same choice, to `into`."""
    into.text += new.text
    into.ids += new.ids
    into.finish = new.finish
    into.completion_tokens = new.completion_tokens
    into.prompt_tokens = into.prompt_tokens or new.prompt_tokens
    into.cached_tokens = into.cached_tokens or new.cached_tokens
    into.logprobs = _joined(into.logprobs, new.logprobs)
    into.prompt_logprobs = _joined(into.prompt_logprobs, new.prompt_logprobs)


def _joined(a: Logprobs | None, b: Logprobs | None) -> Logprobs | None:
    if a is None or b is None:
        return a or b
    return Logprobs(
        a.ids + b.ids, a.logprobs + b.logprobs, a.top_n, a.top_ids + b.top_ids, a.top_logprobs + b.top_logprobs
    )
