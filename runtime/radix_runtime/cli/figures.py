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


def figures(records: list[Record]) -> dict[str, Any]:
    """Throughput and latency of the requests that succeeded.

    Output throughput is output tokens over the whole time. Prefill: prompt tokens computed over the
    time until the last first token. Decode: tokens after each first one, over the time since the
    first of all.
    """
    good = [record for record in records if record.error is None and record.chunks]
    counts = {"requests": len(records), "failed": len(records) - len(good)}
    if not good:
        return counts
    begin = min(record.start for record in good)
    end = max(record.end for record in good)
    first_token = min(record.chunks[0] for record in good)
    last_first_token = max(record.chunks[0] for record in good)
    prompt = sum(record.prompt_tokens for record in good)
    cached = sum(record.cached_tokens for record in good)
    output = sum(record.output_tokens for record in good)
    seconds_per_token = [
        (record.end - record.chunks[0]) / (record.output_tokens - 1)
        for record in good
        if record.output_tokens > 1
    ]
    return {
        **counts,
        "seconds": end - begin,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_second": len(good) / (end - begin),
        "output_tokens_per_second": output / (end - begin),
        "prefill_tokens_per_second": (prompt - cached) / max(last_first_token - begin, 1e-9),
        "decode_tokens_per_second": (output - len(good)) / max(end - first_token, 1e-9),
        "cache_hit_rate": cached / max(1, prompt),
        "ttft_ms": _percentiles([record.chunks[0] - record.start for record in good]),
        "tpot_ms": _percentiles(seconds_per_token),
        "itl_ms": _percentiles(np.concatenate([np.diff(record.chunks) for record in good])),
        "e2e_ms": _percentiles([record.end - record.start for record in good]),
    }


def _percentiles(seconds: Sequence[float] | np.ndarray) -> dict[str, float] | None:
    """Mean, percentiles and maximum in milliseconds; None without any value."""
    if len(seconds) == 0:
        return None
    values = np.asarray(seconds) * 1e3
    percentiles = {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 95, 99)}
    return {"mean": float(values.mean()), **percentiles, "max": float(values.max())}


def machine() -> dict[str, Any]:
    """Where and when a measurement was made."""
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": model[1] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "runtime": __version__,
    }
