"""Drain: a server that takes no new requests and lets the open ones end."""

import asyncio
import time

from ..errors import RequestError
from .shared_numbers import OPEN_CALLS, SharedNumbers

_LOOK = 0.02  # seconds between two looks at what is open


class Drain:
    """How far a server is on its way out. From `begin` on it is not ready; new requests are refused
    `delay` seconds later, so that whoever sends them has time to see that. `undo` takes them again.
    All API processes of the server drain together: the times are in `numbers`."""

    def __init__(self, delay: float, numbers: SharedNumbers) -> None:
        self._delay = delay
        self._numbers = numbers
        self._open_calls = 0  # of this process

    def begin(self, for_good: bool = False) -> None:
        """`for_good`: the server is about to end, so it cannot be undone. May be called again."""
        when = time.monotonic_ns() + int(1e9 * self._delay)
        numbers = self._numbers
        if for_good:
            numbers.ends_from = numbers.ends_from or when
        elif not self.is_asked:
            numbers.drained_from = when

    def undo(self) -> None:
        """Requests are taken as before. Raises RequestError if the server is about to end."""
        if self._numbers.ends_from:
            raise _draining()
        self._numbers.drained_from = 0

    @property
    def is_asked(self) -> bool:
        """Whether the server drains."""
        return bool(self._numbers.drained_from or self._numbers.ends_from)

    @property
    def refuses(self) -> bool:
        """Whether new requests are refused by now."""
        times = (self._numbers.drained_from, self._numbers.ends_from)
        now = time.monotonic_ns()
        return any(0 < when <= now for when in times)

    @property
    def open_calls(self) -> int:
        """The calls of all processes that an end would cut off."""
        return self._open_calls + self._numbers.elsewhere(OPEN_CALLS)

    def open_call(self) -> None:
        """One more call is open in this process."""
        self._open_calls += 1
        self._numbers.publish(OPEN_CALLS, self._open_calls)

    def close_call(self) -> None:
        """It has ended."""
        self._open_calls -= 1
        self._numbers.publish(OPEN_CALLS, self._open_calls)

    async def finished(self) -> None:
        """Returns when requests are refused and none is open in this process."""
        while not self.refuses or self._open_calls:
            await asyncio.sleep(_LOOK)

    def require_admitting(self) -> None:
        """Raises RequestError 503 once new requests are refused."""
        if self.refuses:
            raise _draining()

    def require_ready(self) -> None:
        """Raises RequestError 503 from `begin` on."""
        if self.is_asked:
            raise _draining()


def _draining() -> RequestError:
    return RequestError(
        status=503, code="not_ready", message="the server is shutting down", retry_after=1
    )
