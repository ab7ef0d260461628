"""One HTTP call: its body within limits, its answer, and the watch for a client that goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import RequestError
from ..log import get_logger
from .auth import Access
from .protocol import B, Body, decode_body
from .responses import error_object, error_response, event, json_response
from .tokenizer_manager import TokenizerManager

BODY_IDLE = 10.0  # seconds without a byte of the body
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

log = get_logger(__name__)

Handler = Callable[["Exchange"], Coroutine[Any, Any, None]]


class Exchange(Request):
    """What a handler sees of a call. `started` is of time.perf_counter(); `warnings` go back with
    the answer; `status` is 0 until one was sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, manager: TokenizerManager) -> None:
        super().__init__(scope, receive, send)
        self.manager = manager
        self.started = time.perf_counter()
        self.status = 0
        self.warnings: list[str] = []
        self._streaming = False

    async def respond(self, response: Response) -> None:
        self.status = response.status_code
        await response(self.scope, self.receive, self._send)

    async def answer(self, value: Any) -> None:
        if self.warnings and isinstance(value, dict):
            value = {**value, "warnings": self.warnings}
        await self.respond(json_response(value))

    async def write(self, frames: bytes, *, last: bool = False) -> None:
        """Events. The status line goes out with the first, so that an error before it can still
        choose its own status. Waits while the client does not read; the caller joins what comes
        meanwhile."""
        if not self._streaming:
            self._streaming, self.status = True, 200
            start = {"type": "http.response.start", "status": 200, "headers": [*_SSE_HEADERS]}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": frames, "more_body": not last})

    async def fail(self, error: RequestError) -> None:
        """The error object; after the first event an error event and no [DONE]."""
        if self.status == 0:
            await self.respond(error_response(error))
        elif self._streaming:
            await self.write(event(error_object(error)), last=True)

    def decode(self, kind: type[B]) -> B:
        """Raises RequestError."""
        lenient = self.manager.args.allow_unknown_fields
        body, self.warnings = decode_body(kind, self._body, lenient=lenient)
        return body

    async def read_body(self) -> None:
        """Raises RequestError 413, 415 or 408, ClientDisconnect."""
        limit = self.manager.args.max_body_size
        too_large = RequestError(413, "request_too_large", f"the body may have {limit} bytes")
        declared = self.headers.get("content-length", "0")
        if not declared.isdecimal() or len(declared) > 18 or int(declared) > limit:
            raise too_large
        media = self.headers.get("content-type", "").split(";")[0].strip().lower()
        if media != "application/json":
            reason = "the content type must be application/json"
            raise RequestError(415, "unsupported_media_type", reason)
        body = bytearray()
        parts = self.stream()
        try:
            while (part := await asyncio.wait_for(anext(parts, None), BODY_IDLE)) is not None:
                body += part
                if len(body) > limit:
                    raise too_large
        except (asyncio.TimeoutError, TimeoutError):
            raise RequestError(408, "request_timeout", "the body did not arrive") from None
        self._body = bytes(body)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route and its ASGI application. `paths`: the first is the name in metrics. `body`: None
    when the route reads none. `watch`: the handler is cancelled when the client goes away.
    Whatever goes wrong becomes the error object; details go to the log only."""

    manager: TokenizerManager
    paths: tuple[str, ...]
    methods: tuple[str, ...]
    access: Access
    handler: Handler
    body: type[Body] | None = None
    watch: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.manager)
        try:
            if self.body is not None:
                await exchange.read_body()
            if self.watch:
                await self._while_connected(exchange)
            else:
                await self.handler(exchange)
        except ClientDisconnect:
            exchange.status = 499
        except RequestError as error:
            await exchange.fail(error)
        except Exception:
            log.exception("request %s failed", scope["radix.request_id"])
            await exchange.fail(RequestError(500, "internal_error", "internal error"))
        finally:
            self.manager.metrics.http.labels(self.paths[0], str(exchange.status)).inc()
            if self.manager.args.log_requests:
                log.info(
                    "%s %s %s %d %.0f ms", scope["radix.request_id"], scope["method"],
                    self.paths[0], exchange.status, 1000 * (time.perf_counter() - exchange.started),
                )  # fmt: skip

    async def _while_connected(self, exchange: Exchange) -> None:
        """Runs the handler to its end; raises ClientDisconnect after having cancelled it on a
        disconnect."""
        work = asyncio.create_task(self.handler(exchange))
        gone = asyncio.create_task(_disconnect(exchange.receive))
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


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
