"""Prometheus metrics of the API process, and the scheduler's figures beside them.

Names are `radix:<name>`. Labels take values from fixed sets only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300,
)  # fmt: skip
_HELP = {
    "prefill_tokens_total": "prompt tokens computed by the engine",
    "cached_tokens_total": "prompt tokens taken from the prefix cache",
    "prompt_tokens_total": "prompt tokens of all requests",
    "generation_tokens_total": "tokens sampled for clients",
    "num_running_reqs": "choices in the batch",
    "num_queue_reqs": "choices waiting",
    "num_used_tokens": "KV cache in use, in tokens",
    "max_total_num_tokens": "size of the KV cache in tokens",
    "token_usage": "share of the KV cache in use",
}


@dataclass(slots=True)
class Counts:
    """Requests since the start; those that are in none of the last three are open."""

    accepted: int = 0
    ok: int = 0
    aborted: int = 0
    failed: int = 0


class Metrics:
    """Everything `GET /metrics` shows. Tokens are counted by the scheduler: of the prompt tokens
    `radix:prefill_tokens_total` were computed and `radix:cached_tokens_total` were not."""

    def __init__(self, num_open: Callable[[], int]) -> None:
        self.counts = Counts()
        self._num_open = num_open
        self._stats: Mapping[str, float] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.first = self._histogram("time_to_first_token", "arrival to first token")
        self.between = self._histogram("inter_token_latency", "time between tokens of a choice")
        self.whole = self._histogram("e2e_request_latency", "arrival to last token")
        self.http = Counter("radix:http_requests", "HTTP answers", ["route", "status"], registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"radix:{name}_seconds", text, buckets=_SECONDS, registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        """Plain numbers, turned into metrics when scraped: `*_total` are counters."""
        requests = CounterMetricFamily("radix:requests", "requests by how they ended", labels=["outcome"])
        for outcome in ("ok", "aborted", "failed"):
            requests.add_metric([outcome], getattr(self.counts, outcome))
        yield requests
        yield CounterMetricFamily("radix:requests_accepted", "requests sent to the engine", value=self.counts.accepted)
        yield GaugeMetricFamily("radix:open_requests", "requests not ended", value=self._num_open())
        for name, value in sorted(self._stats.items()):
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            text = _HELP.get(name, name.replace("_", " "))
            yield family(f"radix:{name}", text, value=value)

    def render(self, stats: Mapping[str, float]) -> bytes:
        """The exposition. `stats`: the newest figures of the scheduler; if none, the last stay."""
        self._stats = stats or self._stats
        return generate_latest(self._registry)
