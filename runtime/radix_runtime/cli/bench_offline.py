"""`radix bench offline`: an Engine in this process."""

import argparse
import time
from typing import Any

from ..errors import ConfigError
from ..offline import Engine
from ..progress import with_progress
from .figures import Record
from .flags import engine_args
from .workload import Item, read_workload

_WARM_UP = Item([1, 2, 3], output_len=4)


def measure(namespace: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """What was measured, and a record of every request."""
    workload = read_workload(namespace)  # before the model is loaded: it may be wrong
    run = _stream if namespace.stream else _generate
    with Engine(**engine_args(namespace)) as engine:
        items = workload.items(engine.config.vocab_size, engine.tokenizer)
        run(engine, [_WARM_UP], 0.0)
        engine.flush_cache()
        records = run(engine, items, namespace.temperature)
        info = engine.get_server_info()
    facts = {
        "model_id": namespace.model or namespace.model_path or "demo",
        "dataset": workload.name,
        "num_prompts": len(items),
        "dtype": info["dtype"],
        "tp_size": info["tp_size"],
        "max_running_requests": info["max_running_requests"],
        "chunked_prefill_size": info["chunked_prefill_size"],
        "max_total_num_tokens": info["max_total_num_tokens"],
    }
    return facts, records


def _generate(engine: Engine, items: list[Item], temperature: float) -> list[Record]:
    """All at once, and nobody looks at a token before its request has ended: no time is spent on
    anything but the engine's own work."""
    start = time.perf_counter()
    outputs = _checked(engine.generate, items, temperature, use_tqdm=True)
    records = []
    for item, output in zip(items, outputs, strict=True):
        info = output["meta_info"]
        record = Record(
            prompt_tokens=len(item.prompt),
            start=start,
            end=start + info["e2e_latency"],
            output_tokens=info["completion_tokens"],
            cached_tokens=info["cached_tokens"],
        )
        records.append(record)
    return records


def _stream(engine: Engine, items: list[Item], temperature: float) -> list[Record]:
    """The same with the time of each token, which costs the engine's thread some microseconds a
    token."""
    start = time.perf_counter()
    records = [Record(prompt_tokens=len(item.prompt), start=start) for item in items]
    total = sum(item.output_len for item in items)
    for output in with_progress(_checked(engine.stream, items, temperature), "tokens", total):
        now = time.perf_counter()
        info = output["meta_info"]
        record = records[output["index"]] if len(items) > 1 else records[0]
        record.end = now
        record.chunks.append(now)
        record.output_tokens = info["completion_tokens"]
        record.cached_tokens = info["cached_tokens"]
    return records


def _checked(call: Any, items: list[Item], temperature: float, **options: Any) -> Any:
    """Raises ConfigError for what the engine refuses, as prompts that are too long."""
    params = [
        {"max_new_tokens": item.output_len, "temperature": temperature, "ignore_eos": True}
        for item in items
    ]
    prompts = [item.prompt for item in items]
    try:
        return call(input_ids=prompts, sampling_params=params, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
