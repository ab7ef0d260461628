"""Health, models, metrics and what operators ask of a running server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from .. import __version__
from ..config import ServerArgs, flag_name
from ..errors import RequestError, refusal
from ..sampling_params import SamplingParams
from . import metrics
from .admission import admit
from .exchange import Exchange
from .tokenizer_manager import Prompt, TokenizerManager, new_id

_PROBE_TIMEOUT = 20.0
_STATS_TIMEOUT = 1.0
_MAX_FLUSH_WAIT = 600.0
_SECRETS = frozenset({"api_key", "admin_api_key"})

Health = Callable[[], "str | None"]


class Probes:
    """/health, /ready and /health_generate. `health` tells why the engine is not alive, or None;
    it must be cheap."""

    def __init__(self, manager: TokenizerManager, health: Health) -> None:
        self._manager = manager
        self._health = health
        self._probe: asyncio.Task[None] | None = None

    def _check_alive(self) -> None:
        if self._manager.dead or self._health() is not None:
            raise RequestError(503, "unhealthy", "the engine is not alive")

    async def health(self, exchange: Exchange) -> None:
        self._check_alive()
        await exchange.raw(b"", b"text/plain")

    async def ready(self, exchange: Exchange) -> None:
        self._check_alive()
        self._manager.require_ready()
        await exchange.raw(b"", b"text/plain")

    async def generate(self, exchange: Exchange) -> None:
        """One real token. Callers that come while one is under way share it."""
        self._check_alive()
        self._manager.require_ready()
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._one_token())
        try:
            await asyncio.wait_for(asyncio.shield(self._probe), _PROBE_TIMEOUT)
        except (asyncio.TimeoutError, TimeoutError):
            self._probe.cancel()
            raise RequestError(503, "unhealthy", "no token within the time limit") from None
        except RequestError as error:
            raise RequestError(503, "unhealthy", error.message) from None
        await exchange.raw(b"", b"text/plain")

    async def _one_token(self) -> None:
        manager = self._manager
        ids = [manager.tokenizer.bos_token_id or 0]
        sampling = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
        sampling = admit(ids, sampling, manager.limits, prompt_param="prompt")
        with manager.submit([Prompt(ids, sampling)], name=new_id("health-")) as submission:
            await submission.collect()


class Info:
    """/v1/models, /get_model_info, /get_server_info."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def _card(self) -> dict[str, Any]:
        manager = self._manager
        return {
            "id": manager.model_name,
            "object": "model",
            "created": manager.created,
            "owned_by": "radix",
            "root": manager.model_name,
            "parent": None,
            "max_model_len": manager.limits.context_length,
            "sampling_defaults": dict(manager.sampling_defaults),
        }

    async def models(self, exchange: Exchange) -> None:
        await exchange.json({"object": "list", "data": [self._card()]})

    async def model(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["model"]
        if name != self._manager.model_name:
            message = f"the model is {self._manager.model_name}"
            raise RequestError(404, "model_not_found", message, param="model")
        await exchange.json(self._card())

    async def model_info(self, exchange: Exchange) -> None:
        manager, args = self._manager, self._manager.args
        await exchange.json(
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
                "preferred_sampling_params": dict(manager.sampling_defaults) or None,
            }
        )

    async def server_info(self, exchange: Exchange) -> None:
        manager = self._manager
        await exchange.json(
            {
                **redacted(manager.args),
                "defaulted": _defaulted(manager.args),
                "launch_command": launch_command(manager.args),
                "version": __version__,
                "served_model_name": manager.model_name,
                "context_length": manager.limits.context_length,
                "max_total_num_tokens": manager.limits.max_total_tokens,
                "engine": manager.engine_info,
                "internal_states": [await _stats(manager)],
                "requests": asdict(manager.counts),
            }
        )


def redacted(args: ServerArgs) -> dict[str, Any]:
    """All settings; a key that is set shows as "***"."""
    values = asdict(args)
    for name in _SECRETS:
        if values[name] is not None:
            values[name] = "***"
    return values


def _defaulted(args: ServerArgs) -> list[str]:
    return [f.name for f in fields(args) if getattr(args, f.name) == f.default]


def launch_command(args: ServerArgs) -> str:
    """The command line that gives these settings, keys left out."""
    words = ["radix serve"]
    skipped = set(_defaulted(args)) | _SECRETS
    for f in fields(args):
        if f.name not in skipped:
            value = getattr(args, f.name)
            words.append(flag_name(f.name) if value is True else f"{flag_name(f.name)} {value}")
    return " ".join(words)


async def _stats(manager: TokenizerManager) -> dict[str, float]:
    """The scheduler's figures; {} when it does not answer (a long step, a start, an end)."""
    try:
        return (await manager.control("stats", _STATS_TIMEOUT)).stats
    except RequestError:
        return {}


class Operations:
    """/metrics and /flush_cache."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._last_stats: dict[str, float] = {}

    async def metrics(self, exchange: Exchange) -> None:
        self._last_stats = await _stats(self._manager) or self._last_stats
        text = self._manager.metrics.render(self._last_stats)
        await exchange.raw(text, metrics.CONTENT_TYPE)

    async def flush_cache(self, exchange: Exchange) -> None:
        """400 `busy` while requests run or wait; `?timeout=s` waits for them."""
        end = time.monotonic() + _timeout(exchange.query.get("timeout"))
        while True:
            reply = await self._manager.control("flush_cache")
            if reply.ok or time.monotonic() >= end:
                break
            await asyncio.sleep(0.05)
        if not reply.ok:
            raise refusal("busy", reply.message[:300] or "requests run or wait")
        await exchange.json({"success": True, "message": reply.message or "the cache is empty"})


def _timeout(value: str | None) -> float:
    try:
        seconds = float(value or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MAX_FLUSH_WAIT:
        raise refusal("invalid_value", f"timeout must be in [0, {_MAX_FLUSH_WAIT:g}]", "timeout")
    return seconds


async def no_embeddings(exchange: Exchange) -> None:
    raise refusal("unsupported_task", "this model generates text; it has no embeddings")
