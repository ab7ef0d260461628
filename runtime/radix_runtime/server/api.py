"""The HTTP application: which path is served by whom, who may call it, and what operators ask of a
server."""

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict, fields
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
from ..config import SECRETS, flag_name
from ..errors import RequestError, refusal
from . import native, openai, protocol
from .exchange import Access, Auth, Endpoint, Exchange, Gate, error_response
from .tokenizer_manager import TokenizerManager

_PROBE_TIMEOUT = 20.0
_STATS_TIMEOUT = 1.0
_MAX_FLUSH_WAIT = 600.0


def create_app(manager: TokenizerManager) -> FastAPI:
    """The application over `manager`. Raises ConfigError on an unreadable key file."""
    public, client, operator = Access
    get, post = ("GET",), ("POST",)
    endpoints = [
        Endpoint(("/v1/chat/completions",), post, client, openai.chat, protocol.ChatBody, True),
        Endpoint(
            ("/v1/completions",), post, client, openai.completions, protocol.CompletionBody, True
        ),
        Endpoint(("/v1/embeddings",), post, client, _no_embeddings),
        Endpoint(("/v1/models",), get, client, _models),
        Endpoint(("/v1/models/{model:path}",), get, client, _model),
        Endpoint(
            ("/generate",), ("POST", "PUT"), client, native.generate, protocol.NativeBody, True
        ),
        Endpoint(
            ("/tokenize", "/v1/tokenize"), post, client, native.tokenize, protocol.TokenizeBody
        ),
        Endpoint(
            ("/detokenize", "/v1/detokenize"),
            post,
            client,
            native.detokenize,
            protocol.DetokenizeBody,
        ),
        Endpoint(("/abort_request",), post, client, native.abort_request, protocol.AbortBody),
        Endpoint(("/model_info", "/get_model_info"), get, client, _model_info),
        Endpoint(("/server_info", "/get_server_info"), get, operator, _server_info),
        Endpoint(("/flush_cache",), ("GET", "POST"), operator, _flush_cache, None, True),
        Endpoint(("/metrics",), get, public, _metrics),
        Endpoint(("/health", "/ping"), get, public, _health),
        Endpoint(("/ready",), get, public, _health),
        Endpoint(("/health_generate",), get, public, _health),
    ]
    args = manager.args
    docs_url, openapi_url = ("/docs", "/openapi.json") if args.enable_docs else (None, None)
    app = FastAPI(
        docs_url=docs_url, openapi_url=openapi_url, redoc_url=None, redirect_slashes=False
    )
    paths = {path: endpoint for endpoint in endpoints for path in endpoint.paths}
    app.router.routes += [
        Route(path, endpoint, methods=endpoint.methods) for path, endpoint in paths.items()
    ]
    app.openapi = lambda: _openapi(paths)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _not_found)
    access = {path: endpoint.access for path, endpoint in paths.items()}
    app.add_middleware(Gate, manager=manager, auth=Auth(args, access))
    if args.allowed_origins:  # around the gate: a browser asks first, without a key
        origins, shown = args.allowed_origins.split(","), ["x-request-id", "retry-after"]
        named = (
            "*" not in origins
        )  # then pages from outside may reach a server in a private network
        app.add_middleware(
            CORSMiddleware, origins, ["*"], ["*"], expose_headers=shown, allow_private_network=named
        )
    return app


def http_server(app: ASGIApp) -> uvicorn.Server:
    """Header limits are ours up to the size at which the parser gives up; only h11 has one. Below
    errors, its log would repeat the supervisor's or tell of clients' mistakes, which get their
    answer."""
    config = uvicorn.Config(
        app, http="h11", h11_max_incomplete_event_size=256 << 10, ws="none", lifespan="off", log_config=None,
        log_level="error", access_log=False, server_header=False, timeout_keep_alive=5, timeout_graceful_shutdown=1,
    )  # fmt: skip
    return uvicorn.Server(config)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code != 405:
        return error_response(RequestError(error.status_code, "not_found", "no such path"))
    allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    return error_response(
        RequestError(405, "method_not_allowed", f"this path takes {allow}"), allow=allow
    )


def _openapi(paths: dict[str, Endpoint]) -> dict[str, Any]:
    bodies = {endpoint.body for endpoint in paths.values()} - {None}
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
        operations[path.replace(":path", "")] = {
            method.lower(): operation for method in endpoint.methods
        }
    info, schemas = {"title": "Radix", "version": __version__}, {"schemas": components}
    return {"openapi": "3.1.0", "info": info, "paths": operations, "components": schemas}


async def _health(exchange: Exchange) -> None:
    if exchange.manager.dead or exchange.manager.health() is not None:
        raise RequestError(503, "unhealthy", "the engine is not alive")
    if exchange.route != "/health":
        exchange.manager.require_ready()
    if exchange.route == "/health_generate":
        await _generate_one(exchange.manager)
    await exchange.respond(Response(media_type="text/plain"))


# A real token. Callers that come while one is under way share it.
async def _generate_one(manager: TokenizerManager) -> None:
    if manager.probe is None or manager.probe.done():
        manager.probe = asyncio.create_task(asyncio.wait_for(manager.one_token(), _PROBE_TIMEOUT))
    try:
        await asyncio.shield(manager.probe)
    except asyncio.TimeoutError:
        raise RequestError(503, "unhealthy", "no token within the time limit") from None
    except RequestError as error:
        raise RequestError(503, "unhealthy", error.message) from None


async def _models(exchange: Exchange) -> None:
    await exchange.answer({"object": "list", "data": [_card(exchange.manager)]})


async def _model(exchange: Exchange) -> None:
    exchange.manager.check_model(exchange.path_params["model"])
    await exchange.answer(_card(exchange.manager))


def _card(manager: TokenizerManager) -> dict[str, Any]:
    sizes = {
        "max_model_len": manager.limits.context_length,
        "sampling_defaults": manager.sampling_defaults,
    }
    fixed = {"object": "model", "created": manager.created, "owned_by": "radix", "parent": None}
    return {"id": manager.model_name, "root": manager.model_name, **fixed, **sizes}


async def _model_info(exchange: Exchange) -> None:
    manager, args = exchange.manager, exchange.manager.args
    info = {
        "model_path": args.model_path or manager.model_name,
        "served_model_name": manager.model_name,
        "tokenizer_path": args.tokenizer_path or args.model_path or manager.model_name,
        "is_generation": True,
        "weight_version": "default",
        "max_model_len": manager.limits.context_length,
        "vocab_size": manager.limits.vocab_size,
        "dtype": manager.engine_info.get("dtype", args.dtype),
        "quantization": args.quantization,
        "has_chat_template": manager.tokenizer.chat_template is not None,
        "preferred_sampling_params": manager.sampling_defaults or None,
    }
    await exchange.answer(info)


# All settings (a key that is set shows as "***"), the command line that gives them, and the
# engine's figures.
async def _server_info(exchange: Exchange) -> None:
    manager = exchange.manager
    settings = asdict(manager.args)
    defaulted = [f.name for f in fields(manager.args) if settings[f.name] == f.default]
    given = [
        (flag_name(name), settings[name]) for name in settings if name not in (*defaulted, *SECRETS)
    ]
    info = {
        **settings,
        **{name: "***" for name in SECRETS if settings[name] is not None},
        "defaulted": defaulted,
        "launch_command": " ".join(
            ["radix serve", *(f if v is True else f"{f} {v}" for f, v in given)]
        ),
        "version": __version__,
        "served_model_name": manager.model_name,
        "context_length": manager.limits.context_length,
        "max_total_num_tokens": manager.limits.max_total_tokens,
        "engine": manager.engine_info,
        "internal_states": [await _stats(manager)],
        "requests": vars(manager.counts),
    }
    await exchange.answer(info)


# The scheduler's figures; {} when it does not answer (a long step, a start, an end).
async def _stats(manager: TokenizerManager) -> dict[str, float]:
    try:
        return (await manager.control("stats", _STATS_TIMEOUT)).stats
    except RequestError:
        return {}


async def _metrics(exchange: Exchange) -> None:
    text = exchange.manager.metrics.render(await _stats(exchange.manager))
    await exchange.respond(Response(text, media_type="text/plain; version=0.0.4; charset=utf-8"))


# 400 `busy` while requests run or wait; `?timeout=s` waits for them.
async def _flush_cache(exchange: Exchange) -> None:
    seconds = -1.0
    with suppress(ValueError):
        seconds = float(exchange.query_params.get("timeout") or 0)
    if not 0 <= seconds <= _MAX_FLUSH_WAIT:
        raise refusal("invalid_value", f"timeout must be in [0, {_MAX_FLUSH_WAIT:g}]", "timeout")
    end = time.monotonic() + seconds
    while not (await exchange.manager.control("flush_cache")).ok:
        if time.monotonic() >= end:
            raise refusal("busy", "requests run or wait")
        await asyncio.sleep(0.05)
    await exchange.answer({"success": True, "message": "the cache is empty"})


async def _no_embeddings(exchange: Exchange) -> None:
    raise refusal("unsupported_task", "this model generates text; it has no embeddings")
