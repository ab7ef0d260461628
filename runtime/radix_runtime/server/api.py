"""The HTTP application: which path is served by whom, and who may call it."""

from __future__ import annotations

from collections.abc import Callable
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
from . import admin, native, openai, protocol
from .auth import Access, Auth
from .exchange import Endpoint, Gate, error_response
from .tokenizer_manager import TokenizerManager


def _endpoints(health: Callable[[], str | None]) -> list[Endpoint]:
    probes = admin.Probes(health)
    public, client, operator = Access
    get, post = ("GET",), ("POST",)
    return [
        Endpoint(("/v1/chat/completions",), post, client, openai.chat, protocol.ChatBody, True),
        Endpoint(("/v1/completions",), post, client, openai.completions, protocol.CompletionBody, True),
        Endpoint(("/v1/embeddings",), post, client, admin.no_embeddings),
        Endpoint(("/v1/models",), get, client, admin.models),
        Endpoint(("/v1/models/{model:path}",), get, client, admin.model),
        Endpoint(("/generate",), ("POST", "PUT"), client, native.generate, protocol.NativeBody, True),
        Endpoint(("/tokenize", "/v1/tokenize"), post, client, native.tokenize, protocol.TokenizeBody),
        Endpoint(("/detokenize", "/v1/detokenize"), post, client, native.detokenize, protocol.DetokenizeBody),
        Endpoint(("/abort_request",), post, client, native.abort_request, protocol.AbortBody),
        Endpoint(("/model_info", "/get_model_info"), get, client, admin.model_info),
        Endpoint(("/server_info", "/get_server_info"), get, operator, admin.server_info),
        Endpoint(("/flush_cache",), ("GET", "POST"), operator, admin.flush_cache, None, True),
        Endpoint(("/metrics",), get, public, admin.metrics),
        Endpoint(("/health", "/ping"), get, public, probes.health),
        Endpoint(("/ready",), get, public, probes.ready),
        Endpoint(("/health_generate",), get, public, probes.generate),
    ]


def create_app(
    args: ServerArgs, manager: TokenizerManager, *, health: Callable[[], str | None] = lambda: None
) -> FastAPI:
    """The application over `manager`. `health` tells why the engine is not alive, or None; it is called on every
    /health and must be cheap. Raises ConfigError on an unreadable key file."""
    endpoints = _endpoints(health)
    docs_url, openapi_url = ("/docs", "/openapi.json") if args.enable_docs else (None, None)
    app = FastAPI(docs_url=docs_url, openapi_url=openapi_url, redoc_url=None, redirect_slashes=False)
    paths = {path: endpoint for endpoint in endpoints for path in endpoint.paths}
    app.router.routes += [Route(path, endpoint, methods=endpoint.methods) for path, endpoint in paths.items()]
    app.openapi = lambda: _openapi(paths)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _not_found)
    access = {path: endpoint.access for path, endpoint in paths.items()}
    app.add_middleware(Gate, manager=manager, auth=Auth(args, access))
    return app


def uvicorn_options(args: ServerArgs) -> dict[str, Any]:
    """Keyword arguments for uvicorn.Config. Header limits are ours (exchange.py) up to the size at which the parser
    gives up; h11 because it is the parser that has such a size."""
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
    return error_response(RequestError(405, "method_not_allowed", f"this path takes {allow}"), allow=allow)


def _openapi(paths: dict[str, Endpoint]) -> dict[str, Any]:
    """OpenAPI for /docs, from the body structs."""
    bodies = {endpoint.body for endpoint in paths.values()} - {None}
    references, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, references, strict=True))
    operations: dict[str, dict[str, Any]] = {}
    for path, endpoint in paths.items():
        operation: dict[str, Any] = {"responses": {"200": {"description": "OK"}}}
        if endpoint.body is not None:
            content = {"application/json": {"schema": schema_of[endpoint.body]}}
            operation["requestBody"] = {"required": True, "content": content}
        operations[path.replace(":path", "")] = {method.lower(): operation for method in endpoint.methods}
    info, schemas = {"title": "Radix", "version": __version__}, {"schemas": components}
    return {"openapi": "3.1.0", "info": info, "paths": operations, "components": schemas}
