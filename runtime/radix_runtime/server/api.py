"""The HTTP application: which path is served by whom, and who may call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Route

from .. import __version__
from ..config import ServerArgs
from ..errors import RequestError
from .admin import Info, Operations, Probes, no_embeddings
from .auth import Access, Auth
from .exchange import Endpoint, Handler, Rules
from .gate import Gate
from .native import AbortRequest, Detokenize, Generate, Tokenize
from .openai_chat import ChatCompletions
from .openai_completions import Completions
from .protocol import (
    AbortBody,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    NativeBody,
    TokenizeBody,
)
from .responses import send_error
from .tokenizer_manager import TokenizerManager


@dataclass(frozen=True, slots=True)
class _Path:
    """`paths`: the first is the name in metrics. `body`: None when the route reads none."""

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    access: Access
    handler: Handler
    body: type[Body] | None = None
    watch: bool = False


def _paths(manager: TokenizerManager, health: Callable[[], str | None]) -> list[_Path]:
    probes, info, operations = Probes(manager, health), Info(manager), Operations(manager)
    public, client, admin = Access.PUBLIC, Access.CLIENT, Access.ADMIN
    get, post = ("GET",), ("POST",)
    return [
        _Path(("/v1/chat/completions",), post, client, ChatCompletions(manager), ChatBody, True),
        _Path(("/v1/completions",), post, client, Completions(manager), CompletionBody, True),
        _Path(("/v1/embeddings",), post, client, no_embeddings),
        _Path(("/v1/models",), get, client, info.models),
        _Path(("/v1/models/{model:path}",), get, client, info.model),
        _Path(("/generate",), ("POST", "PUT"), client, Generate(manager), NativeBody, True),
        _Path(("/tokenize", "/v1/tokenize"), post, client, Tokenize(manager), TokenizeBody),
        _Path(("/detokenize", "/v1/detokenize"), post, client, Detokenize(manager), DetokenizeBody),
        _Path(("/abort_request",), post, client, AbortRequest(manager), AbortBody),
        _Path(("/model_info", "/get_model_info"), get, client, info.model_info),
        _Path(("/server_info", "/get_server_info"), get, admin, info.server_info),
        _Path(("/flush_cache",), ("GET", "POST"), admin, operations.flush_cache, watch=True),
        _Path(("/metrics",), get, public, operations.metrics),
        _Path(("/health", "/ping"), get, public, probes.health),
        _Path(("/ready",), get, public, probes.ready),
        _Path(("/health_generate",), get, public, probes.generate),
    ]


def create_app(
    args: ServerArgs,
    manager: TokenizerManager,
    *,
    health: Callable[[], str | None] = lambda: None,
) -> FastAPI:
    """The application over `manager`. `health` tells why the engine is not alive, or None; it is
    called on every /health and must be cheap. Raises ConfigError on an unreadable key file."""
    paths = _paths(manager, health)
    rules = Rules(args.max_body_size, args.allow_unknown_fields, args.log_requests)
    app = FastAPI(
        title="Radix",
        version=__version__,
        docs_url="/docs" if args.enable_docs else None,
        openapi_url="/openapi.json" if args.enable_docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for entry in paths:
        endpoint = Endpoint(
            entry.paths[0], entry.handler, rules, manager.metrics,
            reads_body=entry.body is not None, watch=entry.watch,
        )  # fmt: skip
        for path in entry.paths:
            app.router.routes.append(Route(path, endpoint, methods=list(entry.methods)))
    app.openapi = lambda: _openapi(paths)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _not_found)
    access = {path: entry.access for entry in paths for path in entry.paths}
    app.add_middleware(Gate, auth=Auth(args, access))
    return app


def uvicorn_options(args: ServerArgs) -> dict[str, Any]:
    """Keyword arguments for uvicorn.Config. Header limits are ours (gate.py) up to the size at
    which the parser gives up; h11 because it is the parser that has such a size."""
    return {
        "http": "h11",
        "lifespan": "off",
        "ws": "none",
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "timeout_keep_alive": 5,
        "h11_max_incomplete_event_size": 256 << 10,
        "log_level": args.log_level,
    }


class _ErrorResponse:
    """An ASGI answer, as Starlette's exception handlers return one."""

    def __init__(self, error: RequestError, headers: list[tuple[bytes, bytes]]) -> None:
        self._error = error
        self._headers = headers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send_error(send, self._error, self._headers)


async def _not_found(request: Any, error: Exception) -> Any:
    """404 and 405 of the router, in our shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        refused = RequestError(405, "method_not_allowed", f"this path takes {allow}")
        return _ErrorResponse(refused, [(b"allow", allow.encode())])
    return _ErrorResponse(RequestError(error.status_code, "not_found", "no such path"), [])


def _openapi(paths: list[_Path]) -> dict[str, Any]:
    """OpenAPI for /docs, from the body structs."""
    bodies = [entry.body for entry in paths if entry.body is not None]
    references, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(bodies, references, strict=True))
    result: dict[str, Any] = {}
    for entry in paths:
        operation: dict[str, Any] = {"responses": {"200": {"description": "OK"}}}
        if entry.body is not None:
            content = {"application/json": {"schema": schema_of[entry.body]}}
            operation["requestBody"] = {"required": True, "content": content}
        for path in entry.paths:
            name = path.replace(":path", "")
            result[name] = {method.lower(): operation for method in entry.methods}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Radix", "version": __version__},
        "paths": result,
        "components": {"schemas": components},
    }
