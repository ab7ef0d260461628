"""`radix bench offline`: an Engine in this process."""

import argparse
import time
from typing import Any

from ..errors import ConfigError
from ..offline import Engine
from ..progress import with_progress
from .figures import Record
from .flags import engine_args
from .workload import Item, make_items, read_lengths

_WARM_UP = Item([1, 2, 3], output_len=4)


def measure(namespace: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """What was measured, and a record of every request."""
    lengths = read_lengths(namespace)  # before the model is loaded: it may be wrong
    with Engine(**engine_args(namespace)) as engine:
        _complete(engine, [_WARM_UP], temperature=0.0, what="warm-up")
        engine.flush_cache()
        items = make_items(lengths, engine.config.vocab_size)
        records = _complete(engine, items, temperature=namespace.temperature, what="tokens")
        info = engine.get_server_info()
    facts = {
        "model": namespace.model or namespace.model_path or "demo",
        "dtype": info["dtype"],
        "tp_size": info["tp_size"],
        "max_total_num_tokens": info["max_total_num_tokens"],
    }
    return facts, records


def _complete(engine: Engine, items: list[Item], temperature: float, what: str) -> list[Record]:
    # Reading every token on the way costs a few microseconds of host time each, as a server does.
    start = time.perf_counter()
    records = [Record(prompt_tokens=len(item.prompt), start=start) for item in items]
    params = [
        {"max_new_tokens": item.output_len, "temperature": temperature, "ignore_eos": True}
        for item in items
    ]
    prompts = [item.prompt for item in items]
    try:
        stream = engine.stream(input_ids=prompts, sampling_params=params)
    except ValueError as error:  # as prompts that are too long
        raise ConfigError(str(error)) from error
    total = sum(item.output_len for item in items)
    for output in with_progress(stream, what, total):
        now = time.perf_counter()
        info = output["meta_info"]
        record = records[output["index"]]
        record.end = now
        record.chunks.append(now)
        record.output_tokens = info["completion_tokens"]
        record.cached_tokens = info["cached_tokens"]
    return records
