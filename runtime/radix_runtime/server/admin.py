"""Health, models, metrics and what operators ask of a running server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from starlette.responses import Response

from .. import __version__
from ..config import SECRETS, flag_name
from ..errors import RequestError, refusal
from .exchange import Exchange
from .tokenizer_manager import TokenizerManager

_PROBE_TIMEOUT = 20.0
_STATS_TIMEOUT = 1.0
_MAX_FLUSH_WAIT = 600.0


class Probes:
    """/health, /ready and /health_generate. `health` tells why the engine is not alive, or None; it must be cheap."""

    def __init__(self, health: Callable[[], str | None]) -> None:
        self._health = health
        self._probe: asyncio.Task[None] | None = None

    def _check_alive(self, manager: TokenizerManager) -> None:
        if manager.dead or self._health() is not None:
            raise RequestError(503, "unhealthy", "the engine is not alive")

    async def health(self, exchange: Exchange) -> None:
        self._check_alive(exchange.manager)
        await exchange.respond(Response(media_type="text/plain"))

    async def ready(self, exchange: Exchange) -> None:
        self._check_alive(exchange.manager)
        exchange.manager.require_ready()
        await exchange.respond(Response(media_type="text/plain"))

    async def generate(self, exchange: Exchange) -> None:
        """One real token. Callers that come while one is under way share it."""
        self._check_alive(exchange.manager)
        exchange.manager.require_ready()
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(exchange.manager.one_token())
        try:
            await asyncio.wait_for(asyncio.shield(self._probe), _PROBE_TIMEOUT)
        except asyncio.TimeoutError:
            self._probe.cancel()
            raise RequestError(503, "unhealthy", "no token within the time limit") from None
        except RequestError as error:
            raise RequestError(503, "unhealthy", error.message) from None
        await exchange.respond(Response(media_type="text/plain"))


async def models(exchange: Exchange) -> None:
    await exchange.answer({"object": "list", "data": [_card(exchange.manager)]})


async def model(exchange: Exchange) -> None:
    exchange.manager.check_model(exchange.path_params["model"])
    await exchange.answer(_card(exchange.manager))


def _card(manager: TokenizerManager) -> dict[str, Any]:
    return {
        "id": manager.model_name,
        "object": "model",
        "created": manager.created,
        "owned_by": "radix",
        "root": manager.model_name,
        "parent": None,
        "max_model_len": manager.limits.context_length,
        "sampling_defaults": manager.sampling_defaults,
    }


async def model_info(exchange: Exchange) -> None:
    manager, args = exchange.manager, exchange.manager.args
    await exchange.answer(
        {
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
    )


async def server_info(exchange: Exchange) -> None:
    """All settings (a key that is set shows as "***"), the command line that gives them, and the engine's figures."""
    manager = exchange.manager
    settings = asdict(manager.args)
    defaulted = [f.name for f in fields(manager.args) if settings[f.name] == f.default]
    command = ["radix serve"]
    for name, value in settings.items():
        if name not in SECRETS and name not in defaulted:
            command.append(flag_name(name) if value is True else f"{flag_name(name)} {value}")
    await exchange.answer(
        {
            **settings,
            **{name: "***" for name in SECRETS if settings[name] is not None},
            "defaulted": defaulted,
            "launch_command": " ".join(command),
            "version": __version__,
            "served_model_name": manager.model_name,
            "context_length": manager.limits.context_length,
            "max_total_num_tokens": manager.limits.max_total_tokens,
            "engine": manager.engine_info,
            "internal_states": [await _stats(manager)],
            "requests": asdict(manager.counts),
        }
    )


async def _stats(manager: TokenizerManager) -> dict[str, float]:
    """The scheduler's figures; {} when it does not answer (a long step, a start, an end)."""
    try:
        return (await manager.control("stats", _STATS_TIMEOUT)).stats
    except RequestError:
        return {}


async def metrics(exchange: Exchange) -> None:
    text = exchange.manager.metrics.render(await _stats(exchange.manager))
    await exchange.respond(Response(text, media_type="text/plain; version=0.0.4; charset=utf-8"))


async def flush_cache(exchange: Exchange) -> None:
    """400 `busy` while requests run or wait; `?timeout=s` waits for them."""
    try:
        seconds = float(exchange.query_params.get("timeout") or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MAX_FLUSH_WAIT:
        raise refusal("invalid_value", f"timeout must be in [0, {_MAX_FLUSH_WAIT:g}]", "timeout")
    end = time.monotonic() + seconds
    while not (reply := await exchange.manager.control("flush_cache")).ok:
        if time.monotonic() >= end:
            raise refusal("busy", reply.message[:300] or "requests run or wait")
        await asyncio.sleep(0.05)
    await exchange.answer({"success": True, "message": reply.message or "the cache is empty"})


async def no_embeddings(exchange: Exchange) -> None:
    raise refusal("unsupported_task", "this model generates text; it has no embeddings")
