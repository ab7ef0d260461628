"""Siblings: the other API processes of a server, which share its port.

Whichever of them a client reaches, it speaks with the whole server: names of requests are unique
and aborted everywhere, and metrics are those of all.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from ..channel import Outbox
from ..errors import RequestError
from ..messages import Result, SiblingCall, SiblingReply, pack_body, unpack_body
from .questions import Questions

_TIMEOUT = 1.0  # seconds for an answer; a process that is busy for longer is left out

Operation = Callable[[Any], object]


class Siblings:
    """Asks all other API processes the same thing, and answers what they ask. `number` is that of
    this process among `count`; the only one asks nobody. Belongs to the event loop's thread."""

    def __init__(self, number: int, count: int, link: Outbox) -> None:
        self.number = number
        self.count = count
        self._others = [other for other in range(count) if other != number]
        self._link = link
        self._operations: dict[str, tuple[Any, Operation]] = {}
        self._questions: Questions[msgspec.Raw] = Questions()

    def register(self, name: str, argument: Any, operation: Operation) -> None:
        """Offers an operation, whose argument has this type (None: there is none)."""
        self._operations[name] = (argument, operation)

    async def ask(self, op: str, body: object, result: type[Result]) -> dict[int, Result]:
        """The results of those that have answered in time, by their number."""
        if not self._others:
            return {}
        answers = await asyncio.gather(*(self._ask(other, op, body) for other in self._others))
        return {
            other: unpack_body(answer, result)
            for other, answer in zip(self._others, answers, strict=True)
            if answer is not None
        }

    async def _ask(self, other: int, op: str, body: object) -> msgspec.Raw | None:
        packed = pack_body(body)

        def send(number: int) -> None:
            self._link.send(SiblingCall(id=number, op=op, body=packed, api=self.number), other)

        try:
            return await self._questions.ask(send, _TIMEOUT)
        except (asyncio.TimeoutError, RequestError):  # it stands still, or the server ends
            return None

    def fail_all(self, error: RequestError) -> None:
        """Waits for no answer any more, as after the death of the engine."""
        self._questions.fail_all(error)

    def handle(self, message: SiblingCall | SiblingReply) -> None:
        """Takes what a sibling sends: a question, which is answered, or an answer."""
        if isinstance(message, SiblingReply):
            self._questions.answer(message.id, message.body)
            return
        argument, operation = self._operations[message.op]
        result = operation(unpack_body(message.body, argument))
        with suppress(RequestError):  # the asker reads nothing or has gone; it stops waiting itself
            self._link.send(SiblingReply(message.id, pack_body(result)), message.api)
