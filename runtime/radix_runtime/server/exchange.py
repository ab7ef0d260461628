"""One HTTP call: its body within limits, its answer, and the watch for a client that goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from ..errors import RequestError
from ..log import get_logger
from .metrics import Metrics
from .protocol import B, decode_body
from .responses import EventStream, Receive, Scope, Send, send_body, send_error, to_json

BODY_IDLE = 10.0  # seconds without a byte of the body

log = get_logger(__name__)

Handler = Callable[["Exchange"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Rules:
    max_body: int
    lenient: bool
    log_requests: bool


class Exchange:
    """What a handler sees of a call. `started` is of time.perf_counter()."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, rules: Rules) -> None:
        self.scope = scope
        self.receive = receive
        self.rules = rules
        self.started = time.perf_counter()
        self.status = 0
        self.body = b""
        self._send = send
        self.events = EventStream(self._sending)

    async def _sending(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    @property
    def is_admin(self) -> bool:
        return bool(self.scope["radix.is_admin"])

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.scope.get("query_string", b"").decode("latin-1")))

    def decode(self, kind: type[B]) -> tuple[B, list[str]]:
        """The body as `kind`, and warnings to hand back. Raises RequestError."""
        return decode_body(kind, self.body, lenient=self.rules.lenient)

    async def json(self, value: Any, status: int = 200) -> None:
        await send_body(self._sending, to_json(value), status=status)

    async def raw(self, body: bytes, content_type: bytes, status: int = 200) -> None:
        await send_body(self._sending, body, status=status, content_type=content_type)

    async def fail(self, error: RequestError) -> None:
        """The error object; after the first event an error event and no [DONE]."""
        if self.events.started:
            await self.events.fail(error)
        elif self.status == 0:
            await send_error(self._sending, error)

    async def read_body(self) -> None:
        """Raises RequestError 413, 415 or 408, ClientGone."""
        headers: dict[bytes, bytes] = dict(self.scope["headers"])
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 18 or int(declared) > self.rules.max_body:
            raise self._too_large()
        media = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if media != b"application/json":
            raise RequestError(
                415, "unsupported_media_type", "the content type must be application/json"
            )
        self.body = await self._receive_all()

    async def _receive_all(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            try:
                message = await asyncio.wait_for(self.receive(), BODY_IDLE)
            except (asyncio.TimeoutError, TimeoutError):
                raise RequestError(408, "request_timeout", "the body did not arrive") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > self.rules.max_body:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_large(self) -> RequestError:
        limit = self.rules.max_body
        return RequestError(413, "request_too_large", f"the body may have {limit} bytes")


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class Endpoint:
    """An ASGI application for one route. `watch`: the handler is cancelled when the client goes
    away. Whatever goes wrong becomes the error object; details go to the log only."""

    def __init__(
        self,
        name: str,
        handler: Handler,
        rules: Rules,
        metrics: Metrics,
        *,
        reads_body: bool,
        watch: bool = False,
    ) -> None:
        self._name = name
        self._handler = handler
        self._rules = rules
        self._metrics = metrics
        self._reads_body = reads_body
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._rules)
        try:
            await self._run(exchange)
        except ClientGone:
            exchange.status = 499
        except RequestError as error:
            await exchange.fail(error)
        except Exception:
            log.exception("request %s failed", scope["radix.request_id"])
            await exchange.fail(RequestError(500, "internal_error", "internal error"))
        finally:
            self._metrics.observe_http(self._name, exchange.status)
            if self._rules.log_requests:
                log.info(
                    "%s %s %s %d %.0f ms", scope["radix.request_id"], scope["method"], self._name,
                    exchange.status, 1000 * (time.perf_counter() - exchange.started),
                )  # fmt: skip

    async def _run(self, exchange: Exchange) -> None:
        if self._reads_body:
            await exchange.read_body()
        if self._watch:
            await _while_connected(_call(self._handler, exchange), exchange.receive)
        else:
            await self._handler(exchange)


async def _call(handler: Handler, exchange: Exchange) -> None:
    await handler(exchange)


async def _while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs `work` to its end; raises ClientGone after having cancelled it on a disconnect."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
