"""Timing on a GPU, by what the op costs.

- Below 50 us: captured graphs of 100 and of 200 calls over rotated inputs and outputs, a reading
  flush of the L2 before each replay; the time of a call is the difference over 100, so that
  launching the graph drops out. An empty kernel and a plain read of as many bytes are measured the
  same way and stand beside it.
- To 1 ms: events around a replayed graph over rotated inputs and outputs.
- Tensor-core rows above 50 us, and all above 1 ms: the same, at least `arm_seconds` an arm. The SM
  clock and the power that nvidia-smi saw during the arm are kept: a hot chip lowers its clock.

Contenders alternate, A B A B. One that cannot be captured runs eagerly between events ("eager").
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from .harness import (
    ROTATED_BYTES,
    ROUND_SECONDS,
    ROUNDS,
    Case,
    Contender,
    Inputs,
    Row,
    Timing,
    runnable,
)

SHORT_US = 50.0
LONG_US = 1000.0
CALLS = 100
LONG_ROUNDS = 5
SLOPES_A_ROUND = 3


def measure(case: Case, sets: Sequence[Inputs], compute_bound: bool, arm_seconds: float) -> Row:
    """All contenders of a case, by the method that the fastest one asks for."""
    probes = runnable(case, lambda fn: _probe(fn, sets))
    contenders = {name: case.contenders[name] for name in probes}
    fastest = min(probes.values()) * 1e6
    if fastest < SHORT_US:
        arms = {name: _slope_arm(fn, sets) for name, fn in contenders.items()}
        row = Row(case.facts(), _alternate(arms, ROUNDS))
        row.floor = {"empty": _empty_us(), "read": _read_us(int(case.bytes))}
        return row
    long = fastest > LONG_US or compute_bound
    seconds = arm_seconds if long else ROUND_SECONDS
    arms = {name: _graph_arm(fn, sets, seconds) for name, fn in contenders.items()}
    return Row(case.facts(), _alternate(arms, LONG_ROUNDS if long else ROUNDS, watch=long))


def in_turns(
    contenders: Mapping[str, Contender],
    sets: Mapping[str, Sequence[Inputs]],
    *,
    rounds: int,
    seconds: float,
) -> dict[str, Timing]:
    """Contenders that have inputs of their own, each in a graph over all of them; rounds of at
    least `seconds`, in turns."""
    arms = {}
    for name, fn in contenders.items():
        repeated = list(sets[name]) * max(1, CALLS // len(sets[name]))
        arms[name] = _graph_arm(fn, repeated, seconds)
    return _alternate(arms, rounds)


# An arm: its method, and a function that runs one round and returns seconds a call.
Arm = tuple[str, Callable[[], float]]


def _alternate(arms: dict[str, Arm], rounds: int, watch: bool = False) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in arms}
    facts: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (_, run) in arms.items():
            if watch:
                with _watched(facts[name]):
                    samples[name].append(run())
            else:
                samples[name].append(run())
    timings = {}
    for name, (method, _) in arms.items():
        measured: dict[str, float] = {}
        if facts[name]:
            measured["sm_mhz"] = statistics.mean(clock for clock, _ in facts[name])
            measured["watts"] = statistics.mean(watts for _, watts in facts[name])
        timings[name] = Timing.of(samples[name], method, **measured)
    return timings


def _probe(fn: Contender, sets: Sequence[Inputs]) -> float:
    """Seconds a call, roughly, without what launching costs where the call can be captured."""
    for inputs in sets[:2]:
        fn(*inputs)
    torch.cuda.synchronize()
    return _graph_arm(fn, sets, 0.01)[1]()


def _capture(fn: Contender, sets: Sequence[Inputs], calls: int) -> torch.cuda.CUDAGraph | None:
    """A graph of that many calls over the sets in turn, replayed once; None where fn cannot be
    captured."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    kept = _Kept()
    with torch.cuda.stream(stream):
        fn(*sets[0])
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                kept.add(fn(*sets[i % len(sets)]))
    except (RuntimeError, ValueError):
        torch.cuda.synchronize()
        return None
    graph.replay()
    torch.cuda.synchronize()
    return graph


class _Kept:
    """Holds the latest results up to ROTATED_BYTES, so that the allocator does not give every call
    one output."""

    def __init__(self) -> None:
        self._held: deque[tuple[int, Any]] = deque()
        self._bytes = 0

    def add(self, result: Any) -> None:
        parts = result if isinstance(result, (tuple, list)) else (result,)
        size = sum(x.nbytes for x in parts if isinstance(x, torch.Tensor))
        self._held.append((size, result))
        self._bytes += size
        while self._bytes > ROTATED_BYTES and len(self._held) > 1:
            self._bytes -= self._held.popleft()[0]


def _slope_arm(fn: Contender, sets: Sequence[Inputs]) -> Arm:
    small = _capture(fn, sets, CALLS)
    large = _capture(fn, sets, 2 * CALLS)
    if small is None or large is None:
        return _eager_arm(fn, sets, ROUND_SECONDS)

    def run() -> float:
        slopes = [(_flushed(large) - _flushed(small)) / CALLS for _ in range(SLOPES_A_ROUND)]
        return statistics.median(slopes)

    return "slope", run


def _flushed(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay after everything else has been read into the L2."""
    start = torch.cuda.Event(True)
    end = torch.cuda.Event(True)
    _flush_buffer().sum()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@cache
def _flush_buffer() -> torch.Tensor:
    return torch.ones(ROTATED_BYTES // 4, device="cuda")


def _graph_arm(fn: Contender, sets: Sequence[Inputs], seconds: float) -> Arm:
    graph = _capture(fn, sets, len(sets))
    if graph is None:
        return _eager_arm(fn, sets, seconds)
    return "graph", lambda: _timed(graph.replay, seconds) / len(sets)


def _eager_arm(fn: Contender, sets: Sequence[Inputs], seconds: float) -> Arm:
    def all_sets() -> None:
        for inputs in sets:
            fn(*inputs)

    return "eager", lambda: _timed(all_sets, seconds) / len(sets)


def _timed(call: Callable[[], None], seconds: float) -> float:
    """Seconds of a call, between events around as many as fill the given time."""
    start = torch.cuda.Event(True)
    end = torch.cuda.Event(True)
    calls = 0
    begin = time.perf_counter()
    start.record()
    while calls < 2 or time.perf_counter() - begin < seconds:
        call()
        calls += 1
        if calls % 4 == 0:
            end.record()
            end.synchronize()  # the queue stays short, so that the clock on the wall counts
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


@contextmanager
def _watched(into: list[tuple[float, float]]) -> Iterator[None]:
    """Appends (mean SM clock in MHz, mean watts) of the block; nothing where nvidia-smi is not to
    be had."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    command = [
        "nvidia-smi",
        f"--id=GPU-{uuid}",
        "--query-gpu=clocks.sm,power.draw",
        "--format=csv,noheader,nounits",
        "--loop-ms=100",
    ]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        process.terminate()
        lines = (process.communicate()[0] or "").splitlines()
    seen = []
    for line in lines:
        try:
            clock, power = (float(x) for x in line.split(","))
        except ValueError:
            continue  # a line cut short, or a field that this GPU does not report
        seen.append((clock, power))
    if seen:
        into.append((statistics.mean(c for c, _ in seen), statistics.mean(p for _, p in seen)))


@cache
def _empty_us() -> float:
    """A kernel that does nothing."""
    arm = _slope_arm(lambda: torch.cuda._sleep(0), [()])
    return statistics.median(arm[1]() for _ in range(ROUNDS)) * 1e6


@cache
def _read_us(size: int) -> float:
    """A plain read of `size` bytes."""
    words = max(size // 4, 1)
    count = min(max(ROTATED_BYTES // (4 * words) + 1, 2), 2 * CALLS)
    sets = [(torch.ones(words, device="cuda"),) for _ in range(count)]
    arm = _slope_arm(plain_read(), sets)
    return statistics.median(arm[1]() for _ in range(ROUNDS)) * 1e6


@cache
def plain_read() -> Contender:
    """The plain read of a float32 tensor that rows are held against."""
    try:
        from . import plain_read as triton_kernel
    except ImportError:
        return lambda x: x.sum()
    return triton_kernel.plain_read
