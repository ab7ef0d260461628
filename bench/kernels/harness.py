"""Timing: contenders take turns within one run, over rotating inputs, and only ratios travel.

A `Case` is one op at one shape. Each contender is a function of one input set; the sets together
are larger than the last-level cache, so that no contender reads what it has just written. On the
GPU a round is one captured graph over all sets; on the CPU it is a timed loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

ROUNDS = 7
ROUND_SECONDS = 0.08
CACHE_BYTES = {"cpu": 256 << 20, "cuda": 256 << 20}
MAX_SETS = 64

Inputs = tuple[Any, ...]
Contender = Callable[..., Any]


@dataclass
class Case:
    """One row of the table. `bytes` and `flops` are the least the op must move and do."""

    op: str
    shape: str
    dtype: torch.dtype
    bytes: float
    flops: float
    make_inputs: Callable[[], Inputs]
    contenders: dict[str, Contender]  # "radix" and the peers


@dataclass
class Timing:
    median_us: float
    low_us: float
    high_us: float


@dataclass
class Row:
    case: Case
    timings: dict[str, Timing] = field(default_factory=dict)

    def ratio(self, peer: str) -> float:
        """Time of the peer over ours: above 1 we are faster. Median over the interleaved rounds."""
        return self.timings[peer].median_us / self.timings["radix"].median_us


def measure(case: Case, device: torch.device) -> Row:
    sets = _input_sets(case, device)
    timers = {name: _timer(fn, sets, device) for name, fn in case.contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            samples[name].append(timer())
    timings = {name: Timing(statistics.median(s) * 1e6, min(s) * 1e6, max(s) * 1e6) for name, s in samples.items()}
    return Row(case, timings)


def _input_sets(case: Case, device: torch.device) -> list[Inputs]:
    count = int(CACHE_BYTES[device.type] // max(case.bytes, 1)) + 1
    return [case.make_inputs() for _ in range(min(max(count, 2), MAX_SETS))]


def _timer(fn: Contender, sets: Sequence[Inputs], device: torch.device) -> Callable[[], float]:
    """A function that runs one round and returns seconds per call."""
    for inputs in sets[:2]:
        fn(*inputs)
    if device.type == "cpu":
        return _cpu_timer(fn, sets)
    torch.cuda.synchronize()
    return _graph_timer(fn, sets)


def _cpu_timer(fn: Contender, sets: Sequence[Inputs]) -> Callable[[], float]:
    def run() -> float:
        calls, start = 0, time.perf_counter()
        while True:
            for inputs in sets:
                fn(*inputs)
            calls += len(sets)
            elapsed = time.perf_counter() - start
            if elapsed > ROUND_SECONDS:
                return elapsed / calls

    return run


def _graph_timer(fn: Contender, sets: Sequence[Inputs]) -> Callable[[], float]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fn(*sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for inputs in sets:
            fn(*inputs)
    graph.replay()
    torch.cuda.synchronize()

    def run() -> float:
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        replays = 0
        begin = time.perf_counter()
        start.record()
        while replays < 2 or time.perf_counter() - begin < ROUND_SECONDS:
            graph.replay()
            replays += 1
            if replays % 8 == 0:
                torch.cuda.synchronize()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / (replays * len(sets))

    return run
