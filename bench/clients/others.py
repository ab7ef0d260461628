"""The same requests by other clients: httpx and aiohttp, an event loop each, every event parsed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from radix_runtime.cli.figures import Record


def httpx_records(url: str, streams: int, tokens: int) -> list[Record]:
    """By httpx, as the OpenAI client does it."""

    async def run() -> list[Record]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

            async def lines(body: dict[str, Any]) -> AsyncIterator[str]:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        yield line

            return await asyncio.gather(*(_record(lines, tokens) for _ in range(streams)))

    return asyncio.run(run())


def aiohttp_records(url: str, streams: int, tokens: int) -> list[Record]:
    """By aiohttp, as the benches of vLLM and SGLang do it."""
    import aiohttp

    async def run() -> list[Record]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

            async def lines(body: dict[str, Any]) -> AsyncIterator[str]:
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    async for line in answer.content:
                        yield line.decode().strip()

            return await asyncio.gather(*(_record(lines, tokens) for _ in range(streams)))

    return asyncio.run(run())


async def _record(lines: Any, tokens: int) -> Record:
    body = {"model": "stream", "prompt": [1], "max_tokens": tokens, "stream": True}
    record = Record(prompt_tokens=1, start=time.perf_counter())
    async for line in lines(body):
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if event["choices"]:
            record.chunks.append(time.perf_counter())
        if event.get("usage"):
            record.output_tokens = event["usage"]["completion_tokens"]
    record.end = time.perf_counter()
    return record
