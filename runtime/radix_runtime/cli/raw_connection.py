"""RawConnection: one connection of a load generator, whose answers are handed on piece by piece."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from .http_stream import HttpAnswer

# Takes status, some bytes of the body, and when they came (time.perf_counter()).
TakePiece = Callable[[int, bytes, float], None]


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended: its status, and when its last bytes came (time.perf_counter(); the
    connection's end where that is the answer's)."""

    status: int
    time: float


class RawConnection(asyncio.Protocol):
    """One connection, which carries one call at a time. `is_open`: it may carry another.
    `has_answered`: a byte of the present call's answer has come."""

    def __init__(self) -> None:
        self.is_open = False
        self.has_answered = False
        self._transport: asyncio.Transport
        self._answer = HttpAnswer()
        self._take: TakePiece
        self._ended: asyncio.Future[Ending] | None = None

    async def exchange(self, request: bytes, take: TakePiece) -> Ending:
        """Sends a request and gives what comes of its answer to `take`. Raises OSError, and
        ValueError for what is no HTTP and for what `take` does not want."""
        self.has_answered = False
        if not self.is_open:
            raise ConnectionResetError("the connection was closed")
        self._answer = HttpAnswer()
        self._take = take
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._ended

    def close(self) -> None:
        """Ends the connection."""
        self.is_open = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        now = time.perf_counter()  # before any work, which is not the server's
        if self._ended is None:  # bytes that nobody has asked for
            self.close()
            return
        self.has_answered = True
        try:
            piece = self._answer.feed(data)
            if piece:
                self._take(self._answer.status, piece, now)
        except ValueError as error:
            self._fail(error)
            return
        if self._answer.is_complete:
            self._finish(now)

    def connection_lost(self, error: Exception | None) -> None:
        """The server has ended it, which may be the end of an answer."""
        self.is_open = False
        if self._ended is None:
            return
        try:
            self._answer.end()
        except ValueError as broken:
            self._fail(error or ConnectionResetError(str(broken)))
            return
        self._finish(time.perf_counter())

    def _finish(self, now: float) -> None:
        ended = self._ended
        self._ended = None
        if not self._answer.keeps_alive:
            self.close()
        if ended is not None and not ended.done():
            ended.set_result(Ending(status=self._answer.status, time=now))

    def _fail(self, error: Exception) -> None:
        ended = self._ended
        self._ended = None
        self.close()
        if ended is not None and not ended.done():
            ended.set_exception(error)
