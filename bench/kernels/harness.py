"""Cases and timings: contenders take turns within one run, over rotating inputs, and only ratios travel.

A `Case` is one op at one shape. Each contender is a function of one input set; the sets together are larger than the
last-level cache, so that no contender reads what it has just written; a row of the CPU whose sets are not is marked. On
the CPU a round is a timed loop; `gpu_timing` holds what the GPU needs.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROUNDS = 7
ROUND_SECONDS = 0.08
BATCH = 64
SETTLE_SECONDS = 0.03  # for which the last contender's threads may spin on, on the CPUs that the next one needs
ROTATED_BYTES = 256 << 20
MAX_SETS = {"cpu": 4096, "cuda": 200}
NOT_SLOWER = 0.98  # ratio of medians at which a peer does not beat us

Inputs = tuple[Any, ...]
Contender = Callable[..., Any]


@dataclass
class Case:
    """One row of the table. `bytes` and `flops` are the least the op must move and do; `limit` names the memory rate
    that its share refers to: "read" for an op that writes next to nothing, else "copy"."""

    op: str
    shape: str
    dtype: torch.dtype
    bytes: float
    flops: float
    make_inputs: Callable[[], Inputs]
    contenders: dict[str, Contender]  # "radix" and the peers
    limit: str = "copy"


@dataclass
class Timing:
    median_us: float
    low_us: float
    high_us: float
    method: str = "loop"
    sm_mhz: float | None = None  # mean over the arm, for long rows
    watts: float | None = None

    @classmethod
    def of(cls, seconds: Sequence[float], method: str, **facts: float | None) -> Timing:
        scaled = [s * 1e6 for s in seconds]
        return cls(statistics.median(scaled), min(scaled), max(scaled), method, **facts)


@dataclass
class Row:
    """`floor`: microseconds of an empty kernel and of a plain read of as many bytes, for short GPU rows. `in_cache`: a
    CPU's last-level cache holds all the input sets, so that a share of the memory's rate says nothing."""

    case: Case
    timings: dict[str, Timing] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    in_cache: bool = False

    def ratio(self, peer: str) -> float:
        """Time of the peer over ours: above 1 we are faster. Of the medians over the interleaved rounds."""
        return self.timings[peer].median_us / self.timings["radix"].median_us


def measure(case: Case, device: torch.device, *, compute_bound: bool = False, arm_seconds: float = 1.0) -> Row:
    """compute_bound and arm_seconds matter on the GPU: see `gpu_timing.measure`."""
    sets = input_sets(case, device)
    if device.type == "cuda":
        from . import gpu_timing

        return gpu_timing.measure(case, sets, compute_bound, arm_seconds)
    for fn in case.contenders.values():
        for inputs in sets[:2]:
            fn(*inputs)
    samples: dict[str, list[float]] = {name: [] for name in case.contenders}
    turns = {name: itertools.cycle(sets) for name in case.contenders}  # a round goes on where the last one ended
    for _ in range(ROUNDS):
        for name, fn in case.contenders.items():
            time.sleep(SETTLE_SECONDS)
            samples[name].append(_loop(fn, turns[name], min(len(sets), BATCH)))
    in_cache = len(sets) * case.bytes < last_level_cache()
    return Row(case, {name: Timing.of(s, "loop") for name, s in samples.items()}, in_cache=in_cache)


def last_level_cache() -> int:
    """Bytes of the CPU's largest cache; where the system does not say, what a server has at least."""
    said = (path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return max((int(size[:-1]) << 10 for size in said if size.endswith("K")), default=32 << 20)


def input_sets(case: Case, device: torch.device) -> list[Inputs]:
    """Sets of inputs of ROTATED_BYTES together, as far as MAX_SETS allows."""
    count = int(ROTATED_BYTES // max(case.bytes, 1)) + 1
    return [case.make_inputs() for _ in range(min(max(count, 2), MAX_SETS[device.type]))]


def _loop(fn: Contender, turns: Iterator[Inputs], batch: int) -> float:
    """Seconds a call over one round; the clock is read every `batch` calls."""
    calls, start = 0, time.perf_counter()
    while True:
        for inputs in itertools.islice(turns, batch):
            fn(*inputs)
        calls += batch
        elapsed = time.perf_counter() - start
        if elapsed > ROUND_SECONDS:
            return elapsed / calls
