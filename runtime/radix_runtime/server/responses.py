"""What goes back over ASGI: JSON, the error object, server-sent events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from ..errors import RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_JSON = (b"content-type", b"application/json")
_SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"

to_json = msgspec.json.Encoder().encode


def error_object(error: RequestError) -> dict[str, Any]:
    """`code` is a string or null, never a number."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


async def send_body(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    content_type: bytes = _JSON[1],
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    start_headers: Headers = [
        (_JSON[0], content_type),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": start_headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: RequestError, headers: Headers | None = None) -> None:
    extra: Headers = list(headers or ())
    if error.retry_after is not None:
        extra.append((b"retry-after", str(error.retry_after).encode()))
    elif error.status == 503:
        extra.append((b"retry-after", b"1"))
    if error.status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    if error.status in (408, 413):  # the rest of the body is not read
        extra.append((b"connection", b"close"))
    await send_body(send, to_json(error_object(error)), status=error.status, headers=extra)


class EventStream:
    """Frames of one answer. The status line goes out with the first of them, so that an error
    before it can still choose its own status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, frames: bytes, *, last: bool = False) -> None:
        """Waits while the client does not read; the caller joins what comes meanwhile."""
        if not self.started:
            self.started = True
            start = {"type": "http.response.start", "status": 200, "headers": list(_SSE_HEADERS)}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": frames, "more_body": not last})

    async def done(self, frames: bytes = b"") -> None:
        await self.write(frames + DONE, last=True)

    async def fail(self, error: RequestError) -> None:
        """One error event, then the end without [DONE]."""
        await self.write(event(error_object(error)), last=True)


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
