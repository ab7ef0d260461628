"""`radix bench offline`: the figures of an Engine in this process."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.progress import track

from ..engine_api import Engine
from .bench import workload_of
from .flags import engine_of
from .workload import Item, Record, figures, machine


def measure(namespace: argparse.Namespace) -> dict[str, Any]:
    with engine_of(Engine, namespace) as engine:
        _run(engine, [Item([1, 2, 3], 4)], 0.0, "warm-up")  # first use of every part
        engine.flush_cache()
        items = workload_of(namespace, engine.config.vocab_size)
        records = _run(engine, items, namespace.temperature, "tokens")
        info = engine.get_server_info()
        return {
            "mode": "offline",
            "model": namespace.model or namespace.model_path or "demo",
            "dtype": info["dtype"],
            "tp_size": info["tp_size"],
            "max_total_num_tokens": info["max_total_num_tokens"],
            "machine": machine(),
            **figures(records),
        }


def _run(engine: Engine, items: list[Item], temperature: float, what: str) -> list[Record]:
    # Reading every token on the way costs a few microseconds of host time each, as a server does.
    start = time.perf_counter()
    records = [Record(len(item.prompt), start) for item in items]
    params = [{"max_new_tokens": i.output_len, "temperature": temperature, "ignore_eos": True} for i in items]
    prompts = [item.prompt for item in items]
    stream = engine.stream(input_ids=prompts, sampling_params=params)
    total = sum(item.output_len for item in items)
    for output in track(stream, what, total, transient=True):
        record, info = records[output["index"]], output["meta_info"]
        record.end = time.perf_counter()
        record.chunks.append(record.end)
        record.output_tokens = info["completion_tokens"]
        record.cached_tokens = info["cached_tokens"]
    return records
