"""Submission: the open requests of one HTTP call and the mailbox that their deltas fall into."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ..errors import RequestError
from ..messages import Logprobs, TextDelta

Batch = dict[int, TextDelta]


class OpenRequest:
    """What the manager keeps of one rid until its last choice has ended. Choice c of this request
    is number `offset + c` of the submission. Times are of time.perf_counter()."""

    __slots__ = (
        "aborted", "choices_left", "first_token", "last_token", "offset", "rid", "submission",
    )  # fmt: skip

    def __init__(self, rid: str, submission: Submission, offset: int, n: int) -> None:
        self.rid = rid
        self.submission = submission
        self.offset = offset
        self.choices_left = n
        self.aborted = False
        self.first_token = 0.0
        self.last_token = [0.0] * n


class Submission:
    """Deltas of several choices, merged while nobody reads: what a lagging client gets is one
    longer delta a choice. Lives on the event loop's thread. Use it in a `with` block: leaving that
    aborts what still runs.

    `rids` and `prompt_lengths` (tokens) in order of the prompts; choice i belongs to prompt
    `prompt_of[i]`.
    """

    def __init__(
        self, name: str, close: Callable[[Submission], None], started: float | None = None
    ) -> None:
        self.name = name
        self.started = time.perf_counter() if started is None else started
        self.rids: list[str] = []
        self.prompt_lengths: list[int] = []
        self.prompt_of: list[int] = []
        self.choices_left = 0
        self._close = close
        self._pending: Batch = {}
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def add(self, rid: str, prompt_length: int, n: int) -> OpenRequest:
        request = OpenRequest(rid, self, len(self.prompt_of), n)
        self.prompt_of += [len(self.rids)] * n
        self.rids.append(rid)
        self.prompt_lengths.append(prompt_length)
        self.choices_left += n
        return request

    @property
    def done(self) -> bool:
        return self.choices_left == 0 or self._error is not None

    def push(self, choice: int, delta: TextDelta) -> None:
        """Takes ownership of `delta`."""
        waiting = self._pending.get(choice)
        if waiting is None:
            self._pending[choice] = delta
        else:
            merge(waiting, delta)
        if delta.finish is not None:
            self.choices_left -= 1
        self._wake()

    def fail(self, error: RequestError) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def next_batch(self) -> Batch:
        """New deltas by choice number, {} when every choice has ended. Raises RequestError."""
        while True:
            if self._pending:
                batch, self._pending = self._pending, {}
                return batch
            if self._error is not None:
                raise self._error
            if self.choices_left == 0:
                return {}
            await self._wait()

    async def collect(self) -> list[TextDelta]:
        """The whole output, one delta a choice. Raises RequestError."""
        while not self.done:
            await self._wait()
        if self._error is not None:
            raise self._error
        return [self._pending[i] for i in range(len(self.prompt_of))]

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
        a.ids + b.ids,
        a.logprobs + b.logprobs,
        a.top_n,
        a.top_ids + b.top_ids,
        a.top_logprobs + b.top_logprobs,
    )
