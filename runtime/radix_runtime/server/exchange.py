"""One HTTP call, from the headers to the last byte: limits, keys, body, answer, a client that goes away."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RequestError
from ..log import get_logger
from .auth import Access, Auth
from .protocol import Body, decode_body
from .tokenizer_manager import TokenizerManager

BODY_IDLE = 10.0  # seconds without a byte of the body
_MAX_HEADER_BYTES = 64 << 10
_MAX_HEADERS = 100
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

to_json = msgspec.json.Encoder().encode
log = get_logger(__name__)


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def error_object(error: RequestError) -> dict[str, Any]:
    """`code` is a string or null, never a number."""
    return {"error": {name: getattr(error, name) for name in ("message", "type", "param", "code")}}


def error_response(error: RequestError, **headers: str) -> Response:
    if error.status == 503:
        headers["retry-after"] = str(error.retry_after or 1)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):  # the rest of the body is not read
        headers["connection"] = "close"
    return Response(to_json(error_object(error)), error.status, headers, "application/json")


class Exchange(Request):
    """What a handler sees of a call. `started` is of time.perf_counter(); `warnings` go back with the answer; `status`
    is 0 until one was sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, manager: TokenizerManager) -> None:
        super().__init__(scope, receive, send)
        self.manager = manager
        self.started = time.perf_counter()
        self.status = 0
        self.warnings: list[str] = []
        self.route = ""  # its name in metrics; none: it has not come so far
        self.is_admin = False
        # The client's own x-request-id if it is a plain one.
        given = (value for name, value in scope["headers"] if name == b"x-request-id" and _REQUEST_ID.fullmatch(value))
        self.id: bytes = next(given, None) or secrets.token_hex(16).encode()
        self._streaming = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.id)]
        await self._send(message)

    async def respond(self, response: Response) -> None:
        await response(self.scope, self.receive, self.send)

    async def answer(self, value: Any) -> None:
        if self.warnings and isinstance(value, dict):
            value = {**value, "warnings": self.warnings}
        await self.respond(Response(to_json(value), media_type="application/json"))

    async def write(self, frames: bytes, *, last: bool = False) -> None:
        """Events. The status line goes out with the first, so that an error before it can still choose its own status.
        Waits while the client does not read; the caller joins what comes meanwhile."""
        if not self._streaming:
            self._streaming = True
            await self.send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        await self.send({"type": "http.response.body", "body": frames, "more_body": not last})

    async def fail(self, error: RequestError) -> None:
        """The error object; after the first event an error event and no [DONE]."""
        if self.status == 0:
            await self.respond(error_response(error))
        elif self._streaming:
            await self.write(event(error_object(error)), last=True)

    def check_headers(self) -> None:
        """Raises RequestError 431."""
        headers = self.scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        size += len(self.scope["path"]) + len(self.scope.get("query_string", b""))
        if size > _MAX_HEADER_BYTES or len(headers) > _MAX_HEADERS:
            limits = f"at most {_MAX_HEADERS} headers with {_MAX_HEADER_BYTES} bytes together"
            raise RequestError(431, "headers_too_large", limits)

    async def read_body(self) -> bytes:
        """Raises RequestError 413, 415 or 408, ClientDisconnect."""
        limit = self.manager.args.max_body_size
        too_large = RequestError(413, "request_too_large", f"the body may have {limit} bytes")
        declared = self.headers.get("content-length", "0")
        if not declared.isdecimal() or len(declared) > 18 or int(declared) > limit:
            raise too_large
        if self.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise RequestError(415, "unsupported_media_type", "the content type must be application/json")
        body, parts = bytearray(), self.stream()
        try:
            while (part := await asyncio.wait_for(anext(parts, None), BODY_IDLE)) is not None:
                body += part
                if len(body) > limit:
                    raise too_large
        except asyncio.TimeoutError:
            raise RequestError(408, "request_timeout", "the body did not arrive") from None
        return bytes(body)


class Gate:
    """ASGI middleware around all routes: makes the Exchange, checks headers and key. Whatever goes wrong becomes the
    error object; details go to the log only."""

    def __init__(self, app: ASGIApp, manager: TokenizerManager, auth: Auth) -> None:
        self._app = app
        self._manager = manager
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # websockets are refused by the server itself
            await self._app(scope, receive, send)
            return
        exchange = scope["radix.exchange"] = Exchange(scope, receive, send, self._manager)
        try:
            exchange.check_headers()
            exchange.is_admin = self._auth.check(scope["path"], scope["headers"])
            await self._app(scope, receive, exchange.send)
        except ClientDisconnect:
            exchange.status = 499
        except RequestError as error:
            await exchange.fail(error)
        except Exception:
            log.exception("request %s failed", exchange.id.decode())
            await exchange.fail(RequestError(500, "internal_error", "internal error"))
        finally:
            if exchange.route:
                self._count(exchange)

    def _count(self, exchange: Exchange) -> None:
        status, milliseconds = exchange.status, 1000 * (time.perf_counter() - exchange.started)
        self._manager.metrics.http.labels(exchange.route, str(status)).inc()
        if self._manager.args.log_requests:
            what = exchange.id.decode(), exchange.method, exchange.route
            log.info("%s %s %s %d %.0f ms", *what, status, milliseconds)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route and its ASGI application. `paths`: the first is the name in metrics. `handler` takes the exchange and, if
    the route has one, its `body`. `watch`: it is cancelled when the client goes away."""

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    access: Access
    handler: Callable[..., Coroutine[Any, Any, None]]
    body: type[Body] | None = None
    watch: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["radix.exchange"]
        exchange.route, manager = self.paths[0], exchange.manager
        given: list[Body] = []
        if self.body is not None:
            data = await exchange.read_body()
            if self.watch:  # what runs long needs the engine
                manager.require_ready()
            body, exchange.warnings = decode_body(self.body, data, lenient=manager.args.allow_unknown_fields)
            manager.check_model(getattr(body, "model", None))
            given.append(body)
        work = self.handler(exchange, *given)
        await (_while_connected(receive, work) if self.watch else work)


async def _while_connected(receive: Receive, handler: Coroutine[Any, Any, None]) -> None:
    """Runs the handler to its end; raises ClientDisconnect after having cancelled it on a disconnect."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.create_task(handler), asyncio.create_task(disconnect())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        work.result()
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
