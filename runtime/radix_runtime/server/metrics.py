"""Prometheus metrics, `radix:<name>`. Labels take values from fixed sets only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)

_HELP = {
    "prefill_tokens_total": "prompt tokens computed by the engine",
    "cached_tokens_total": "prompt tokens taken from the prefix cache",
    "prompt_tokens_total": "prompt tokens of all choices",
    "generation_tokens_total": "tokens sampled for clients; with stop strings counted at the end",
    "num_running_reqs": "choices in the batch",
    "num_queue_reqs": "choices waiting",
    "num_used_tokens": "KV cache in use, in tokens",
    "max_total_num_tokens": "size of the KV cache in tokens",
    "token_usage": "share of the KV cache in use",
}


Outcome = Literal["ok", "aborted", "failed", "refused"]


@dataclass(slots=True)
class RequestCounts:
    """Requests since the start: `accepted` were sent to the engine, the others ended so."""

    accepted: int = 0
    ok: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0

    def end(self, how: Outcome) -> None:
        """Counts a request that has ended."""
        match how:
            case "ok":
                self.ok += 1
            case "aborted":
                self.aborted += 1
            case "failed":
                self.failed += 1
            case "refused":
                self.refused += 1

    @property
    def ended(self) -> dict[str, int]:
        """How many ended, by outcome."""
        return {
            "ok": self.ok,
            "aborted": self.aborted,
            "failed": self.failed,
            "refused": self.refused,
        }

    @property
    def open(self) -> int:
        """How many have not ended."""
        return self.accepted - sum(self.ended.values())


class Metrics:
    """Everything `GET /metrics` shows. Prompt tokens are either prefill tokens (computed) or cached
    tokens."""

    def __init__(self) -> None:
        self.counts = RequestCounts()
        self._stats: Mapping[str, float] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.time_to_first_token = self._histogram("time_to_first_token", "arrival to first token")
        self.inter_token_latency = self._histogram(
            "inter_token_latency", "time between tokens of a choice"
        )
        self.request_latency = self._histogram(
            "e2e_request_latency", "arrival to last token of requests that ended ok"
        )
        self._http = Counter(
            "radix:http_requests", "HTTP answers", ["route", "status"], registry=self._registry
        )

    def count_call(self, route: str, status: int) -> None:
        """Counts an HTTP answer. `route` is the name of an endpoint, never what a client sent."""
        self._http.labels(route, str(status)).inc()

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"radix:{name}_seconds", text, buckets=_SECONDS, registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        """Plain numbers, turned into metrics when scraped: `*_total` are counters."""
        requests = CounterMetricFamily(
            "radix:requests", "requests by how they ended", labels=["outcome"]
        )
        for outcome, count in self.counts.ended.items():
            requests.add_metric([outcome], count)
        yield requests
        yield CounterMetricFamily(
            "radix:requests_accepted", "requests sent to the engine", value=self.counts.accepted
        )
        yield GaugeMetricFamily("radix:open_requests", "requests not ended", value=self.counts.open)
        for name, value in sorted(self._stats.items()):
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"radix:{name}", _HELP.get(name, name.replace("_", " ")), value=value)

    def render(self, stats: Mapping[str, float]) -> bytes:
        """The exposition. `stats`: the newest figures of the scheduler; {}: the last ones stay."""
        self._stats = stats or self._stats
        return generate_latest(self._registry)
