"""The HTTP application: which path is served by whom, and who may call it."""

import re
from functools import partial
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from .. import __version__
from ..errors import RequestError
from . import admin, protocol
from .anthropic_messages import count_tokens, messages
from .auth import Access, Auth
from .body_decoder import BodyDecoder
from .connection import Connection
from .endpoint import Endpoint
from .gate import Gate
from .http_call import MESSAGES_PATH, error_response
from .openai_chat import chat
from .openai_completions import completions
from .pace import Turns
from .responses import responses
from .sglang_api import abort_request, generate
from .shared_listener import SharingServer
from .shared_numbers import SharedNumbers
from .tokenize_api import detokenize, tokenize
from .tokenizer_manager import TokenizerManager

_PATH_PARAMETER = re.compile(r"\{(\w+)\}")
_MAX_SHOWN = 100  # characters of a client's path that come back
_KEEP_ALIVE = 5  # seconds that an idle connection stays open
_SMALL_BODY = 64 << 10  # bytes, of a route that takes names and switches only

_GENERATION = (
    Endpoint(
        paths=("/v1/chat/completions",),
        methods=("POST",),
        access=Access.CLIENT,
        handler=chat,
        body=protocol.ChatBody,
        watch=True,
        generates=True,
    ),
    Endpoint(
        paths=("/v1/completions",),
        methods=("POST",),
        access=Access.CLIENT,
        handler=completions,
        body=protocol.CompletionBody,
        watch=True,
        generates=True,
    ),
    Endpoint(
        paths=("/v1/responses",),
        methods=("POST",),
        access=Access.CLIENT,
        handler=responses,
        body=protocol.ResponsesBody,
        watch=True,
        generates=True,
    ),
    Endpoint(
        paths=(MESSAGES_PATH,),
        methods=("POST",),
        access=Access.CLIENT,
        handler=messages,
        body=protocol.MessagesBody,
        watch=True,
        generates=True,
    ),
    Endpoint(
        paths=(f"{MESSAGES_PATH}/count_tokens",),
        methods=("POST",),
        access=Access.CLIENT,
        handler=count_tokens,
        body=protocol.CountBody,
    ),
    Endpoint(
        paths=("/generate",),
        methods=("POST", "PUT"),
        access=Access.CLIENT,
        handler=generate,
        body=protocol.GenerateBody,
        watch=True,
        generates=True,
    ),
    Endpoint(
        paths=("/abort_request",),
        methods=("POST",),
        access=Access.CLIENT,
        handler=abort_request,
        body=protocol.AbortBody,
        most_bytes=_SMALL_BODY,
    ),
)
_TEXT = (
    Endpoint(
        paths=("/tokenize", "/v1/tokenize"),
        methods=("POST",),
        access=Access.CLIENT,
        handler=tokenize,
        body=protocol.TokenizeBody,
    ),
    Endpoint(
        paths=("/detokenize", "/v1/detokenize"),
        methods=("POST",),
        access=Access.CLIENT,
        handler=detokenize,
        body=protocol.DetokenizeBody,
    ),
    Endpoint(
        paths=("/v1/embeddings",),
        methods=("POST",),
        access=Access.CLIENT,
        handler=admin.embeddings,
    ),
)
_INFORMATION = (
    Endpoint(
        paths=("/v1/models",),
        methods=("GET",),
        access=Access.CLIENT,
        handler=admin.models,
    ),
    Endpoint(
        paths=("/v1/models/{model:path}",),
        methods=("GET",),
        access=Access.CLIENT,
        handler=admin.model,
    ),
    Endpoint(
        paths=("/model_info", "/get_model_info"),
        methods=("GET",),
        access=Access.CLIENT,
        handler=admin.model_info,
    ),
    Endpoint(
        paths=("/server_info", "/get_server_info"),
        methods=("GET",),
        access=Access.ADMIN,
        handler=admin.server_info,
    ),
    Endpoint(
        paths=("/flush_cache",),
        methods=("GET", "POST"),
        access=Access.ADMIN,
        handler=admin.flush_cache,
        watch=True,
    ),
    Endpoint(
        paths=("/drain",),
        methods=("POST",),
        access=Access.ADMIN,
        handler=admin.drain,
    ),
    Endpoint(
        paths=("/undrain",),
        methods=("POST",),
        access=Access.ADMIN,
        handler=admin.undrain,
    ),
    Endpoint(
        paths=("/start_profile",),
        methods=("POST",),
        access=Access.ADMIN,
        handler=admin.start_profile,
        body=protocol.ProfileBody,
        most_bytes=_SMALL_BODY,
    ),
    Endpoint(
        paths=("/stop_profile",),
        methods=("POST",),
        access=Access.ADMIN,
        handler=admin.stop_profile,
        body=protocol.ProfileBody,
        most_bytes=_SMALL_BODY,
    ),
    Endpoint(
        paths=("/step_trace",),
        methods=("GET",),
        access=Access.ADMIN,
        handler=admin.step_trace,
    ),
    Endpoint(
        paths=("/metrics",),
        methods=("GET",),
        access=Access.METRICS,
        handler=admin.metrics,
    ),
    Endpoint(
        paths=("/health", "/ping"),
        methods=("GET",),
        access=Access.PUBLIC,
        handler=admin.health,
    ),
    Endpoint(
        paths=("/ready",),
        methods=("GET",),
        access=Access.PUBLIC,
        handler=admin.ready,
    ),
    Endpoint(
        paths=("/health_generate",),
        methods=("GET",),
        access=Access.PUBLIC,
        handler=admin.health_generate,
    ),
)
ENDPOINTS = (*_GENERATION, *_TEXT, *_INFORMATION)


def create_app(manager: TokenizerManager) -> FastAPI:
    """The application over `manager`. Its `state.bodies` is to be closed at the end. Raises
    ConfigError on an unreadable key file."""
    args = manager.args
    app = FastAPI(
        docs_url="/docs" if args.enable_docs else None,
        openapi_url="/openapi.json" if args.enable_docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    paths = {path: endpoint for endpoint in ENDPOINTS for path in endpoint.paths}
    for path, endpoint in paths.items():
        app.router.routes.append(Route(path, endpoint, methods=endpoint.methods))
    app.openapi = lambda: _openapi(paths)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _not_found)
    access = {path: endpoint.access for path, endpoint in paths.items()}
    app.state.bodies = BodyDecoder()
    app.add_middleware(Gate, manager=manager, bodies=app.state.bodies, auth=Auth(args, access))
    if args.allowed_origins:  # around the gate: a browser asks first, without a key
        origins = args.allowed_origins.split(",")
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
            # Pages from outside may reach a server in a private network if they are named.
            allow_private_network="*" not in origins,
        )
    return app


def http_server(app: ASGIApp, max_connections: int, numbers: SharedNumbers) -> uvicorn.Server:
    """The server that runs `app`; `numbers` are those of all processes that share its socket. It
    logs errors only: what is below would repeat the supervisor's lines or tell of clients'
    mistakes, which get their answer."""
    protocol = partial(Connection, max_connections=max_connections, numbers=numbers, turns=Turns())
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config) if numbers.processes == 1 else SharingServer(config, numbers)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code != 405:
        path = request.url.path
        message = f"no such path: {path[:_MAX_SHOWN]}"
        if path.startswith("/v1/"):  # of OpenAI's and others' APIs that are not built
            message += (
                "; there are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages "
                "and /v1/models"
            )
        return error_response(
            RequestError(status=error.status_code, code="not_found", message=message)
        )
    allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    return error_response(
        RequestError(status=405, code="method_not_allowed", message=f"this path takes {allow}"),
        allow=allow,
    )


def _openapi(paths: dict[str, Endpoint]) -> dict[str, Any]:
    """The OpenAPI document of these endpoints."""
    bodies = [endpoint.body for endpoint in ENDPOINTS if endpoint.body is not None]
    references, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(bodies, references, strict=True))
    operations: dict[str, dict[str, Any]] = {}
    for path, endpoint in paths.items():
        operation: dict[str, Any] = {"responses": {"200": {"description": "OK"}}}
        if endpoint.body is not None:
            content = {"application/json": {"schema": schema_of[endpoint.body]}}
            operation["requestBody"] = {"required": True, "content": content}
        shown = path.replace(":path", "")
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PATH_PARAMETER.findall(shown)
        ]
        operations[shown] = {
            method.lower(): {**operation, "parameters": parameters} for method in endpoint.methods
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Radix", "version": __version__},
        "paths": operations,
        "components": {"schemas": components},
    }
