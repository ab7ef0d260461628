"""The requests of one HTTP call while they are open, and the mailbox of their output."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from ..errors import RequestError
from ..messages import Generate, TextDelta
from ..text.choices import Choices
from .labels import Label

Batch = dict[int, TextDelta]  # new pieces, by the number of their choice


class Submission(Choices, AbstractContextManager["Submission"]):
    """The requests of one HTTP call and the mailbox of their output, merged while nobody reads.
    Leaving its `with` block aborts what still runs. Belongs to the event loop's thread.

    `name` is what the client calls it, `started` when it came (time.perf_counter()); `close` is
    called at the end of the `with` block. `deliver`, once it is set, is offered each piece but the
    first of its choice, with the number of that, while the reader waits: the task of the call need
    not wake up for a piece that it takes (True)."""

    def __init__(
        self,
        name: str,
        requests: Sequence[Generate],
        started: float,
        close: Callable[["Submission"], None],
    ) -> None:
        super().__init__(requests)
        self.name = name
        self.started = started
        self._close = close
        self.deliver: Callable[[int, TextDelta], bool] | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._reader_waits = False  # with an empty mailbox, and nothing has come since
        self._begun: set[int] = set()  # choices of which the reader has had a piece

    def take(self, choice: int, delta: TextDelta, *, at_once: bool) -> None:
        """Takes ownership of `delta`, of choice number `choice`: delivers it, if that is to be done
        `at_once` and can be, or puts it into the mailbox."""
        if at_once and self._reader_waits and choice in self._begun and self.deliver is not None:
            try:
                if self.deliver(choice, delta):
                    return
            except Exception as error:  # the call's; whoever has brought the delta goes on
                self.fail(error)
                return
        self.add(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the call with `error`; the first one counts."""
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        self._reader_waits = False
        self._news.set()

    async def next_batch(self) -> Batch:
        """New pieces; {} when all choices have ended. Raises RequestError after the last piece that
        came before it, or what `deliver` has raised."""
        while not self.pieces:
            if self._error is not None:
                raise self._error
            if not self.unfinished:
                return {}
            self._reader_waits = True
            await self._next_event()
        batch = self.pieces
        self.pieces = {}
        self._begun.update(batch)
        return batch

    async def collect(self) -> list[TextDelta]:
        """The whole output, one delta a choice. Raises RequestError."""
        while self.unfinished and self._error is None:
            await self._next_event()
        if self._error is not None:
            raise self._error
        return [self.pieces[choice] for choice in sorted(self.pieces)]

    async def _next_event(self) -> None:
        self._news.clear()
        await self._news.wait()

    def __exit__(self, *exc: object) -> None:
        self._close(self)


@dataclass(slots=True, eq=False)
class OpenRequest:
    """What is kept of a request until its last choice has ended."""

    rid: str
    label: Label  # what the client calls it
    submission: Submission
    first_choice: int  # its number in the call
    choices_left: int
    prompt_tokens: int
    waiting_tokens: int  # its work, until its first token has come
    aborted: bool = False
    last_token: dict[int, float] = field(default_factory=dict)  # when it came, by choice


def new_id(prefix: str) -> str:
    """A name that nobody can guess, as requests and calls have them."""
    return prefix + secrets.token_hex(12)
