"""`radix bench overload`: what a server still does when several times too much is asked of it."""

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import uvloop

from .client import Client
from .raw_client import RawClient, target_of
from .workload import positive

_PROBE_PAUSE = 0.1  # seconds between two /health
_VOCAB = 1000  # ids of prompts are below
_TIMEOUT = 120.0  # seconds for one request
_NO_ANSWER = (OSError, ValueError, asyncio.TimeoutError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this mode beside --url, --api-key and --json."""
    group = parser.add_argument_group("overload")
    group.add_argument(
        "--factor",
        type=positive(float),
        default=10.0,
        help="times the requests a second that the server manages (default: %(default)s)",
    )
    group.add_argument(
        "--seconds",
        type=positive(float),
        default=20.0,
        help="of each of the two phases (default: %(default)s)",
    )
    group.add_argument(
        "--concurrency",
        type=positive(int),
        default=64,
        help="open requests while the peak is measured (default: %(default)s)",
    )
    group.add_argument("--prompt-tokens", type=positive(int), default=32)
    group.add_argument("--answer-tokens", type=positive(int), default=48)


@dataclass(slots=True)
class Phase:
    """What happened in some seconds. Times are in seconds; `failed`: neither 200 nor 503."""

    served_tokens: int = 0
    served: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    duration: float = 0.0

    @property
    def goodput(self) -> float:
        """Tokens of whole answers, a second."""
        return self.served_tokens / self.duration

    def figures(self) -> dict[str, Any]:
        """Counts, tokens a second and times in ms."""
        return {
            "goodput_tokens_per_s": self.goodput,
            "served": len(self.served),
            "refused": len(self.refused),
            "failed": len(self.failed),
            **_times("served", self.served),
            **_times("refused", self.refused),
            **_times("health", self.health),
        }


def _times(name: str, seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        f"p50_{name}_ms": 1e3 * cuts[49],
        f"p99_{name}_ms": 1e3 * cuts[98],
        f"max_{name}_ms": 1e3 * max(seconds),
    }


def measure(namespace: argparse.Namespace) -> dict[str, Any]:
    """The figures of both phases, and their ratio."""
    return uvloop.run(_Overload(namespace).run())


class _Overload:
    def __init__(self, namespace: argparse.Namespace) -> None:
        self._flags = namespace
        self._random = random.Random(0)
        self._open: set[asyncio.Task[None]] = set()

    async def run(self) -> dict[str, Any]:
        flags = self._flags
        async with Client(flags.url, flags.api_key) as client:
            self._model = await client.model()
        self._client = RawClient(target_of(flags.url, flags.api_key))
        await self._phase(self._closed_loop, seconds=2.0)  # warm-up
        peak = await self._phase(self._closed_loop, flags.seconds)
        rate = flags.factor * len(peak.served) / peak.duration
        over = await self._phase(lambda phase, end: self._open_loop(phase, end, rate))
        recovery = await self._recovery()
        self._client.close()
        return {
            "model": self._model,
            "offered_requests_per_s": rate,
            "peak": peak.figures(),
            "overload": over.figures(),
            "goodput_over_peak": over.goodput / peak.goodput if peak.goodput else 0.0,
            "recovery_s": recovery,
            "failed": len(peak.failed) + len(over.failed),
            "errors": sorted({*peak.failed, *over.failed})[:3],
        }

    async def _phase(self, load: Any, seconds: float | None = None) -> Phase:
        phase = Phase()
        start = time.perf_counter()
        end = start + (self._flags.seconds if seconds is None else seconds)
        probe = asyncio.create_task(self._probe(phase))
        await load(phase, end)
        phase.duration = time.perf_counter() - start
        probe.cancel()
        if self._open:  # what is under way counts for no phase
            await asyncio.wait(set(self._open))
        return phase

    async def _closed_loop(self, phase: Phase, end: float) -> None:
        async def client() -> None:
            while time.perf_counter() < end:
                await self._request(phase, end)

        await asyncio.gather(*[client() for _ in range(self._flags.concurrency)])

    async def _open_loop(self, phase: Phase, end: float, rate: float) -> None:
        due = time.perf_counter()
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(self._request(phase, end))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            due += self._random.expovariate(rate)

    async def _request(self, phase: Phase, end: float) -> None:
        body = {
            "model": self._model,
            "prompt": [self._random.randrange(_VOCAB) for _ in range(self._flags.prompt_tokens)],
            "max_tokens": self._flags.answer_tokens,
            "ignore_eos": True,
        }
        start = time.perf_counter()
        try:
            status, answer = await self._client.call("POST", "/v1/completions", body, _TIMEOUT)
        except _NO_ANSWER as error:
            phase.failed.append(f"{type(error).__name__}: {error}"[:200])
            return
        now = time.perf_counter()
        if status == 503:
            phase.refused.append(now - start)
        elif status != 200:
            phase.failed.append(answer[:200].decode(errors="replace"))
        elif now <= end:
            phase.served.append(now - start)
            phase.served_tokens += self._flags.answer_tokens

    async def _probe(self, phase: Phase) -> None:
        while True:
            start = time.perf_counter()
            try:
                status, answer = await self._client.call("GET", "/health", seconds=_TIMEOUT)
            except _NO_ANSWER as error:
                phase.failed.append(f"/health: {error}"[:200])
            else:
                phase.health.append(time.perf_counter() - start)
                if status != 200:
                    phase.failed.append(f"/health: {answer[:200].decode(errors='replace')}")
            await asyncio.sleep(_PROBE_PAUSE)

    async def _recovery(self) -> float:
        """Seconds until a request is served again."""
        start = time.perf_counter()
        phase = Phase()
        while not phase.served:
            await self._request(phase, end=start + _TIMEOUT)
        return time.perf_counter() - start
