"""`radix bench serve`: a running server, over HTTP."""

import argparse
import asyncio
import secrets
import time
from typing import Any

from ..errors import RequestError
from ..progress import with_progress
from .client import Client
from .figures import Record
from .workload import Item, make_items, read_lengths


def measure(namespace: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """What was measured, and a record of every request, failed ones too."""
    return asyncio.run(_measure(namespace))


async def _measure(namespace: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    items = make_items(read_lengths(namespace), namespace.vocab_size)
    slots = asyncio.Semaphore(namespace.max_concurrency or len(items))
    async with Client(namespace.url, namespace.api_key) as client:
        model = await client.model()
        common = {
            "model": model,
            "temperature": namespace.temperature,
            "cache_salt": secrets.token_hex(8),  # prefixes are shared within this run only
        }

        async def one(number: int, item: Item) -> Record:
            if namespace.request_rate:
                await asyncio.sleep(number / namespace.request_rate)
            async with slots:
                return await _request(client, item, common)

        tasks = [asyncio.create_task(one(number, item)) for number, item in enumerate(items)]
        for done in with_progress(asyncio.as_completed(tasks), "requests", len(tasks)):
            await done
    return {"model": model}, [task.result() for task in tasks]


async def _request(client: Client, item: Item, common: dict[str, Any]) -> Record:
    body = {
        **common,
        "prompt": item.prompt,
        "max_tokens": item.output_len,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    record = Record(prompt_tokens=len(item.prompt), start=time.perf_counter())
    try:
        async for chunk in client.chunks("/v1/completions", body):
            if chunk["choices"]:
                record.chunks.append(time.perf_counter())
            usage = chunk.get("usage")
            if usage:
                record.output_tokens = usage["completion_tokens"]
                record.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        record.end = time.perf_counter()
    except RequestError as error:
        record.error = f"{error.code}: {error.message}"
    return record
