"""`radix bench serve`: a running server, over HTTP."""

import argparse
import asyncio
import math
import os
import random
import secrets
import sys
from typing import Any

from ..hub import resolve_model_path
from ..progress import progress_bar
from ..text.tokenizer import Tokenizer, load_tokenizer
from .client import Client
from .figures import Record
from .load_backends import BACKENDS
from .load_client import Job
from .load_processes import run_load
from .raw_client import target_of
from .workload import read_workload

_MOST_PROCESSES = 4  # by default
_CORES_EACH = 4  # of the machine, which the server may share
_BUSY = 0.9  # of a core: a client as busy as that may be what is measured


def measure(namespace: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """What was measured, and a record of every request, failed ones too."""
    workload = read_workload(namespace)
    items = workload.items(namespace.vocab_size, _tokenizer(namespace.tokenizer))
    model = namespace.served_model or asyncio.run(_first_model(namespace))
    backend = BACKENDS[namespace.backend](
        model=model,
        temperature=namespace.temperature,
        cache_salt=secrets.token_hex(8),  # prefixes are shared within this run only
    )
    job = Job(
        target=target_of(namespace.url, namespace.api_key),
        backend=backend,
        items=items,
        due=_arrivals(len(items), namespace.request_rate, namespace.workload_seed),
        concurrency=namespace.max_concurrency or 0,
    )
    processes = namespace.clients or _default_processes()
    with progress_bar("requests", len(items)) as bar:
        report = run_load(job, processes, lambda done: bar.update(done - bar.n))
    if report.cpu_share > _BUSY:
        share = f"{report.cpu_share:.0%} of a core"
        print(
            f"radix: warning: a client process used {share}, so that the figures may be its own "
            f"and not the server's: see --clients (now {processes})",
            file=sys.stderr,
        )
    facts = {
        "backend": namespace.backend,
        "model_id": model,
        "dataset": workload.name,
        "num_prompts": len(items),
        "request_rate": namespace.request_rate or "inf",
        "max_concurrency": namespace.max_concurrency,
        "clients": processes,
        "client_cpu_share": report.cpu_share,
    }
    return facts, report.records


def _tokenizer(name: str | None) -> Tokenizer | None:
    return None if name is None else load_tokenizer(resolve_model_path(name))


async def _first_model(namespace: argparse.Namespace) -> str:
    async with Client(namespace.url, namespace.api_key) as client:
        return await client.model()


def _arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds after the start at which requests are due: a Poisson process of `rate` a second, or
    all at once."""
    if rate is None or math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times = []
    now = 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def _default_processes() -> int:
    cores = len(os.sched_getaffinity(0))
    return max(1, min(_MOST_PROCESSES, cores // _CORES_EACH))
