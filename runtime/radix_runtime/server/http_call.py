"""One HTTP call: its headers and body within limits, and its answer, whole or as events."""

import asyncio
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..errors import RequestError
from .admission import Place
from .auth import Caller
from .body_decoder import BodyDecoder
from .chunk_writer import CHUNKS, ChunkWriter
from .incoming_body import CYCLE, IncomingBody
from .json_pieces import json_pieces, to_json
from .tokenizer_manager import TokenizerManager
from .turns import SLICE_BYTES, SLICE_SECONDS, in_slices

_MAX_HEADER_BYTES = 64 << 10
_MAX_HEADERS = 100
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")  # a client's own that is kept
_CLOSE = (b"connection", b"close")
_EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
MESSAGES_PATH = "/v1/messages"  # and below it, Anthropic's API
CLIENT_GONE = 499  # the status of a call whose client went away, as nginx has it


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def event_pieces(values: Iterable[Any]) -> Iterator[bytes]:
    """Server-sent events of values that may take long to encode (`json_pieces`); None is none."""
    for value in values:
        if value is None:
            yield b""
            continue
        yield b"data: "
        yield from json_pieces(value)
        yield b"\n\n"


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_object(error: RequestError, path: str = "") -> dict[str, Any]:
    """The body of every error. `code` is a string or null, never a number. On the paths of
    Anthropic's API it has that API's shape and types, too."""
    inner = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    if not path.startswith(MESSAGES_PATH):
        return {"error": inner}
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    inner["type"] = _ANTHROPIC_TYPES.get(error.status, default)
    return {"type": "error", "error": inner}


def error_body(error: RequestError, path: str = "") -> bytes:
    """The error object as JSON; `path` is that of the call."""
    return to_json(error_object(error, path))


def error_headers(error: RequestError) -> dict[str, str]:
    """The headers that belong to the status of an error."""
    if error.status in (429, 503):
        return {"retry-after": str(error.retry_after or 1)}
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    if error.status in (408, 413):
        return {"connection": "close"}  # the rest of the body is not read
    return {}


def error_response(error: RequestError, path: str = "", **headers: str) -> Response:
    """The answer to a call of `path` that failed before anything was sent; `headers` are added to
    those that belong to the status."""
    return Response(
        error_body(error, path),
        status_code=error.status,
        headers={**error_headers(error), **headers},
        media_type="application/json",
    )


class HttpCall(Request):
    """What a handler sees of a call, and how it answers.

    `id` is the client's x-request-id or a new one. `started`: time.perf_counter(). `route` names
    the endpoint in metrics; "" until the call has reached one. `caller`: who it is. `warnings` go
    back with the answer. `status`: what was sent; 0: nothing so far. `incoming`: its body. `place`:
    what it holds of the queue, if it generates. `chunks` writes events at once while no `write` is
    under way, once the first has gone out; None where the server has no such way."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        manager: TokenizerManager,
        bodies: BodyDecoder,
    ) -> None:
        super().__init__(scope, receive, send)
        self.manager = manager
        self.bodies = bodies
        self.started = time.perf_counter()
        self.status = 0
        self.warnings: list[str] = []
        self.route = ""
        self.caller = Caller()
        self.place: Place | None = None
        self.chunks: ChunkWriter | None = None
        self._streaming = False
        self.incoming = IncomingBody(headers=self.headers, receive=receive, cycle=scope[CYCLE])
        given = self.headers.get("x-request-id", "")
        self.id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)

    # The answer ---------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """The ASGI `send` of everything below: adds x-request-id and notes the status. An answer
        ends when the body of the request has been read or given up."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message["headers"], (b"x-request-id", self.id.encode())]
            # While it drains, the next request is for another server.
            is_last = self.manager.drain.refuses or self.incoming.ends_connection
            if is_last and _CLOSE not in headers:
                headers.append(_CLOSE)
            message["headers"] = headers
        elif not message.get("more_body", False) and self.incoming.has_rest:
            await self._send({**message, "more_body": True})
            await self.incoming.drop_rest()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def respond(self, response: Response) -> None:
        """Answers with a response of any kind."""
        await response(self.scope, self.receive, self.send)

    async def answer(self, value: Any) -> None:
        """Answers with JSON; an object also gets the warnings."""
        if self.warnings and isinstance(value, dict):
            value = {**value, "warnings": self.warnings}
        await self.respond(Response(to_json(value), media_type="application/json"))

    async def answer_in_pieces(self, value: Any) -> None:
        """Answers with a JSON value that may take long to encode (`json_pieces`): the event loop
        serves others in between."""
        if self.warnings and isinstance(value, dict):
            value = {**value, "warnings": self.warnings}
        headers = Headers({"content-type": "application/json"}).raw
        parts = in_slices(json_pieces(value))
        held = await anext(parts)
        async for part in parts:
            if self.status == 0:
                await self.send({"type": "http.response.start", "status": 200, "headers": headers})
            await self.send({"type": "http.response.body", "body": held, "more_body": True})
            held = part
        if self.status == 0:
            await self.respond(Response(held, media_type="application/json"))
        else:
            await self.send({"type": "http.response.body", "body": held, "more_body": False})

    async def write(self, frames: bytes, *, last: bool = False) -> None:
        """Sends events; the status line goes out with the first. Waits while the client does not
        read."""
        if not self._streaming:
            self._streaming = True
            self.chunks = self.scope.get(CHUNKS)
            headers = Headers(_EVENT_STREAM).raw
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": frames, "more_body": not last})

    async def write_in_slices(self, pieces: Iterator[bytes]) -> None:
        """Sends events that are made as they are sent; every few milliseconds the event loop has
        its turn. Most are a single short one."""
        parts = []
        size = 0
        end = time.perf_counter() + SLICE_SECONDS
        for piece in pieces:
            parts.append(piece)
            size += len(piece)
            if size < SLICE_BYTES and time.perf_counter() < end:
                continue
            if size:
                await self.write(b"".join(parts))
            await asyncio.sleep(0)
            parts = []
            size = 0
            end = time.perf_counter() + SLICE_SECONDS
        if size:
            await self.write(parts[0] if len(parts) == 1 else b"".join(parts))

    async def fail(self, error: RequestError) -> None:
        """Answers with the error object; after the first event as an event, and no [DONE]."""
        path = self.scope["path"]
        if self.status == 0:
            await self.respond(error_response(error, path))
        elif self._streaming:
            name = b"event: error\n" if path.startswith(MESSAGES_PATH) else b""
            await self.write(name + event(error_object(error, path)), last=True)

    # What the client sent -----------------------------------------------------------------

    def check_headers(self) -> None:
        """Raises RequestError 431 or 400."""
        headers = self.scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        size += len(self.scope["path"]) + len(self.scope.get("query_string", b""))
        if size > _MAX_HEADER_BYTES or len(headers) > _MAX_HEADERS:
            raise RequestError(
                status=431,
                code="headers_too_large",
                message=f"at most {_MAX_HEADERS} headers with {_MAX_HEADER_BYTES} bytes together",
            )
        if self.headers.get("upgrade", "").lower() == "websocket":  # other upgrades are only offers
            raise RequestError(
                status=400,
                code="unsupported_upgrade",
                message="this server takes no WebSocket connections",
            )
