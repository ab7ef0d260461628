"""Cases and timings: contenders take turns within one run, over rotating inputs, and only ratios
travel.

A `Case` is one op at one shape. Each contender is a function of one input set; the sets together
are larger than the last-level cache, so that no contender reads what it has just written; a row of
the CPU whose sets are not is marked. On the CPU a round is a timed loop, and a contender that takes
long has fewer of them; `gpu_timing` holds what the GPU needs. A peer that fails at a row is
reported and left out of it.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

ROUNDS = 7
MIN_ROUNDS = 3
ROUND_SECONDS = 0.08
SLOW_SECONDS = 3.0  # CPU: a contender that has run so long in a row ends with MIN_ROUNDS
BATCH = 64
# For so long the last contender's threads may spin on the CPUs that the next one needs.
SETTLE_SECONDS = 0.03
ROTATED_BYTES = 256 << 20
DECODE_BYTES = 1 << 30  # CPU: of the KV caches of decode, where memory allows
MAX_SETS = {"cpu": 4096, "cuda": 200}
NOT_SLOWER = 0.98  # ratio of medians at which a peer does not beat us

Inputs = tuple[Any, ...]
Contender = Callable[..., Any]
Probed = TypeVar("Probed")


@dataclass
class Case:
    """One row of the table. `bytes` and `flops` are the least the op must move and do; `limit`
    names the memory rate that its share refers to: "read" for an op that writes next to nothing,
    else "copy". `rotated`: bytes that the input sets should have together."""

    op: str
    shape: str
    dtype: torch.dtype
    bytes: float
    flops: float
    make_inputs: Callable[[], Inputs]
    contenders: dict[str, Contender]  # "radix" and the peers
    limit: str = "copy"
    rotated: int = ROTATED_BYTES

    def facts(self) -> Case:
        """Without the functions, which hold weights and caches: what a row keeps."""
        return replace(self, make_inputs=tuple, contenders={})


@dataclass
class Timing:
    """Microseconds of a call, over the rounds of one contender."""

    median_us: float
    low_us: float
    high_us: float
    method: str = "loop"
    rounds: int = ROUNDS
    sm_mhz: float | None = None  # mean over the arm, for long rows
    watts: float | None = None

    @classmethod
    def of(cls, seconds: Sequence[float], method: str, **facts: float | None) -> Timing:
        microseconds = [s * 1e6 for s in seconds]
        return cls(
            median_us=statistics.median(microseconds),
            low_us=min(microseconds),
            high_us=max(microseconds),
            method=method,
            rounds=len(microseconds),
            **facts,
        )


@dataclass
class Row:
    """`floor`: microseconds of an empty kernel and of a plain read of as many bytes, for short GPU
    rows. `in_cache`: a CPU's last-level cache holds all the input sets, so that a share of the
    memory's rate says nothing."""

    case: Case
    timings: dict[str, Timing] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    in_cache: bool = False

    def ratio(self, peer: str) -> float:
        """Time of the peer over ours: above 1 we are faster. Of the medians over the interleaved
        rounds."""
        return self.timings[peer].median_us / self.timings["radix"].median_us


def measure(
    case: Case,
    device: torch.device,
    *,
    compute_bound: bool = False,
    arm_seconds: float = 1.0,
    slow_seconds: float = SLOW_SECONDS,
) -> Row:
    """compute_bound and arm_seconds matter on the GPU: see `gpu_timing.measure`; slow_seconds on
    the CPU."""
    sets = input_sets(case, device)
    if device.type == "cuda":
        from . import gpu_timing

        return gpu_timing.measure(case, sets, compute_bound, arm_seconds)
    arms = runnable(case, lambda fn: _Loop(fn, sets))
    for turn in range(ROUNDS):
        for arm in arms.values():
            if turn < MIN_ROUNDS or arm.spent < slow_seconds:
                time.sleep(SETTLE_SECONDS)
                arm.round()
    in_cache = len(sets) * case.bytes < last_level_cache()
    return Row(
        case.facts(),
        {name: Timing.of(arm.samples, "loop") for name, arm in arms.items()},
        in_cache=in_cache,
    )


def runnable(case: Case, probe: Callable[[Contender], Probed]) -> dict[str, Probed]:
    """What `probe` makes of every contender. A peer for which it raises is reported and left
    out."""
    probed = {}
    for name, fn in case.contenders.items():
        try:
            probed[name] = probe(fn)
        except Exception as error:  # whatever a peer raises
            if name == "radix":
                raise
            reason = str(error).partition("\n")[0]
            print(f"no peer {name} for {case.op} {case.shape}: {type(error).__name__}: {reason}")
    return probed


class _Loop:
    """A contender on the CPU: rounds of calls over the sets in turn, each going on where the last
    one ended."""

    def __init__(self, fn: Contender, sets: Sequence[Inputs]) -> None:
        self._fn = fn
        self._turns = itertools.cycle(sets)
        self.samples: list[float] = []  # seconds a call of each round
        self.spent = 0.0  # seconds, with the first calls
        first = self._timed(1)
        # A first call starts threads and faults pages in.
        a_call = first if first > ROUND_SECONDS else self._timed(1)
        self._batch = max(1, min(len(sets), BATCH, int(ROUND_SECONDS / 4 / max(a_call, 1e-9))))

    def round(self, seconds: float | None = None, least_calls: int = 1) -> None:
        least = ROUND_SECONDS if seconds is None else seconds
        calls = 0
        elapsed = 0.0
        while elapsed < least or calls < least_calls:
            elapsed += self._timed(self._batch)
            calls += self._batch
        self.samples.append(elapsed / calls)

    def _timed(self, calls: int) -> float:
        inputs = list(itertools.islice(self._turns, calls))
        start = time.perf_counter()
        for each in inputs:
            self._fn(*each)
        elapsed = time.perf_counter() - start
        self.spent += elapsed
        return elapsed


def loops_in_turns(
    contenders: Mapping[str, Contender],
    sets: Mapping[str, Sequence[Inputs]],
    *,
    rounds: int,
    seconds: float,
) -> dict[str, Timing]:
    """Contenders that have inputs of their own, on the CPU; rounds of at least `seconds` and of
    all inputs, in turns."""
    arms = {name: _Loop(fn, sets[name]) for name, fn in contenders.items()}
    for _ in range(rounds):
        for name, arm in arms.items():
            time.sleep(SETTLE_SECONDS)
            arm.round(seconds=seconds, least_calls=len(sets[name]))
    return {name: Timing.of(arm.samples, "loop") for name, arm in arms.items()}


def last_level_cache() -> int:
    """Bytes of the CPU's largest cache; where the system does not say, the least of a server."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        kibibytes, unit, _ = path.read_text().partition("K")
        if unit:
            sizes.append(int(kibibytes) << 10)
    return max(sizes, default=32 << 20)


def input_sets(case: Case, device: torch.device) -> list[Inputs]:
    """Sets of inputs of `case.rotated` bytes together, as far as MAX_SETS and the CPU's free memory
    allow."""
    size = case.rotated
    if device.type == "cpu" and size > ROTATED_BYTES:
        size = min(size, max(ROTATED_BYTES, _available_memory() // 4))
    count = int(size // max(case.bytes, 1)) + 1
    return [case.make_inputs() for _ in range(min(max(count, 2), MAX_SETS[device.type]))]


def _available_memory() -> int:
    """Bytes; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def randn(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """As torch.randn; on a CPU, where that takes a second for 100 million numbers, pieces of a pool
    of them."""
    if device.type != "cpu":
        return torch.randn(shape, device=device, dtype=dtype)
    pool = _pool(dtype)
    half = len(pool) // 2
    out = torch.empty(shape, dtype=dtype)
    for part in out.view(-1).split(half):
        start = random.randrange(half)
        part.copy_(pool[start : start + len(part)])
    return out


@cache
def _pool(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1 << 24, dtype=dtype)
