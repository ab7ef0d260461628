"""Gate: the outermost layer. Request id, header limits, keys; then the routes."""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RequestError
from ..log import get_logger
from .auth import Auth
from .responses import error_response

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 100
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

log = get_logger(__name__)


class Gate:
    """ASGI middleware. Puts `radix.request_id` (str) and `radix.is_admin` into the scope, and the
    x-request-id header on every answer."""

    def __init__(self, app: ASGIApp, auth: Auth) -> None:
        self._app = app
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # websockets are refused by the server itself
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            _check_headers(scope)
            scope["radix.request_id"] = request_id.decode()
            scope["radix.is_admin"] = self._auth.check(scope["path"], scope["headers"])
            await self._app(scope, receive, sending)
        except RequestError as error:
            await error_response(error)(scope, receive, sending)
        except Exception:
            log.exception("request %s failed", request_id.decode())
            if not started:
                broken = RequestError(500, "internal_error", "internal error")
                await error_response(broken)(scope, receive, sending)


def _request_id(scope: Scope) -> bytes:
    """The client's own x-request-id if it is a plain one, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value)
    return secrets.token_hex(16).encode()


def _check_headers(scope: Scope) -> None:
    headers = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    size += len(scope["path"]) + len(scope.get("query_string", b""))
    if size > MAX_HEADER_BYTES or len(headers) > MAX_HEADERS:
        limits = f"{MAX_HEADERS} headers with {MAX_HEADER_BYTES} bytes together"
        raise RequestError(431, "headers_too_large", f"at most {limits}")
