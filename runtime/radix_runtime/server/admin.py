"""What operators and clients ask of a server beside text: health, models, settings, figures."""

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any, Literal

from starlette.responses import Response

from .. import __version__
from ..config import SECRETS, ServerArgs, flag_name
from ..errors import RequestError, refusal
from ..step_plan import Profile
from ..step_times import RING_STEPS
from .http_call import HttpCall
from .protocol import ProfileBody
from .tokenizer_manager import TokenizerManager

_PROBE_TIMEOUT = 20.0
_STATS_TIMEOUT = 1.0
_MAX_FLUSH_WAIT = 600.0
_PROFILE_TIMEOUT = 120.0  # a trace of many steps takes long to write
_TRACED_STEPS = 512  # where the request does not say
_TRACE_TIMEOUT = 10.0  # the step that runs may be a long one
_FLUSH_RETRY = 0.05  # seconds until a busy scheduler is asked again


async def health(call: HttpCall) -> None:
    """GET /health and /ping: the processes are alive."""
    call.manager.require_alive()
    await call.respond(Response(media_type="text/plain"))


async def ready(call: HttpCall) -> None:
    """GET /ready: a request would be taken now."""
    call.manager.require_alive()
    call.manager.require_ready()
    call.manager.drain.require_ready()
    await call.respond(Response(media_type="text/plain"))


async def drain(call: HttpCall) -> None:
    """POST /drain: new requests are refused, open ones end, as after SIGTERM; the server stays."""
    call.manager.drain.begin()
    await call.answer(_drain_state(call.manager))


async def undrain(call: HttpCall) -> None:
    """POST /undrain: requests are taken again."""
    call.manager.drain.undo()
    await call.answer(_drain_state(call.manager))


def _drain_state(manager: TokenizerManager) -> dict[str, Any]:
    return {"draining": manager.drain.is_asked, "open_requests": manager.drain.open_calls}


async def health_generate(call: HttpCall) -> None:
    """GET /health_generate: the engine has generated a token. Callers that come while one is under
    way share it."""
    call.manager.require_alive()
    call.manager.require_ready()
    try:
        await call.manager.shared_probe(_PROBE_TIMEOUT)
    except asyncio.TimeoutError:
        raise _unhealthy("no token within the time limit") from None
    except RequestError as error:
        raise _unhealthy(error.message) from None
    await call.respond(Response(media_type="text/plain"))


def _unhealthy(message: str) -> RequestError:
    return RequestError(status=503, code="unhealthy", message=message)


async def models(call: HttpCall) -> None:
    """GET /v1/models."""
    await call.answer({"object": "list", "data": [_card(call.manager)]})


async def model(call: HttpCall) -> None:
    """GET /v1/models/{model}."""
    call.manager.check_model(call.path_params["model"])
    await call.answer(_card(call.manager))


def _card(manager: TokenizerManager) -> dict[str, Any]:
    return {
        "id": manager.model_name,
        "root": manager.model_name,
        "object": "model",
        "created": manager.created,
        "owned_by": "radix",
        "parent": None,
        "max_model_len": manager.limits.context_length,
        "sampling_defaults": manager.sampling_defaults,
    }


async def model_info(call: HttpCall) -> None:
    """GET /model_info."""
    manager = call.manager
    args = manager.args
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
        "has_chat_template": manager.has_chat_template,
        "tool_call_parser": manager.format.tools.name,
        "reasoning_parser": manager.format.reasoning.name,
        "preferred_sampling_params": manager.sampling_defaults or None,
    }
    await call.answer(info)


async def server_info(call: HttpCall) -> None:
    """GET /server_info: all settings as they were resolved (a key that is set shows as "***"), the
    command line that gives them, and the figures of the engine and of all API processes."""
    manager = call.manager
    args = manager.args
    stats, figures = await asyncio.gather(_stats(manager), manager.figures())
    settings = asdict(args)
    for name in settings.keys() & manager.engine_info.keys():  # decided at start
        settings[name] = manager.engine_info[name]
    for name in SECRETS:
        if settings[name] is not None:
            settings[name] = "***"
    info = {
        **settings,
        "defaulted": _defaulted(args),
        "launch_command": _launch_command(args),
        "version": __version__,
        "served_model_name": manager.model_name,
        "context_length": manager.limits.context_length,
        "max_total_num_tokens": manager.limits.max_total_tokens,
        "engine": manager.engine_info,
        "internal_states": [stats],
        "requests": asdict(figures.requests),
    }
    await call.answer(info)


def _defaulted(args: ServerArgs) -> list[str]:
    """The settings that have their default."""
    return [field.name for field in fields(args) if getattr(args, field.name) == field.default]


def _launch_command(args: ServerArgs) -> str:
    words = ["radix serve"]
    left_out = {*_defaulted(args), *SECRETS}
    for name, value in asdict(args).items():
        if name in left_out:
            continue
        words.append(flag_name(name))
        if value is not True:
            words.append(str(value))
    return " ".join(words)


async def _stats(manager: TokenizerManager) -> dict[str, float]:
    """The scheduler's figures; {} when it does not answer (a long step, a start, an end)."""
    try:
        return await manager.control("stats", dict[str, float], timeout=_STATS_TIMEOUT)
    except RequestError:
        return {}


async def metrics(call: HttpCall) -> None:
    """GET /metrics: for Prometheus."""
    manager = call.manager
    stats, figures = await asyncio.gather(_stats(manager), manager.figures())
    text = manager.metrics.render(stats, figures)
    await call.respond(Response(text, media_type="text/plain; version=0.0.4; charset=utf-8"))


async def flush_cache(call: HttpCall) -> None:
    """/flush_cache: forgets all cached prefixes. 400 `busy` while requests run or wait;
    `?timeout=s` waits for them."""
    seconds = -1.0
    with suppress(ValueError):
        seconds = float(call.query_params.get("timeout") or 0)
    if not 0 <= seconds <= _MAX_FLUSH_WAIT:
        raise refusal("invalid_value", f"timeout must be in [0, {_MAX_FLUSH_WAIT:g}]", "timeout")
    end = time.monotonic() + seconds
    while not await call.manager.control("flush_cache", bool):
        if time.monotonic() >= end:
            raise refusal("busy", "requests run or wait")
        await asyncio.sleep(_FLUSH_RETRY)
    await call.answer({"success": True, "message": "the cache is empty"})


async def start_profile(call: HttpCall, body: ProfileBody) -> None:
    """POST /start_profile: every rank records its steps until /stop_profile."""
    files = await _profile(call.manager, "start")
    await call.answer({"success": True, "files": files})


async def stop_profile(call: HttpCall, body: ProfileBody) -> None:
    """POST /stop_profile: writes the traces, one a rank, in Chrome's format."""
    files = await _profile(call.manager, "stop")
    await call.answer({"success": True, "files": files})


async def _profile(manager: TokenizerManager, action: Literal["start", "stop"]) -> list[str]:
    """The operator chooses the folder: no request decides where the server writes."""
    folder = manager.args.profile_dir
    if folder is None:
        raise refusal("unsupported_parameter", "start the server with --profile-dir to profile it")
    command = Profile(action=action, directory=folder)
    return await manager.control("engine", list[str], body=command, timeout=_PROFILE_TIMEOUT)


async def step_trace(call: HttpCall) -> None:
    """GET /step_trace: what the last steps took, `?steps=N` of them, in Chrome's trace format."""
    steps = -1
    with suppress(ValueError):
        steps = int(call.query_params.get("steps") or _TRACED_STEPS)
    if not 1 <= steps <= RING_STEPS:
        raise refusal("invalid_value", f"steps must be in [1, {RING_STEPS}]", "steps")
    text = await call.manager.control("step_trace", bytes, body=steps, timeout=_TRACE_TIMEOUT)
    await call.respond(Response(text, media_type="application/json"))


async def embeddings(call: HttpCall) -> None:
    """POST /v1/embeddings: there is no such model."""
    raise refusal("unsupported_task", "this model generates text; it has no embeddings")
