"""The HTTP application: which path is served by whom, and who may call it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from ..config import ServerArgs
from ..errors import RequestError
from . import admin, native
from .auth import Access, Auth
from .exchange import Endpoint
from .gate import Gate
from .openai_chat import chat_completions
from .openai_completions import completions
from .protocol import AbortBody, ChatBody, CompletionBody, DetokenizeBody, NativeBody, TokenizeBody
from .responses import error_response
from .tokenizer_manager import TokenizerManager


def _endpoints(manager: TokenizerManager, health: Callable[[], str | None]) -> list[Endpoint]:
    probes = admin.Probes(health)
    public, client, operator = Access.PUBLIC, Access.CLIENT, Access.ADMIN
    get, post = ("GET",), ("POST",)
    route = partial(Endpoint, manager)
    return [
        route(("/v1/chat/completions",), post, client, chat_completions, ChatBody, True),
        route(("/v1/completions",), post, client, completions, CompletionBody, True),
        route(("/v1/embeddings",), post, client, admin.no_embeddings),
        route(("/v1/models",), get, client, admin.models),
        route(("/v1/models/{model:path}",), get, client, admin.model),
        route(("/generate",), ("POST", "PUT"), client, native.generate, NativeBody, True),
        route(("/tokenize", "/v1/tokenize"), post, client, native.tokenize, TokenizeBody),
        route(("/detokenize", "/v1/detokenize"), post, client, native.detokenize, DetokenizeBody),
        route(("/abort_request",), post, client, native.abort_request, AbortBody),
        route(("/model_info", "/get_model_info"), get, client, admin.model_info),
        route(("/server_info", "/get_server_info"), get, operator, admin.server_info),
        route(("/flush_cache",), ("GET", "POST"), operator, admin.flush_cache, None, True),
        route(("/metrics",), get, public, admin.metrics),
        route(("/health", "/ping"), get, public, probes.health),
        route(("/ready",), get, public, probes.ready),
        route(("/health_generate",), get, public, probes.generate),
    ]


def create_app(
    args: ServerArgs, manager: TokenizerManager, *, health: Callable[[], str | None] = lambda: None
) -> FastAPI:
    """The application over `manager`. `health` tells why the engine is not alive, or None; it is
    called on every /health and must be cheap. Raises ConfigError on an unreadable key file."""
    endpoints = _endpoints(manager, health)
    app = FastAPI(
        title="Radix",
        version=__version__,
        docs_url="/docs" if args.enable_docs else None,
        openapi_url="/openapi.json" if args.enable_docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    access = {}
    for endpoint in endpoints:
        for path in endpoint.paths:
            app.router.routes.append(Route(path, endpoint, methods=list(endpoint.methods)))
            access[path] = endpoint.access
    app.openapi = lambda: _openapi(endpoints)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _not_found)
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


async def _not_found(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in our shape."""
    assert isinstance(error, HTTPException)
    if error.status_code != 405:
        return error_response(RequestError(error.status_code, "not_found", "no such path"))
    allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    refused = RequestError(405, "method_not_allowed", f"this path takes {allow}")
    return error_response(refused, {"allow": allow})


def _openapi(endpoints: list[Endpoint]) -> dict[str, Any]:
    """OpenAPI for /docs, from the body structs."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    references, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, references, strict=True))
    result: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation: dict[str, Any] = {"responses": {"200": {"description": "OK"}}}
        if endpoint.body is not None:
            content = {"application/json": {"schema": schema_of[endpoint.body]}}
            operation["requestBody"] = {"required": True, "content": content}
        for path in endpoint.paths:
            methods = dict.fromkeys(map(str.lower, endpoint.methods), operation)
            result[path.replace(":path", "")] = methods
    info = {"title": "Radix", "version": __version__}
    schemas = {"schemas": components}
    return {"openapi": "3.1.0", "info": info, "paths": result, "components": schemas}
