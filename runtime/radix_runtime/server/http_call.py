"""One HTTP call, from the headers to the last byte: limits, keys, body, answer, a client that goes
away."""

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config import ServerArgs
from ..errors import ConfigError, RequestError
from .protocol import decode_body
from .tokenizer_manager import TokenizerManager

BODY_IDLE = 10.0  # seconds without a byte of the body
_MAX_HEADER_BYTES = 64 << 10
_MAX_HEADERS = 100
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")  # one of the client's that is kept
_SSE = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

Access = Enum(
    "Access", "PUBLIC CLIENT ADMIN"
)  # a route that is not listed as public needs a key when one is set
to_json = msgspec.json.Encoder().encode
log = logging.getLogger(__name__)


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def error_object(error: RequestError) -> dict[str, Any]:
    """`code` is a string or null, never a number."""
    return {"error": {name: getattr(error, name) for name in ("message", "type", "param", "code")}}


def error_response(error: RequestError, **headers: str) -> Response:
    close = {"connection": "close"}  # the rest of the body is not read
    special = {401: {"www-authenticate": "Bearer"}, 408: close, 413: close}
    headers |= (
        {"retry-after": str(error.retry_after or 1)}
        if error.status == 503
        else special.get(error.status, {})
    )
    return Response(to_json(error_object(error)), error.status, headers, "application/json")


class Exchange(Request):
    """What a handler sees of a call. `started`: time.perf_counter(); `warnings` go back; `status`
    0: none was sent."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, manager: TokenizerManager
    ) -> None:
        super().__init__(scope, receive, send)
        self.manager, self.started, self.status = manager, time.perf_counter(), 0
        self.warnings: list[str] = []
        self.route = ""  # its name in metrics; none: it has not come so far
        self.is_admin = self._streaming = False
        given = self.headers.get("x-request-id", "")
        self.id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.id.encode())]
        await self._send(message)

    async def respond(self, response: Response) -> None:
        await response(self.scope, self.receive, self.send)

    async def answer(self, value: Any) -> None:
        if self.warnings and isinstance(value, dict):
            value = {**value, "warnings": self.warnings}
        await self.respond(Response(to_json(value), media_type="application/json"))

    async def write(self, frames: bytes, *, last: bool = False) -> None:
        """Events; the status line goes out with the first. Waits while the client does not read."""
        if not self._streaming:
            self._streaming = True
            await self.send(
                {"type": "http.response.start", "status": 200, "headers": Headers(_SSE).raw}
            )
        await self.send({"type": "http.response.body", "body": frames, "more_body": not last})

    async def fail(self, error: RequestError) -> None:
        """The error object; after the first event an error event and no [DONE]."""
        if self.status == 0:
            await self.respond(error_response(error))
        elif self._streaming:
            await self.write(event(error_object(error)), last=True)

    def check_headers(self) -> None:
        headers = self.scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        size += len(self.scope["path"]) + len(self.scope.get("query_string", b""))
        if size > _MAX_HEADER_BYTES or len(headers) > _MAX_HEADERS:
            text = f"at most {_MAX_HEADERS} headers with {_MAX_HEADER_BYTES} bytes together"
            raise RequestError(431, "headers_too_large", text)
        if self.headers.get("upgrade", "").lower() == "websocket":  # other upgrades are only offers
            raise RequestError(
                400, "unsupported_upgrade", "this server takes no WebSocket connections"
            )

    async def read_body(self) -> bytes:
        """Raises RequestError 413, 415 or 408, ClientDisconnect."""
        limit = self.manager.args.max_body_size
        too_large = RequestError(413, "request_too_large", f"the body may have {limit} bytes")
        if (
            int(self.headers.get("content-length", 0)) > limit
        ):  # the parser has refused what is no number
            raise too_large
        if self.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise RequestError(
                415, "unsupported_media_type", "the content type must be application/json"
            )
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestError(
                415, "unsupported_media_type", "Content-Encoding: a body must not be compressed"
            )
        body, parts = bytearray(), self.stream()
        try:
            while (part := await asyncio.wait_for(anext(parts, None), BODY_IDLE)) is not None:
                body += part
                if len(body) > limit:
                    raise too_large
        except asyncio.TimeoutError:
            raise RequestError(408, "request_timeout", "the body did not arrive") from None
        return bytes(body)


class Auth:
    """Keys are kept as digests and compared in constant time, all of them each time."""

    def __init__(self, args: ServerArgs, routes: Mapping[str, Access]) -> None:
        given = [args.api_key, *_keys_of_file(args.api_key_file)], [args.admin_api_key]
        self._keys = [
            [sha256(key.encode()).digest() for key in keys if key is not None] for keys in given
        ]
        self._routes = dict(routes)

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the caller may do what only an admin may. `path`: never of a rebuilt URL. Raises
        RequestError."""
        access = self._routes.get(path, Access.CLIENT)
        if access is Access.PUBLIC:
            return False
        clients, admins = self._keys
        sent = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = sent[0].partition(b" ") if len(sent) == 1 else (b"", b"", b"")
        digest = sha256(key).digest() if scheme.lower() == b"bearer" and key else b""
        # Sums, so that no comparison is left out.
        is_admin = sum(hmac.compare_digest(digest, key) for key in admins) > 0
        is_client = sum(hmac.compare_digest(digest, key) for key in clients) > 0 or is_admin
        for_admins = access is Access.ADMIN and bool(admins)
        if (clients or for_admins) and not is_client:
            raise RequestError(401, "invalid_api_key", "a valid API key is needed")
        if for_admins and not is_admin:
            raise RequestError(403, "admin_key_required", "this needs the admin key")
        return is_admin or not admins


def _keys_of_file(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {error}") from error
    if not (keys := [line.strip() for line in lines if line.strip()]):
        raise ConfigError(f"--api-key-file: {path} holds no key")
    return keys


class Gate:
    """ASGI middleware around all routes. Whatever goes wrong becomes the error object; details go
    to the log only."""

    def __init__(self, app: ASGIApp, manager: TokenizerManager, auth: Auth) -> None:
        self._app, self._manager, self._auth = app, manager, auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            log.exception("request %s failed", exchange.id)
            await exchange.fail(RequestError(500, "internal_error", "internal error"))
        finally:
            self._manager.metrics.http.labels(exchange.route or "other", str(exchange.status)).inc()
            if (
                self._manager.args.log_requests
            ):  # also what reached no route, by an escaped part of its path
                what = (
                    exchange.id,
                    exchange.method,
                    exchange.route or ascii(scope["path"][:64]),
                    exchange.status,
                )
                log.info(
                    "%s %s %s %d %.0f ms", *what, 1000 * (time.perf_counter() - exchange.started)
                )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route; the first of `paths` is its name in metrics. `watch`: cancelled when the client goes
    away."""

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    access: Access
    handler: Callable[..., Coroutine[Any, Any, None]]
    body: type[msgspec.Struct] | None = None
    watch: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["radix.exchange"]
        exchange.route, manager = self.paths[0], exchange.manager
        if self.body is None:
            work = self.handler(exchange)
        else:
            data = await exchange.read_body()
            if self.watch:  # what runs long needs the engine
                manager.require_ready()
            lenient, defaults = manager.args.allow_unknown_fields, manager.sampling_defaults
            body, exchange.warnings = decode_body(self.body, data, lenient, defaults)
            manager.check_model(getattr(body, "model", None))
            work = self.handler(exchange, body)
        await (_while_connected(receive, work) if self.watch else work)


# Runs the handler to its end; raises ClientDisconnect after having cancelled it on a disconnect.
async def _while_connected(receive: Receive, handler: Coroutine[Any, Any, None]) -> None:
    work = asyncio.create_task(handler)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:
        if watcher.done():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
