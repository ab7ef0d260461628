"""What a benchmark measured: records of requests, and the figures that come of them."""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__

_PERCENTILES = (90, 95, 99)


@dataclass(slots=True, kw_only=True)
class Record:
    """One request as it went; times in seconds on one clock. `chunks`: arrival of each piece."""

    prompt_tokens: int
    start: float
    chunks: list[float] = field(default_factory=list)
    end: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


Objectives = dict[str, float]  # milliseconds by ttft, tpot, itl or e2el


def figures(records: list[Record], objectives: Objectives | None = None) -> dict[str, Any]:
    """Throughput and latency of the requests that succeeded, under vLLM's and SGLang's names.

    `duration` runs from the first request's start to the last one's end, in seconds; throughputs
    are counts over it. Of each request: `ttft` is the time to its first piece; `tpot` the time
    after it by the tokens after the first; `itl` the gaps between its pieces, which may hold
    several tokens; `e2el` all of it. Those of requests that came as a whole are left out.
    `request_goodput` counts the requests that meet all `objectives`; the one for `itl` is meant for
    the 99th percentile of a request's own gaps.

    Beside those: `prefill_throughput`, prompt tokens computed over the time until the last first
    token; `decode_throughput`, tokens after each first one over the time since the first of all;
    `prefix_cache_hit_rate` of the prompt tokens.
    """
    good = [record for record in records if record.error is None]
    found: dict[str, Any] = {"completed": len(good), "failed": len(records) - len(good)}
    if not good:
        return found
    start = min(record.start for record in good)
    duration = max(record.end for record in good) - start
    prompt = sum(record.prompt_tokens for record in good)
    cached = sum(record.cached_tokens for record in good)
    output = sum(record.output_tokens for record in good)
    found |= {
        "duration": duration,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / duration,
        "input_throughput": prompt / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "prefix_cache_hit_rate": cached / max(1, prompt),
        "concurrency": sum(record.end - record.start for record in good) / duration,
        "max_concurrent_requests": _most_open(good),
    }
    if objectives:
        met = sum(_meets(record, objectives) for record in good)
        found["request_goodput"] = met / duration
        found["goodput_share"] = met / len(records)
    found |= _statistics("e2el", [record.end - record.start for record in good])
    streamed = [record for record in good if record.chunks]
    if not streamed:
        return found
    first_token = min(record.chunks[0] for record in streamed)
    last_first_token = max(record.chunks[0] for record in streamed)
    prefill_seconds = max(last_first_token - start, 1e-9)
    decode_seconds = max(start + duration - first_token, 1e-9)
    return {
        **found,
        "prefill_throughput": (prompt - cached) / prefill_seconds,
        "decode_throughput": (output - len(streamed)) / decode_seconds,
        **_statistics("ttft", [_ttft(record) for record in streamed]),
        **_statistics("tpot", [_tpot(r) for r in streamed if r.output_tokens > 1]),
        **_statistics("itl", np.concatenate([np.diff(record.chunks) for record in streamed])),
    }


def _ttft(record: Record) -> float:
    return record.chunks[0] - record.start


def _tpot(record: Record) -> float:
    return (record.end - record.chunks[0]) / (record.output_tokens - 1)


def _meets(record: Record, objectives: Objectives) -> bool:
    """Whether a request met every objective. One without pieces, or with one token, has no gaps."""
    took = {"e2el": record.end - record.start}
    if record.chunks:
        took["ttft"] = _ttft(record)
    if len(record.chunks) > 1:
        took["itl"] = float(np.percentile(np.diff(record.chunks), 99))
    if record.chunks and record.output_tokens > 1:
        took["tpot"] = _tpot(record)
    return all(1e3 * took.get(name, 0.0) <= limit for name, limit in objectives.items())


def _most_open(records: list[Record]) -> int:
    """The most requests that were open at once; one that ends as another starts is not."""
    starts = np.sort([record.start for record in records])
    ends = np.sort([record.end for record in records])
    ended = np.searchsorted(ends, starts, side="right")
    return int((np.arange(1, len(starts) + 1) - ended).max())


def _statistics(name: str, seconds: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Mean, median, deviation and percentiles in milliseconds; nothing without any value."""
    if len(seconds) == 0:
        return {}
    values = np.asarray(seconds) * 1e3
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        **{f"p{q}_{name}_ms": float(np.percentile(values, q)) for q in _PERCENTILES},
        f"max_{name}_ms": float(values.max()),
    }


def machine() -> dict[str, Any]:
    """Where and when a measurement was made."""
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": model[1] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "runtime": __version__,
    }
