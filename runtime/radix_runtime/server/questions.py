"""Questions to other processes that are answered by a message with the same number."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Generic, TypeVar

from ..errors import RequestError

Answer = TypeVar("Answer")


class Questions(Generic[Answer]):
    """Those that have been asked and not answered. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[Answer]] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, send: Callable[[int], object], timeout: float) -> Answer:
        """`send` sends the question with the number that it gets; what `answer` is called with.
        Raises asyncio.TimeoutError after `timeout` seconds, what `send` raises, and the error of
        `fail_all`."""
        number = secrets.randbits(48)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            send(number)
            return await asyncio.wait_for(answer, timeout)
        finally:
            del self._open[number]

    def answer(self, number: int, answer: Answer) -> None:
        """Ends a question; one that nobody waits for any more is ignored."""
        waiting = self._open.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail_all(self, error: RequestError) -> None:
        """Ends all that are open with `error`."""
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)
