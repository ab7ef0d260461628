"""Drain: a server that takes no new requests and lets the open ones end."""

import asyncio
from collections.abc import Callable

from ..errors import RequestError

_LOOK = 0.02  # seconds between two looks at what is open


class Drain:
    """How far a server is on its way out. From `begin` on it is not ready; new requests are refused
    `delay` seconds later, so that whoever sends them has time to see that. `undo` takes them again.
    Belongs to the event loop's thread.

    `open_calls`: those that an end would cut off. `on_change` is told whether the server is
    ready."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._is_for_good = False
        self.on_change: Callable[[bool], None] = lambda is_ready: None
        self._wait: asyncio.Task[None] | None = None
        self.is_asked = False
        self.refuses = False
        self.open_calls = 0

    def begin(self, for_good: bool = False) -> None:
        """`for_good`: the process is about to end, so it cannot be undone. May be called again."""
        self._is_for_good |= for_good
        if self.is_asked:
            return
        self.is_asked = True
        self.on_change(False)
        if self._delay == 0:
            self.refuses = True
        else:
            self._wait = asyncio.create_task(self._refuse_later())

    def undo(self) -> None:
        """Requests are taken as before. Raises RequestError if the process is about to end."""
        if self._is_for_good:
            raise _draining()
        if self._wait is not None:
            self._wait.cancel()
        self.is_asked = False
        self.refuses = False
        self.on_change(True)

    async def _refuse_later(self) -> None:
        await asyncio.sleep(self._delay)
        self.refuses = True

    async def finished(self) -> None:
        """Returns when requests are refused and none is open."""
        while not self.refuses or self.open_calls:
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
