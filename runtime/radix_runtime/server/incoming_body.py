"""The body of one request as it arrives: within limits, or dropped where nobody wants it."""

import time

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from ..errors import RequestError
from .body_decoder import INLINE_BYTES
from .json_scan import check_shape_aside
from .pace import FREE_BYTES

BODY_IDLE = 10.0  # seconds without a byte of the body
BODY_SECONDS = 60.0  # for all of it
_LINGER = 10.0  # seconds that the rest of an answered call's body is read,
_LINGER_IDLE = 1.0  # that no byte of it may come, and
_LINGER_BYTES = 64 << 20  # that are read of it
CYCLE = "radix.cycle"  # where the scope of a call has uvicorn's RequestResponseCycle


class IncomingBody:
    """What a client sends after the headers of a call, whether it is read or not."""

    def __init__(self, headers: Headers, receive: Receive, cycle: RequestResponseCycle) -> None:
        self._headers = headers
        self._receive = receive
        self._cycle = cycle

    @property
    def has_rest(self) -> bool:
        """Whether something of it has not arrived."""
        return self._cycle.more_body

    @property
    def ends_connection(self) -> bool:
        """Whether an answer that is given now had better be the connection's last: much of the body
        has not arrived, or the client does not send it before it is told to."""
        if not self.has_rest:
            return False
        return self._length > FREE_BYTES or self._cycle.waiting_for_100_continue

    @property
    def _length(self) -> int:
        """As announced; 0 where it was not. The parser has refused what is no number."""
        return int(self._headers.get("content-length", 0))

    async def read(self, limit: int) -> bytes:
        """A JSON body of at most `limit` bytes. Raises RequestError as soon as it is known to be
        refused: 413, 415, 408, or 400 by the shape of its beginning; ClientDisconnect."""
        if self._length > limit:
            raise _too_large(limit)
        self._check_content_type()
        body = bytearray()
        is_checked = False
        end = time.monotonic() + BODY_SECONDS
        has_more = True
        while has_more:
            try:
                part, has_more = await self._next_part(min(BODY_IDLE, end - time.monotonic()))
            except TimeoutError:
                raise _too_late() from None
            body += part
            if len(body) > limit:
                raise _too_large(limit)
            if len(body) > INLINE_BYTES and not is_checked:
                # Whatever is too much at the beginning of a body is too much of the whole.
                await check_shape_aside(bytes(body[:INLINE_BYTES]))
                is_checked = True
        return bytes(body)

    async def drop_rest(self) -> None:
        """Reads what has not arrived, for a while: many clients write all of a body before they
        read, and would find the connection reset. If it has not ended then, the answer ends the
        connection."""
        end = time.monotonic() + _LINGER
        left = _LINGER_BYTES
        try:
            while self.has_rest and left > 0:
                part, _ = await self._next_part(min(_LINGER_IDLE, end - time.monotonic()))
                left -= len(part)
        except (TimeoutError, ClientDisconnect):
            pass
        if self.has_rest:
            self._cycle.keep_alive = False

    async def _next_part(self, seconds: float) -> tuple[bytes, bool]:
        """What comes next, b"" at the end too; whether there is more. Raises TimeoutError,
        ClientDisconnect."""
        with anyio.fail_after(seconds):
            message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        return message.get("body", b""), message.get("more_body", False)

    def _check_content_type(self) -> None:
        kind = self._headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise _unsupported("the content type must be application/json")
        if self._headers.get("content-encoding", "identity").lower() != "identity":
            raise _unsupported("Content-Encoding: a body must not be compressed")


def _too_large(limit: int) -> RequestError:
    return RequestError(
        status=413, code="request_too_large", message=f"the body may have {limit} bytes"
    )


def _too_late() -> RequestError:
    return RequestError(status=408, code="request_timeout", message="the body did not arrive")


def _unsupported(message: str) -> RequestError:
    return RequestError(status=415, code="unsupported_media_type", message=message)
