"""Prometheus metrics, `radix:<name>`. Labels take values from fixed sets only."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import msgspec
from prometheus_client import (
    CollectorRegistry,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from .. import __version__
from .admission import Admission

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)

_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

# Of what the scheduler counts, by name; requests are counted by choice (n = 4 counts four times).
_HELP = {
    "prefill_tokens_total": "prompt tokens computed by the engine",
    "cached_tokens_total": "prompt tokens taken from the prefix cache",
    "prompt_tokens_total": "prompt tokens of all choices",
    "generation_tokens_total": "tokens sampled for clients; with stop strings counted at the end",
    "num_requests_total": "choices taken in by the scheduler",
    "num_refused_requests_total": "requests that the scheduler answered with an error at once",
    "num_finished_requests_total": "choices that ended by themselves: stop or length",
    "num_aborted_requests_total": "choices that a client or an operator ended",
    "num_failed_requests_total": "choices that ended with an error",
    "num_retractions_total": "choices that gave their KV pages back and were computed again",
    "dropped_tokens_total": "tokens sampled for choices that had ended, or past their stop string",
    "late_masks_total": "rows that drew a step later as their grammar's mask had not come",
    "dedup_waits_total": "steps that choices waited for pages that another was computing",
    "steps_total": "steps launched",
    "busy_seconds_total": "seconds with a step in flight",
    "new_token_ratio": "share of max_new_tokens that admission counts on",
    "num_running_reqs": "choices in the batch",
    "num_queue_reqs": "choices waiting",
    "num_pending_reqs": "choices held for work outside of the engine before they may wait",
    "num_pages": "size of the KV cache in pages",
    "cache_pages": "pages of the prefix cache",
    "cache_evictable_pages": "pages of the prefix cache that no running choice uses",
    "cache_nodes": "nodes of the prefix cache's tree",
    "cache_lookups_total": "prompts looked up in the prefix cache",
    "cache_hits_total": "prompts of which the prefix cache had a part",
    "evicted_pages_total": "pages that left the prefix cache for others",
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


class Figures(msgspec.Struct):
    """What one API process counts: requests, the buckets and the sum of each distribution, HTTP
    answers by route and status."""

    requests: RequestCounts
    distributions: list[tuple[list[int], float]]
    answers: dict[str, dict[int, int]]

    def add(self, other: "Figures") -> None:
        """Makes these the sums of both."""
        for name in RequestCounts.__slots__:
            total = getattr(self.requests, name) + getattr(other.requests, name)
            setattr(self.requests, name, total)
        pairs = zip(self.distributions, other.distributions, strict=True)
        self.distributions = [
            ([a + b for a, b in zip(left[0], right[0], strict=True)], left[1] + right[1])
            for left, right in pairs
        ]
        for route, statuses in other.answers.items():
            own = self.answers.setdefault(route, {})
            for status, count in statuses.items():
                own[status] = own.get(status, 0) + count


class Distribution:
    """A histogram. prometheus_client's own takes a lock for each of its numbers, which every token
    would pay; this one belongs to the event loop's thread."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One value more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def figures(self) -> tuple[list[int], float]:
        """How many values each bucket has, and their sum."""
        return self._counts.copy(), self._sum

    def family(self, counts: Sequence[int], total: float) -> HistogramMetricFamily:
        """What is exported of such figures."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(counts), strict=True))
        return HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=total)


class Metrics:
    """Everything `GET /metrics` shows. Prompt tokens are either prefill tokens (computed) or cached
    tokens. What API processes count is shown as its sum over all."""

    def __init__(self, model: str, admission: Admission) -> None:
        disable_created_metrics()  # a gauge of its own for every counter and histogram
        self._model = model
        self._admission = admission
        self.counts = RequestCounts()
        self._distributions: list[Distribution] = []
        self._answers: dict[str, dict[int, int]] = {}
        self._stats: Mapping[str, float] = {}
        self._shown = self.figures()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.time_to_first_token = self._histogram("time_to_first_token", "arrival to first token")
        self.inter_token_latency = self._histogram(
            "inter_token_latency", "time between tokens of a choice"
        )
        self.request_latency = self._histogram(
            "e2e_request_latency", "arrival to last token of requests that ended ok"
        )
        self.queue_time = self._histogram(
            "request_queue_time", "time of a choice in the queue, until its first step"
        )
        self.prompt_length = self._lengths("request_prompt_tokens", "prompt tokens of a request")
        self.output_length = self._lengths(
            "request_generation_tokens", "tokens of a choice that has ended"
        )

    def count_call(self, route: str, status: int) -> None:
        """Counts an HTTP answer. `route` is the name of an endpoint, never what a client sent."""
        statuses = self._answers.setdefault(route, {})
        statuses[status] = statuses.get(status, 0) + 1

    def figures(self) -> Figures:
        """What this process has counted."""
        distributions = [each.figures() for each in self._distributions]
        answers = {route: dict(statuses) for route, statuses in self._answers.items()}
        return Figures(replace(self.counts), distributions=distributions, answers=answers)

    def total(self, siblings: Iterable[Figures]) -> Figures:
        """What all API processes have counted: this one, and the others (`siblings`)."""
        total = self.figures()
        for figures in siblings:
            total.add(figures)
        return total

    def _histogram(self, name: str, text: str) -> Distribution:
        return self._distribution(f"radix:{name}_seconds", text, _SECONDS)

    def _lengths(self, name: str, text: str) -> Distribution:
        return self._distribution(f"radix:{name}", text, _TOKENS)

    def _distribution(self, name: str, text: str, bounds: Sequence[float]) -> Distribution:
        made = Distribution(name, text, bounds=bounds)
        self._distributions.append(made)
        return made

    def collect(self) -> Iterator[Metric]:
        """Plain numbers, turned into metrics when scraped: `*_total` are counters."""
        info = GaugeMetricFamily("radix:info", "what serves, always 1", labels=["version", "model"])
        info.add_metric([__version__, self._model], 1)
        yield info
        requests = CounterMetricFamily(
            "radix:requests", "requests by how they ended", labels=["outcome"]
        )
        counts = self._shown.requests
        for outcome, count in counts.ended.items():
            requests.add_metric([outcome], count)
        yield requests
        yield CounterMetricFamily(
            "radix:requests_accepted", "requests sent to the engine", value=counts.accepted
        )
        yield GaugeMetricFamily("radix:open_requests", "requests not ended", value=counts.open)
        yield self._answer_family()
        yield GaugeMetricFamily(
            "radix:queue_bytes", "bytes that open calls hold", value=self._admission.all_bytes
        )
        yield GaugeMetricFamily(
            "radix:queue_estimated_seconds",
            "how long a new request would wait",
            value=self._admission.seconds,
        )
        figures = zip(self._distributions, self._shown.distributions, strict=True)
        for distribution, (buckets, total) in figures:
            yield distribution.family(buckets, total)
        for name, value in sorted(self._stats.items()):
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"radix:{name}", _help(name), value=value)

    def _answer_family(self) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "radix:http_requests", "HTTP answers", labels=["route", "status"]
        )
        for route, statuses in self._shown.answers.items():
            for status, count in statuses.items():
                family.add_metric([route.replace(":path", ""), str(status)], count)
        return family

    def render(self, stats: Mapping[str, float], total: Figures) -> bytes:
        """The exposition. `stats`: the newest figures of the scheduler; {}: the last ones stay.
        `total`: what all API processes have counted."""
        self._stats = stats or self._stats
        self._shown = total
        return generate_latest(self._registry)


def _help(name: str) -> str:
    """What a figure of the scheduler tells."""
    reason = re.fullmatch(r"num_queue_(\w+)_reqs", name)
    if reason is not None:
        return f"choices waiting, of which the last plan said: {reason[1].replace('_', ' ')}"
    return _HELP.get(name, name.replace("_", " "))
