"""`radix bench offline` (an Engine in this process) and `radix bench serve` (a running server)."""

from __future__ import annotations

import argparse
import asyncio
import time
from importlib import import_module
from typing import Any

from rich.progress import Progress

from ..config import DEFAULT_PORT
from ..errors import RequestError
from .client import Client
from .flags import add_model_argument, add_server_flags
from .workload import Item, Record, figures, machine, make_workload, parse_range, report

_RANDOM_VOCAB = 1000  # ids that nearly every vocabulary has


def add_arguments(parser: argparse.ArgumentParser) -> None:
    modes = parser.add_subparsers(dest="mode", required=True, metavar="offline|serve")
    offline = modes.add_parser("offline", help="an Engine in this process")
    add_model_argument(offline)
    add_server_flags(offline, ("model", "engine", "scheduler"))
    serve = modes.add_parser("serve", help="a running server, over HTTP")
    serve.add_argument("--url", default=f"http://127.0.0.1:{DEFAULT_PORT}", help="its address")
    serve.add_argument("--api-key", help="its key")
    serve.add_argument("--request-rate", type=float, help="requests a second; default: all at once")
    serve.add_argument("--max-concurrency", type=int, help="open requests; default: no limit")
    serve.add_argument("--vocab-size", type=int, default=_RANDOM_VOCAB, help="ids of the prompts")
    for mode in (offline, serve):
        group = mode.add_argument_group("workload")
        group.add_argument("--workload", metavar="FILE", help="JSON with [prompt, output] lengths")
        group.add_argument("--num-prompts", type=int, help="requests; default 32, or all of FILE")
        group.add_argument("--input-len", type=parse_range, default="256", metavar="N[:M]",
                           help="tokens of a prompt")  # fmt: skip
        group.add_argument("--output-len", type=parse_range, default="64", metavar="N[:M]",
                           help="tokens of an answer")  # fmt: skip
        group.add_argument("--temperature", type=float, default=0.6, help="of sampling")
        group.add_argument("--workload-seed", type=int, default=0, help="of the lengths")
        group.add_argument("--json", metavar="FILE", help="write the figures there")


def run(namespace: argparse.Namespace) -> int:
    if namespace.mode == "offline":
        # It loads torch, which a benchmark of a server must not: the client would measure itself.
        result = import_module("radix_runtime.cli.bench_offline").measure(namespace)
    else:
        result = asyncio.run(_measure_server(namespace))
    report(result, namespace.json)
    return 0 if result["failed"] == 0 else 1


def workload_of(namespace: argparse.Namespace, vocab_size: int) -> list[Item]:
    return make_workload(
        namespace.workload,
        namespace.num_prompts,
        namespace.input_len,
        namespace.output_len,
        vocab_size,
        namespace.workload_seed,
    )


async def _measure_server(namespace: argparse.Namespace) -> dict[str, Any]:
    items = workload_of(namespace, namespace.vocab_size)
    async with Client(namespace.url, namespace.api_key) as client:
        model = await client.model()
        slots = asyncio.Semaphore(namespace.max_concurrency or len(items))
        with Progress() as progress:
            task = progress.add_task("requests", total=len(items))

            async def one(index: int, item: Item) -> Record:
                if namespace.request_rate:
                    await asyncio.sleep(index / namespace.request_rate)
                async with slots:
                    record = await _request(client, model, item, namespace.temperature)
                progress.advance(task)
                return record

            records = await asyncio.gather(*(one(i, item) for i, item in enumerate(items)))
    errors = sorted({r.error for r in records if r.error is not None})[:3]
    return {
        "mode": "serve",
        "model": model,
        "machine": machine(),
        **figures(list(records)),
        **({"errors": errors} if errors else {}),
    }


async def _request(client: Client, model: str, item: Item, temperature: float) -> Record:
    body = {
        "model": model,
        "prompt": item.prompt,
        "max_tokens": item.output_len,
        "temperature": temperature,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    record = Record(len(item.prompt), time.perf_counter())
    try:
        async for chunk in client.stream("/v1/completions", body):
            now = time.perf_counter()
            if chunk["choices"]:
                record.chunks.append(now)
            if usage := chunk.get("usage"):
                record.output_tokens = usage["completion_tokens"]
                record.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        record.end = time.perf_counter()
    except RequestError as error:
        record.error = f"{error.code}: {error.message}"
    return record
