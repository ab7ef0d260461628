"""Random requests on a GPU, and what is left of them: nothing may leak, nothing may slow down.

    python -m tests.gpu.random_load MODEL [--requests 10000] [--runs 3 --seconds 540]
    python -m tests.gpu.random_load MODEL --requests 0 --runs 1 --engines 3 --max-total-tokens 65536

MODEL is a folder with a config.json; weights are random. First --requests requests of mixed sizes
in calls of 1 to 16, some of which are given up at any time, and some rows retracted, in a KV pool
that is too small for them; the scheduler's invariants are checked after every step. At the end
everything accepted must have ended, and no page may be in use. Then --runs runs of a full load of
--seconds each, after a shorter one that warms up: the memory of the GPU after each (a single one:
and before it) must be the same to 1 MiB, and the period of steps (p99) in a run's last minute at
most 5 % above its first's. With --engines several engines share the GPU in these runs, each in a
process of its own; their periods, which depend on the others, are not compared. A run repeats the
same work in laps, without hits in the cache, and a minute is one of whole laps: about a step in a
hundred runs a large chunk of prompts, so p99 of unlike work would compare how many do. A run that
is too short for two minutes of whole laps is wrong: a third of --seconds counts as a minute where
that is less. Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import Queue
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from bench.gpu_runtime.occupancy import FullLoad
from radix_runtime import Engine, SamplingParams
from radix_runtime.scheduler.step_log import StepLog
from radix_runtime.step_times import StepTimes

_MOST_OPEN = 24  # calls
_MIB = 1 << 20
_WARM_UP = 1 / 6  # of a run's seconds
_LAP = 16  # calls: on an H200 a quarter of a minute of the smallest model
_SLOWER = 1.05
_START_SECONDS = 180.0  # of the slowest of several engines


class RandomCalls:
    """Calls of an engine, advanced and given up in any order, on one thread."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._scheduler: Any = engine._scheduler  # to retract and to check
        self._rng = random.Random(seed)
        self._context = engine.executor.max_context
        self._shared = self._ids(self._context // 2)
        self._open: list[tuple[Iterator[Any], list[int]]] = []
        self.made = 0
        self.aborted = 0
        self.wrong = 0  # answers of another length than they should have

    def _ids(self, count: int) -> list[int]:
        return self._rng.choices(range(3, self._engine.config.vocab_size), k=count)

    def _begin(self, most: int) -> None:
        rng = self._rng
        prompts = []
        params = []
        longest = self._context // 8
        for _ in range(min(rng.choice([1, 1, 1, 2, 5, 16]), most)):
            head = self._shared[: rng.choice([0, 0, 64, len(self._shared)])]
            own = rng.choice([1, 5, 40, self._context // 8, self._context // 4])
            prompts.append(head + self._ids(own))
            params.append(
                SamplingParams(
                    temperature=rng.choice([0, 0.8]),
                    top_p=rng.choice([1.0, 0.9]),
                    repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
                    max_new_tokens=rng.choice([1, 2, rng.randint(1, 40), rng.randint(1, longest)]),
                    ignore_eos=True,
                )
            )
        call = self._engine.stream(
            input_ids=prompts, sampling_params=params, return_logprob=rng.random() < 0.1
        )
        self.made += len(prompts)
        self._open.append((call, [p.max_new_tokens for p in params]))
        self._advance(len(self._open) - 1, 1)  # a call that nobody asks is not sent

    def _advance(self, index: int, times: int) -> None:
        call, lengths = self._open[index]
        for _ in range(times):
            output = next(call, None)
            if output is None:
                self._open.pop(index)
                return
            meta = output["meta_info"]
            has_ended = meta["finish_reason"] is not None
            if has_ended and meta["completion_tokens"] != lengths[output.get("index", 0)]:
                self.wrong += 1

    def drive(self, requests: int) -> None:
        """Makes so many requests and brings or gives them all to their end."""
        rng = self._rng
        while self._open or self.made < requests:
            if self.made < requests and len(self._open) < _MOST_OPEN:
                self._begin(requests - self.made)
            if not self._open:
                continue
            index = rng.randrange(len(self._open))
            if rng.random() < 0.05:
                call, lengths = self._open.pop(index)
                call.close()  # type: ignore[attr-defined]
                self.aborted += len(lengths)
            else:
                self._advance(index, rng.randint(1, 30))
            if self._scheduler.life.running and rng.random() < 0.05:
                self._scheduler.retract_youngest()

    def left_over(self) -> list[str]:
        """What is wrong once all is done. Raises InvariantViolation."""
        if not self._engine.flush_cache():
            return ["requests are still running"]
        self._scheduler.check()
        stats = self._scheduler.stats()
        ended = sum(stats[f"num_{how}_requests_total"] for how in ("finished", "aborted", "failed"))
        print({name: stats[name] for name in sorted(stats) if name.endswith("_total")}, flush=True)
        found = []
        if ended != stats["num_requests_total"] or stats["num_requests_total"] != self.made:
            found.append(f"{self.made} made, {stats['num_requests_total']} in, {ended} ended")
        if stats["num_failed_requests_total"]:
            found.append(f"{stats['num_failed_requests_total']} failed")
        if stats["num_used_tokens"]:
            found.append(f"{stats['num_used_tokens']} tokens of the KV pool are in use")
        if self.aborted and not stats["num_aborted_requests_total"]:
            found.append("nothing that was given up was aborted")
        if not stats["num_retractions_total"]:
            found.append("nothing was retracted")
        if self.wrong:
            found.append(f"{self.wrong} answers have another length")
        return found


def run_random(args: argparse.Namespace) -> list[str]:
    """What is wrong after random requests."""
    context = args.context
    with Engine(
        args.model,
        device=args.device,
        load_format="dummy",
        context_length=context,
        max_running_requests=args.rows,
        chunked_prefill_size=512,
        max_total_tokens=args.rows * context // 8,
        check_invariants="step",
    ) as engine:
        calls = RandomCalls(engine, seed=args.seed)
        begin = time.monotonic()
        calls.drive(args.requests)
        found = calls.left_over()
        seconds = time.monotonic() - begin
    print(f"{calls.made} requests, {calls.aborted} given up, {seconds:.0f} s", flush=True)
    return found


class StepRecord(StepLog):
    """Keeps the times of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[StepTimes] = []

    def add(self, times: StepTimes) -> None:
        self.steps.append(times)


def p99_ms(seconds: Iterable[float]) -> float:
    """0 of none."""
    ordered = sorted(seconds)
    return 1e3 * ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0


@dataclass(frozen=True)
class Minute:
    """p99 of its steps in milliseconds: of the periods between their launches, and of what the
    device took for each, which tells whether the host made the difference."""

    period: float
    device: float

    @classmethod
    def of(cls, steps: list[StepTimes], span: tuple[float, float]) -> Minute:
        """The steps that were launched in a span of time."""
        begin, end = span
        inside = [step for step in steps if begin <= step.launched < end]
        return cls(
            period=p99_ms(b.launched - a.launched for a, b in pairwise(inside)),
            device=p99_ms(step.device_end - step.device_start for step in inside),
        )


def minutes(laps: list[float], seconds: float) -> list[tuple[float, float]]:
    """Spans of equally many whole laps, as many as first take so many seconds. `laps`: when each
    began; the first, which fills the engine, is left out, and so is the last, which did not end."""
    begins = laps[1:]
    for count, begin in enumerate(begins):
        if begin - begins[0] >= seconds:
            return list(pairwise(begins[::count]))
    return []


def gpu_bytes(engine: Engine) -> int:
    """Of the GPU that are in use by anybody; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    memory = engine.executor.runner.device.memory()
    return int(memory.total - memory.available)


@dataclass(frozen=True)
class Run:
    """What an engine saw of a run of a full load."""

    number: int  # -1: the one that warms up
    steps: int
    minutes: list[Minute]  # none where it was too short
    gpu_bytes: int  # in use by anybody, once no engine has work

    def line(self) -> str:
        """For people."""
        periods = " ".join(f"{minute.period:.2f}" for minute in self.minutes)
        device = " ".join(f"{minute.device:.2f}" for minute in self.minutes)
        return (
            f"run {self.number}: {self.steps} steps, {self.gpu_bytes / _MIB:.1f} MiB, "
            f"p99 of each minute in ms: {periods or 'too short'} (of the device: {device})"
        )

    def wrong(self) -> str | None:
        """What is wrong with its periods."""
        if len(self.minutes) < 2:
            return f"run {self.number} is too short to compare its first minute with its last"
        first = self.minutes[0].period
        last = self.minutes[-1].period
        if last > _SLOWER * first:
            return f"run {self.number}: p99 {first:.2f}, then {last:.2f} ms"
        return None


def load_runs(args: argparse.Namespace, idle: Callable[[], object]) -> list[Run]:
    """The runs of one engine. `idle` returns when all engines have come as far."""
    runs = []
    warm_up = _WARM_UP * args.seconds if args.warm_up is None else args.warm_up
    with Engine(
        args.model,
        device=args.device,
        load_format="dummy",
        context_length=args.context,
        max_running_requests=args.rows,
        max_total_tokens=args.max_total_tokens,
    ) as engine:
        record = StepRecord()
        scheduler: Any = engine._scheduler
        scheduler.step_log = record
        for number in range(-1, args.runs):
            seconds = args.seconds if number >= 0 else warm_up
            record.steps.clear()
            idle()
            load = FullLoad(
                engine,
                context=args.context,
                rows=args.rows,
                seed=args.seed + number,
                lap=_LAP,
            )
            for _ in load.run(seconds):
                pass
            load.close()
            engine.flush_cache()
            idle()
            held = gpu_bytes(engine)
            idle()
            spans = minutes(load.laps, min(60.0, seconds / 3))
            run = Run(
                number=number,
                steps=len(record.steps),
                minutes=[Minute.of(record.steps, span) for span in spans],
                gpu_bytes=held,
            )
            print(run.line(), flush=True)
            runs.append(run)
    return runs


def load_process(
    args: argparse.Namespace, barrier: threading.Barrier, results: Queue[list[Run]]
) -> None:
    """An engine among several: its runs go to `results`."""
    results.put(load_runs(args, barrier.wait))


def runs_side_by_side(args: argparse.Namespace) -> list[list[Run]]:
    """The runs of --engines engines at the same times, a process each; fewer where some died."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(args.engines, timeout=_START_SECONDS + 2 * args.seconds)
    results = context.Queue()
    processes = []
    for index in range(args.engines):
        own = argparse.Namespace(**{**vars(args), "seed": args.seed + 100 * index})
        process = context.Process(target=load_process, args=(own, barrier, results))
        process.start()
        processes.append(process)
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)
            process.join()  # the sentinel may be ready before there is an exit code
            if process.exitcode != 0:
                barrier.abort()  # the others wait for it
    ended = [process for process in processes if process.exitcode == 0]
    return [results.get() for _ in ended]


def run_load(args: argparse.Namespace) -> list[str]:
    """What is wrong in runs of a full load."""
    if args.engines == 1:
        engines = [load_runs(args, lambda: None)]
    else:
        engines = runs_side_by_side(args)
    found = []
    if len(engines) < args.engines:
        found.append(f"{args.engines - len(engines)} engines died")
    for runs in engines:
        held = [run.gpu_bytes for run in runs if run.number >= 0 or args.runs == 1]
        if max(held) - min(held) > _MIB:
            found.append(f"memory differs by {(max(held) - min(held)) / _MIB:.1f} MiB between runs")
        if args.engines == 1:
            faults = [run.wrong() for run in runs if run.number >= 0]
            found += [fault for fault in faults if fault]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=540.0, help="of a run")
    parser.add_argument(
        "--warm-up",
        type=float,
        metavar="SECONDS",
        help="before the first run, for torch's allocator to take what it needs; default: a sixth",
    )
    parser.add_argument("--engines", type=int, default=1, help="that share the GPU in the runs")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--max-total-tokens", type=int, help="of the load's KV pool")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = run_random(args) if args.requests else []
    if args.runs:
        found += run_load(args)
    for text in found:
        print(f"WRONG: {text}")
    print("nothing is left over" if not found else f"{len(found)} things are wrong")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
