"""Prometheus metrics of the API process, and the scheduler's figures beside them.

Names are `radix:<name>`. Labels take values from fixed sets only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..messages import TextDelta

if TYPE_CHECKING:
    from .submission import OpenRequest

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

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


class _Counts(Protocol):
    accepted: int
    ok: int
    aborted: int
    failed: int


class _EngineCollector:
    """Turns plain numbers into metrics when scraped: `*_total` are counters, others gauges."""

    def __init__(self, counts: _Counts, num_open: Callable[[], int]) -> None:
        self._counts = counts
        self._num_open = num_open
        self.stats: Mapping[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "radix:requests", "requests by how they ended", labels=["outcome"]
        )
        for outcome in ("ok", "aborted", "failed"):
            requests.add_metric([outcome], getattr(self._counts, outcome))
        yield requests
        yield CounterMetricFamily(
            "radix:requests_accepted", "requests sent to the engine", value=self._counts.accepted
        )
        yield GaugeMetricFamily("radix:open_requests", "requests not ended", value=self._num_open())
        for name, value in sorted(self.stats.items()):
            text = _HELP.get(name, name.replace("_", " "))
            if name.endswith("_total"):
                yield CounterMetricFamily(f"radix:{name}", text, value=value)
            else:
                yield GaugeMetricFamily(f"radix:{name}", text, value=value)


class Metrics:
    """Everything `GET /metrics` shows. Tokens are counted by the scheduler: of the prompt tokens
    `radix:prefill_tokens_total` were computed and `radix:cached_tokens_total` were not."""

    def __init__(self, counts: _Counts, num_open: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector(counts, num_open)
        self.registry.register(self._engine)
        self._first = self._histogram("time_to_first_token_seconds", "arrival to first token")
        self._between = self._histogram(
            "inter_token_latency_seconds", "time between tokens of a choice"
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "arrival to last token")
        self._http = Counter(
            "radix:http_requests", "HTTP answers", ["route", "status"], registry=self.registry
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"radix:{name}", text, buckets=_SECONDS, registry=self.registry)

    def observe_delta(self, request: OpenRequest, delta: TextDelta, now: float) -> None:
        """`now` is of time.perf_counter()."""
        count = len(delta.ids) // 4
        if count == 0:
            return
        if request.first_token == 0:
            request.first_token = now
            self._first.observe(now - request.submission.started)
        last = request.last_token[delta.choice]
        if last:
            self._between.observe((now - last) / count)
        request.last_token[delta.choice] = now

    def observe_end(self, request: OpenRequest, now: float) -> None:
        self._whole.observe(now - request.submission.started)

    def observe_http(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def render(self, stats: Mapping[str, float]) -> bytes:
        """The exposition, with the newest figures of the scheduler."""
        self._engine.stats = stats
        return generate_latest(self.registry)
