"""`radix bench offline` (an Engine in this process) and `radix bench serve` (a running server)."""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from rich.progress import track

from .. import __version__
from ..config import DEFAULT_PORT
from ..errors import ConfigError, RequestError
from .client import Client
from .flags import add_model_argument, add_server_flags, check_sampling, engine_args

_MAX_ID = 10_000  # prompt ids of request i: random.Random(i).randrange(min(vocabulary, this))
Range = tuple[int, int]
_Length = Annotated[int, msgspec.Meta(ge=1)]


class Item(NamedTuple):
    """One request: its prompt and how many tokens it shall give (EOS is ignored)."""

    prompt: list[int]
    output_len: int


class _File(msgspec.Struct):
    requests: Annotated[list[tuple[_Length, _Length]], msgspec.Meta(min_length=1)]


def positive(kind: type[int] | type[float]) -> Callable[[str], Any]:
    """A type of flags."""

    def parse(text: str) -> float:
        if not (value := kind(text)) > 0:  # NaN is not
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    return parse


def token_range(text: str) -> Range:
    """`100` or `100:1024`, both ends included."""
    low, _, high = text.partition(":")
    first, last = map(positive(int), (low, high or low))
    if first > last:
        raise argparse.ArgumentTypeError(f"must not end before it begins, got {text}")
    return first, last


def read_lengths(flags: argparse.Namespace) -> list[tuple[int, int]]:
    """Of prompts and answers: those of the file (the first of them), or random ones. Raises
    ConfigError."""
    if flags.workload is not None:
        try:
            return msgspec.json.decode(Path(flags.workload).read_bytes(), type=_File).requests[
                : flags.num_prompts
            ]
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"cannot read the workload {flags.workload}: {error}") from error
    rng = random.Random(flags.workload_seed)
    return [
        (rng.randint(*flags.input_len), rng.randint(*flags.output_len))
        for _ in range(flags.num_prompts or 32)
    ]


def make_items(lengths: list[tuple[int, int]], vocab_size: int) -> list[Item]:
    rngs, limit = map(random.Random, range(len(lengths))), min(vocab_size, _MAX_ID)
    return [
        Item([rng.randrange(limit) for _ in range(n)], out)
        for rng, (n, out) in zip(rngs, lengths, strict=True)
    ]


@dataclass(slots=True)
class Record:
    """One request as it went; times in seconds on one clock. `chunks`: arrival of each piece."""

    prompt_tokens: int
    start: float
    chunks: list[float] = field(default_factory=list)
    end: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


def figures(records: list[Record]) -> dict[str, Any]:
    """Throughput and latency of the requests that succeeded."""
    # output: output tokens over the whole time. prefill: computed prompt tokens over the time to
    # the last first token. decode: tokens after each first one, over the time since the first of
    # all.
    good = [r for r in records if r.error is None and r.chunks]
    result: dict[str, Any] = {"requests": len(records), "failed": len(records) - len(good)}
    if not good:
        return result
    begin, end, firsts = (
        min(r.start for r in good),
        max(r.end for r in good),
        [r.chunks[0] for r in good],
    )
    prompt, cached = sum(r.prompt_tokens for r in good), sum(r.cached_tokens for r in good)
    output = sum(r.output_tokens for r in good)
    return {
        **result,
        "seconds": end - begin,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_second": len(good) / (end - begin),
        "output_tokens_per_second": output / (end - begin),
        "prefill_tokens_per_second": (prompt - cached) / max(max(firsts) - begin, 1e-9),
        "decode_tokens_per_second": (output - len(good)) / max(end - min(firsts), 1e-9),
        "cache_hit_rate": cached / max(1, prompt),
        "ttft_ms": _percentiles([r.chunks[0] - r.start for r in good]),
        "tpot_ms": _percentiles(
            [(r.end - r.chunks[0]) / (r.output_tokens - 1) for r in good if r.output_tokens > 1]
        ),
        "itl_ms": _percentiles(np.concatenate([np.diff(r.chunks) for r in good])),
        "e2e_ms": _percentiles([r.end - r.start for r in good]),
    }


def _percentiles(seconds: Any) -> dict[str, float] | None:
    if not len(seconds):
        return None
    values = np.asarray(seconds) * 1e3
    found = {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 95, 99)}
    return {"mean": float(values.mean()), **found, "max": float(values.max())}


def machine() -> dict[str, Any]:
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    now, cores = (
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        len(os.sched_getaffinity(0)),
    )
    return {
        "date": now,
        "cpu": model[1] if model else platform.processor(),
        "cores": cores,
        "runtime": __version__,
    }


# The command ----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    modes = parser.add_subparsers(dest="mode", required=True, metavar="offline|serve")
    offline = modes.add_parser("offline", help="an Engine in this process")
    add_model_argument(offline)
    add_server_flags(offline, engine_only=True)
    serve = modes.add_parser("serve", help="a running server, over HTTP")
    serve.add_argument(
        "--url",
        default=f"http://127.0.0.1:{DEFAULT_PORT}",
        help="its address (default: %(default)s)",
    )
    serve.add_argument("--api-key", help="its key")
    serve.add_argument(
        "--request-rate", type=positive(float), help="requests a second; default: all at once"
    )
    serve.add_argument(
        "--max-concurrency", type=positive(int), help="open requests; default: no limit"
    )
    serve.add_argument(
        "--vocab-size",
        type=positive(int),
        default=1000,
        help="ids of prompts (default: %(default)s)",
    )
    for mode in (offline, serve):
        group = mode.add_argument_group("workload")
        group.add_argument(
            "--workload", metavar="FILE", help="JSON with [prompt, output] lengths; default: random"
        )
        group.add_argument(
            "--num-prompts", type=positive(int), help="requests; default 32, or all of FILE"
        )
        lengths: dict[str, Any] = {"type": token_range, "metavar": "N[:M]"}
        group.add_argument(
            "--input-len",
            default="256",
            help="tokens of a prompt (default: %(default)s)",
            **lengths,
        )
        group.add_argument(
            "--output-len",
            default="64",
            help="tokens of an answer (default: %(default)s)",
            **lengths,
        )
        group.add_argument(
            "--temperature", type=float, default=0.6, help="of sampling (default: %(default)s)"
        )
        group.add_argument(
            "--workload-seed", type=int, default=0, help="of the lengths (default: %(default)s)"
        )
        group.add_argument("--json", metavar="FILE", help="write the figures there")


def run(namespace: argparse.Namespace) -> int:
    check_sampling({"temperature": namespace.temperature})
    measured = (
        _measure_engine(namespace)
        if namespace.mode == "offline"
        else asyncio.run(_measure_server(namespace))
    )
    facts, records = measured
    result = {"mode": namespace.mode, **facts, "machine": machine(), **figures(records)}
    if errors := sorted({r.error for r in records if r.error is not None})[:3]:
        result["errors"] = errors
    for name, value in result.items():
        parts = (
            [f"{k} {_short(v)}" for k, v in value.items()]
            if isinstance(value, dict)
            else [_short(value)]
        )
        print(f"{name:<27}", *parts)
    if namespace.json is not None:
        Path(namespace.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["failed"] == 0 else 1


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


Measured = tuple[dict[str, Any], list[Record]]


def _measure_engine(namespace: argparse.Namespace) -> Measured:
    lengths = read_lengths(namespace)
    # It loads torch, which a benchmark of a server must not: the client would measure itself.
    with import_module("radix_runtime.offline").Engine(**engine_args(namespace)) as engine:
        _complete(engine, [Item([1, 2, 3], 4)], 0.0, "warm-up")  # first use of every part
        engine.flush_cache()
        items = make_items(lengths, engine.config.vocab_size)
        records = _complete(engine, items, namespace.temperature, "tokens")
        info = engine.get_server_info()
        facts = {name: info[name] for name in ("dtype", "tp_size", "max_total_num_tokens")}
        return {"model": namespace.model or namespace.model_path or "demo", **facts}, records


def _complete(engine: Any, items: list[Item], temperature: float, what: str) -> list[Record]:
    # Reading every token on the way costs a few microseconds of host time each, as a server does.
    start = time.perf_counter()
    records = [Record(len(item.prompt), start) for item in items]
    params = [
        {"max_new_tokens": i.output_len, "temperature": temperature, "ignore_eos": True}
        for i in items
    ]
    try:
        stream = engine.stream(input_ids=[item.prompt for item in items], sampling_params=params)
    except ValueError as error:  # as prompts that are too long
        raise ConfigError(str(error)) from error
    for output in track(stream, what, sum(item.output_len for item in items), transient=True):
        record, info = records[output["index"]], output["meta_info"]
        record.end = time.perf_counter()
        record.chunks.append(record.end)
        record.output_tokens, record.cached_tokens = (
            info["completion_tokens"],
            info["cached_tokens"],
        )
    return records


async def _measure_server(namespace: argparse.Namespace) -> Measured:
    items = make_items(read_lengths(namespace), namespace.vocab_size)
    slots = asyncio.Semaphore(namespace.max_concurrency or len(items))
    async with Client(namespace.url, namespace.api_key) as client:
        model = await client.model()
        # Requests share cached prefixes with those of the same run only.
        common = {
            "model": model,
            "temperature": namespace.temperature,
            "cache_salt": secrets.token_hex(8),
        }

        async def one(index: int, item: Item) -> Record:
            if namespace.request_rate:
                await asyncio.sleep(index / namespace.request_rate)
            async with slots:
                return await _request(client, item, common)

        tasks = [asyncio.create_task(one(i, item)) for i, item in enumerate(items)]
        for done in track(asyncio.as_completed(tasks), "requests", len(tasks)):
            await done
    return {"model": model}, [task.result() for task in tasks]


async def _request(client: Client, item: Item, common: dict[str, Any]) -> Record:
    sizes = {"prompt": item.prompt, "max_tokens": item.output_len, "ignore_eos": True}
    body = {**common, **sizes, "stream_options": {"include_usage": True}}
    record = Record(len(item.prompt), time.perf_counter())
    try:
        async for chunk in client.chunks("/v1/completions", body):
            if chunk["choices"]:
                record.chunks.append(time.perf_counter())
            if usage := chunk.get("usage"):
                record.output_tokens = usage["completion_tokens"]
                record.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        record.end = time.perf_counter()
    except RequestError as error:
        record.error = f"{error.code}: {error.message}"
    return record
