"""Prometheus metrics, `radix:<name>`. Labels take values from fixed sets only."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

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


class Metrics:
    """Everything `GET /metrics` shows. Prompt tokens are either prefill tokens (computed) or cached
    tokens."""

    def __init__(self) -> None:
        # Requests since the start; those that are in none of the others are open.
        self.counts = SimpleNamespace(accepted=0, ok=0, aborted=0, failed=0, refused=0)
        self._stats: Mapping[str, float] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.first = self._histogram("time_to_first_token", "arrival to first token")
        self.between = self._histogram("inter_token_latency", "time between tokens of a choice")
        self.whole = self._histogram(
            "e2e_request_latency", "arrival to last token of requests that ended ok"
        )
        self.http = Counter(
            "radix:http_requests", "HTTP answers", ["route", "status"], registry=self._registry
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"radix:{name}_seconds", text, buckets=_SECONDS, registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        """Plain numbers, turned into metrics when scraped: `*_total` are counters."""
        requests = CounterMetricFamily(
            "radix:requests", "requests by how they ended", labels=["outcome"]
        )
        ended = dict(vars(self.counts))
        accepted = ended.pop("accepted")
        for outcome, count in ended.items():
            requests.add_metric([outcome], count)
        yield requests
        yield CounterMetricFamily(
            "radix:requests_accepted", "requests sent to the engine", value=accepted
        )
        yield GaugeMetricFamily(
            "radix:open_requests", "requests not ended", value=accepted - sum(ended.values())
        )
        for name, value in sorted(self._stats.items()):
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"radix:{name}", _HELP.get(name, name.replace("_", " ")), value=value)

    def render(self, stats: Mapping[str, float]) -> bytes:
        """The exposition. `stats`: the newest figures of the scheduler; if none, the last stay."""
        self._stats = stats or self._stats
        return generate_latest(self._registry)
