"""One connection of a client: uvicorn's, with bounds, and with our own words for what fails."""

import asyncio
import secrets
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..errors import RequestError
from .chunk_writer import CHUNKS, ChunkWriter
from .http_call import error_body, error_headers
from .incoming_body import CYCLE
from .pace import FREE_BYTES, PacedFlow, Turns
from .shared_numbers import CONNECTIONS, SharedNumbers

HEADER_SECONDS = 10.0  # until the headers of a request must be there
_MAX_HEADER_BYTES = 256 << 10  # at which parsing ends; our own limit is lower
_LINGER = 1.0  # seconds that a refused client's bytes are read and dropped


class Connection(HttpToolsProtocol):
    """A connection over which requests come one after the other.

    Beside what uvicorn does: there are at most `max_connections` in all API processes, which tell
    each other in `numbers`; headers are bounded in time and size; and what the parser refuses, or
    is refused here, is answered with the error object. The answer is not lost to a reset, because
    the client's bytes are read on for a moment. Large bodies are read in `turns`.
    """

    flow: PacedFlow

    def __init__(
        self, *args: Any, max_connections: int, numbers: SharedNumbers, turns: Turns, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._max_connections = max_connections
        self._numbers = numbers
        self._turns = turns
        self._body_bytes = 0  # of the request's body so far
        self._in_headers = False
        self._header_bytes = 0
        self._patience: asyncio.TimerHandle | None = None  # until the headers must have come
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.flow = PacedFlow(transport, self._turns)
        count = len(self.connections)
        self._numbers.publish(CONNECTIONS, count)
        if count + self._numbers.elsewhere(CONNECTIONS) > self._max_connections:
            text = f"{self._max_connections} connections are open"
            self._refuse(RequestError(status=503, code="engine_overloaded", message=text))
        else:
            self._patience = self.loop.call_later(HEADER_SECONDS, self._headers_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or this side has ended the connection."""
        self._stop_waiting()
        super().connection_lost(exc)
        self._numbers.publish(CONNECTIONS, len(self.connections))

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if self._is_refused:
            self.flow.pause_until_turn()
            self.flow.resume_reading()
            return
        super().data_received(data)
        if not self._in_headers:
            self._stop_waiting()
            self._pace(len(data))
            return
        self._header_bytes += len(data)
        if self._header_bytes > _MAX_HEADER_BYTES:
            text = f"the headers have more than {_MAX_HEADER_BYTES} bytes"
            self._refuse(RequestError(status=431, code="headers_too_large", message=text))
        elif self._patience is None:
            self._patience = self.loop.call_later(HEADER_SECONDS, self._headers_late)

    def _pace(self, size: int) -> None:
        """Has the body of a request, of which so many bytes have come, wait for its turn if it is a
        large one."""
        if self.cycle is None or not self.cycle.more_body:
            return
        self._body_bytes += size
        if self._body_bytes > FREE_BYTES:
            self.flow.pause_until_turn()  # until the application asks for more

    def on_message_begin(self) -> None:
        """The parser has found the first byte of a request."""
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0

    def on_headers_complete(self) -> None:
        """The parser has all headers of a request."""
        self._in_headers = False
        if not self.url.startswith(b"/"):  # a proxy's form, whose host would stand for the header's
            raise ValueError("the target of a request must be a path")
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # else an upgrade is refused
            scope = cast(dict[str, Any], self.scope)
            scope[CYCLE] = self.cycle
            scope[CHUNKS] = ChunkWriter(self.cycle)
            self._body_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """The parser cannot make a request of what came."""
        self._refuse(RequestError(status=400, code="invalid_http", message="invalid HTTP request"))

    def _headers_late(self) -> None:
        if self._in_headers:
            text = f"the headers did not arrive within {HEADER_SECONDS:g} s"
            self._refuse(RequestError(status=408, code="request_timeout", message=text))
        else:
            self.transport.close()  # nothing came at all

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _refuse(self, error: RequestError) -> None:
        """Answers outside of a request, unless an answer is under way, and ends the connection."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        self._is_refused = True
        body = error_body(error)
        headers = {
            **error_headers(error),
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": secrets.token_hex(16),
        }
        lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self.transport.write_eof()
        self.loop.call_later(_LINGER, self.transport.close)
