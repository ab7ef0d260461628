"""What a benchmark asks for, and the figures that come of it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..errors import ConfigError

_MAX_ID = 10_000  # prompt ids of request i: random.Random(i).randrange(min(vocabulary, this))


@dataclass(frozen=True, slots=True)
class Item:
    """One request: its prompt and how many tokens it shall give (EOS is ignored)."""

    prompt: list[int]
    output_len: int


class _File(msgspec.Struct):
    requests: list[tuple[int, int]]
    what: str = ""


def parse_range(text: str) -> tuple[int, int]:
    """`100` or `100:1024`, both ends included."""
    low, _, high = text.partition(":")
    first, last = int(low), int(high or low)
    if not 1 <= first <= last:
        raise ValueError(text)
    return first, last


def make_workload(
    file: str | None,
    count: int | None,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    vocab_size: int,
    seed: int,
) -> list[Item]:
    """Requests of `file` (the first `count`), or random lengths. Raises ConfigError."""
    if file is not None:
        try:
            lengths = msgspec.json.decode(Path(file).read_bytes(), type=_File).requests[:count]
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"cannot read the workload {file}: {error}") from error
    else:
        rng = random.Random(seed)
        lengths = [(rng.randint(*input_len), rng.randint(*output_len)) for _ in range(count or 32)]
    limit = min(vocab_size, _MAX_ID)
    items = []
    for i, (prompt_len, out) in enumerate(lengths):
        rng = random.Random(i)
        items.append(Item([rng.randrange(limit) for _ in range(prompt_len)], out))
    return items


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
    """Throughput and latency of the requests that succeeded.

    output: output tokens over the whole time. prefill: computed prompt tokens over the time to the
    last first token. decode: tokens after each first one, over the time since the first of all.
    """
    good = [r for r in records if r.error is None and r.chunks]
    result: dict[str, Any] = {"requests": len(records), "failed": len(records) - len(good)}
    if not good:
        return result
    begin, end = min(r.start for r in good), max(r.end for r in good)
    first, last_first = min(r.chunks[0] for r in good), max(r.chunks[0] for r in good)
    prompt, cached = sum(r.prompt_tokens for r in good), sum(r.cached_tokens for r in good)
    output = sum(r.output_tokens for r in good)
    gaps = np.concatenate([np.diff(r.chunks) for r in good])
    per_token = [(r.end - r.chunks[0]) / (r.output_tokens - 1) for r in good if r.output_tokens > 1]
    return {
        **result,
        "seconds": end - begin,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_second": len(good) / (end - begin),
        "output_tokens_per_second": output / (end - begin),
        "prefill_tokens_per_second": (prompt - cached) / max(last_first - begin, 1e-9),
        "decode_tokens_per_second": (output - len(good)) / max(end - first, 1e-9),
        "cache_hit_rate": cached / max(1, prompt),
        "ttft_ms": _percentiles([r.chunks[0] - r.start for r in good]),
        "tpot_ms": _percentiles(per_token),
        "itl_ms": _percentiles(gaps),
        "e2e_ms": _percentiles([r.end - r.start for r in good]),
    }


def _percentiles(seconds: Any) -> dict[str, float] | None:
    values = np.asarray(seconds, np.float64) * 1e3
    if not len(values):
        return None
    names = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
    found = {name: float(np.percentile(values, q)) for name, q in names.items()}
    return {"mean": float(values.mean()), **found, "max": float(values.max())}


def machine() -> dict[str, Any]:
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "runtime": __version__,
    }


def report(result: dict[str, Any], file: str | None) -> None:
    """Prints the figures; writes them to `file` as JSON when given."""
    table = Table(show_header=False, box=None)
    for name, value in result.items():
        if isinstance(value, dict):
            value = "  ".join(f"{k} {_short(v)}" for k, v in value.items())
        table.add_row(name, _short(value))
    Console(soft_wrap=True).print(table)
    if file is not None:
        Path(file).write_text(json.dumps(result, indent=1) + "\n")


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
