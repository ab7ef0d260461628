"""What goes back over ASGI: JSON, the error object, server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from ..errors import RequestError

DONE = b"data: [DONE]\n\n"

to_json = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def error_object(error: RequestError) -> dict[str, Any]:
    """`code` is a string or null, never a number."""
    names = ("message", "type", "param", "code")
    return {"error": {name: getattr(error, name) for name in names}}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.status == 503:
        headers["retry-after"] = str(error.retry_after or 1)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):  # the rest of the body is not read
        headers["connection"] = "close"
    return json_response(error_object(error), error.status, headers)
