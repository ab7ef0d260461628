"""`python -m bench.scheduler`: the scheduler's own CPU time, on an engine that answers at once.

    python -m bench.scheduler                         # the tables of docs/benchmarks.md
    python -m bench.scheduler --against ../before     # beside another checkout, in turns
    python -m bench.scheduler --json out.json

Four tables, each of CPU time of the scheduling thread:

    decode   a step in which ROWS streams get one token each, by phase; with the size of its plan
    churn    the same at 256 rows where answers have 1 to 64 tokens and each that ends is followed
             by a new request
    cancel   ending one waiting request, by the length of the queue
    stream   a token of `Engine.stream`: scheduler, detokenizer and the caller's loop together

A child process measures one case of one checkout; rounds alternate between the checkouts. A cell is
the median of the rounds, each the quickest of some blocks of steps; with --against it is followed
by the ratio of the other checkout's time to ours: above 1 we are faster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from radix_runtime.cli.output_file import output_file

ROOT = Path(__file__).resolve().parents[1]
ROWS = (1, 64, 256, 1024, 4096)
QUEUES = (0, 1_000, 50_000)
PAGE_SIZE = 16
VOCAB_SIZE = 32_000
BLOCKS = 8  # of a case, of which the quickest counts
PHASES = ("plan_step", "build", "launch", "results", "output")

Figures = dict[str, float]  # microseconds by name, unless the name says otherwise


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("decode", "churn", "cancel", "stream"), default="")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--json", type=output_file, help="where the figures go too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        table, number = args.child.split()
        print(json.dumps(CASES[table](int(number))))
        return
    cases = [case for case in _cases(args.rows) if args.only in ("", case.split()[0])]
    checkouts = [ROOT] if args.against is None else [ROOT, args.against.resolve()]
    figures = {case: _measure(case, checkouts, args.rounds) for case in cases}
    print("\n".join(_tables(figures)))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def _cases(rows: list[int]) -> Iterator[str]:
    for number in rows:
        yield f"decode {number}"
    yield "churn 256"
    for number in QUEUES:
        yield f"cancel {number}"
    yield "stream 256"


# Parent ---------------------------------------------------------------------------------------


def _measure(case: str, checkouts: list[Path], rounds: int) -> list[Figures]:
    """The median figures of `case` for each checkout."""
    runs: list[list[Figures]] = [[] for _ in checkouts]
    for _ in range(rounds):
        for checkout, found in zip(checkouts, runs, strict=True):
            found.append(_child(case, checkout))
    medians = []
    for found in runs:
        names = found[0].keys()
        medians.append({name: statistics.median(run[name] for run in found) for name in names})
    print(f"{case}: done", file=sys.stderr)
    return medians


def _child(case: str, checkout: Path) -> Figures:
    paths = [checkout / "runtime", checkout / "kernel" / "python", ROOT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "bench.scheduler", "--child", case]
    with tempfile.TemporaryDirectory() as folder:  # `-m` looks in the current folder first
        answer = subprocess.run(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, check=True
        )
    figures: Figures = json.loads(answer.stdout)
    return figures


def _tables(figures: dict[str, list[Figures]]) -> Iterator[str]:
    """The tables in Markdown."""
    table = ""
    for case, sides in figures.items():
        kind, number = case.split()
        names = list(sides[0])
        if kind != table:
            table = kind
            yield f"\n| {kind} | " + " | ".join(names) + " |"
            yield "| --: |" + " --: |" * len(names)
        yield f"| {int(number):,} | " + " | ".join(_cell(name, sides) for name in names) + " |"


def _cell(name: str, sides: list[Figures]) -> str:
    shown = f"{sides[0][name]:,.1f}"
    for other in sides[1:]:
        if name in other and sides[0][name] > 0:
            shown += f" ({other[name] / sides[0][name]:.2f})"
    return shown


# Child: everything below runs on the checkout that is measured ----------------------------------


class Done:
    """A result that is there."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def result(self) -> Any:
        """Future.result."""
        return self._result


class NullEngine:
    """An executor whose every step is done when it is launched. The tokens are random."""

    page_size = PAGE_SIZE
    max_context = 32_768
    max_samples = 1
    host_pages = 0

    def __init__(self, rows: int, vocab_size: int = VOCAB_SIZE) -> None:
        from radix_runtime.cache_spec import ONLY_FULL_PAGES

        self.cache_groups = ONLY_FULL_PAGES
        self.max_rows = 2 * rows
        self.num_pages = 400 * rows + 1000
        self.vocab_size = vocab_size
        self.plan: Any = None  # the last one
        self._tokens = np.random.default_rng(1).integers(100, vocab_size, 1 << 16, np.int32)

    def launch(self, plan: Any, masks: Any = None) -> Done:
        """Executor.launch."""
        from radix_runtime.step_plan import StepResult

        self.plan = plan
        count = np.count_nonzero(plan.num_samples)  # 0 or 1 each
        at = plan.step_id % 50_000
        ids = self._tokens[at : at + count]
        counts = np.ones(count, np.int32)
        return Done(StepResult(step_id=plan.step_id, ids=ids, counts=counts))

    def close(self) -> None:
        """Executor.close."""


class Outbox:
    """What `serve` does to a message on this thread: it is encoded."""

    def send(self, message: Any, instance: int = 0) -> None:
        """channel.Outbox.send."""
        from radix_runtime import messages

        messages.encode(message)


def _scheduler(rows: int, queue: int = 0) -> tuple[Any, Any]:
    """A scheduler and its inbox."""
    from radix_runtime.channel import LocalChannel
    from radix_runtime.config import ServerArgs
    from radix_runtime.scheduler.scheduler import Scheduler

    args = ServerArgs(
        page_size=PAGE_SIZE,
        chunked_prefill_size=1 << 20,
        check_invariants="off",
        max_running_requests=rows,
        max_queued_requests=max(queue, rows) + 100,
    )
    inbox = LocalChannel()
    engine: Any = NullEngine(rows)
    scheduler = Scheduler(args, executor=engine, inbox=inbox, outbox=Outbox(), eos_ids=[2, 7])
    return scheduler, inbox


def _prompt(number: int, vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    """About a hundred tokens that no other prompt begins with."""
    return (np.arange(100 + number % PAGE_SIZE) * 31 + number * 7) % (vocab_size - 100) + 100


def _request(number: int, max_new_tokens: int) -> Any:
    from radix_runtime.messages import Generate, pack_ids
    from radix_runtime.sampling_params import SamplingParams

    ids = _prompt(number)
    return Generate(
        rid=f"request-{number:024}",
        input_ids=pack_ids(ids),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0),
        stream=True,
    )


def _quickest(step: Callable[[], object], steps: int) -> float:
    """Microseconds of this thread a call, of the quickest block."""
    blocks = []
    for _ in range(BLOCKS):
        began = time.thread_time()
        for _ in range(steps):
            step()
        blocks.append((time.thread_time() - began) / steps)
    return 1e6 * min(blocks)


def decode(rows: int) -> Figures:
    """Steps of `rows` streams that all go on."""
    from radix_runtime.step_plan import serialize_plan

    scheduler, inbox = _scheduler(rows)
    for number in range(rows):
        inbox.send(_request(number, 6000))
    for _ in range(12):  # all prompts, and then some tokens
        scheduler.step()
    assert len(scheduler.life.running) == rows
    steps = 64 * max(1, min(4, 600 // rows))  # all of what happens every so many tokens
    total = _quickest(scheduler.step, steps)
    plan = scheduler.executor.plan
    assert plan.num_decode == rows
    return {
        "step": total,
        **_phases(scheduler, steps),
        "a row": total / rows,
        "serialize": _quickest(lambda: serialize_plan(plan), steps),
        "plan bytes": len(serialize_plan(plan)),
    }


def churn(rows: int) -> Figures:
    """Steps in which some streams end and others begin."""
    scheduler, inbox = _scheduler(rows)
    lengths = random.Random(1)
    made = 0

    def step() -> None:
        nonlocal made
        for _ in range(rows - len(scheduler.live)):
            inbox.send(_request(made, lengths.randint(1, 64)))
            made += 1
        scheduler.step()

    for _ in range(200):
        step()
    return {"step": _quickest(step, 100), **_phases(scheduler, 400, step)}


def _phases(scheduler: Any, steps: int, step: Callable[[], object] | None = None) -> Figures:
    """Microseconds a step in each phase. The scheduler is of no use afterwards."""
    from radix_runtime.scheduler import scheduler as module

    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                spent[name] += time.thread_time() - began

        return run

    for name, owner, function in (
        ("plan_step", module, "plan_step"),
        ("build", module, "build_step"),
        ("launch", scheduler.executor, "launch"),
        ("results", scheduler.results, "complete"),
        ("output", scheduler.output, "flush"),
    ):
        setattr(owner, function, timed(name, getattr(owner, function)))
    for _ in range(steps):
        (step or scheduler.step)()
    return {name: 1e6 * spent[name] / steps for name in PHASES}


def cancel(queue: int) -> Figures:
    """One abort in an iteration, while `queue` requests wait behind one that runs."""
    from radix_runtime.messages import Abort

    scheduler, inbox = _scheduler(1, queue + 2000)
    numbers = iter(range(1, 1 << 30))
    inbox.send(_request(0, 30_000))
    for _ in range(queue):
        inbox.send(_request(next(numbers), 8))
    scheduler.step()
    added = [_request(next(numbers), 8) for _ in range(1500)]
    for request in added:
        inbox.send(request)
    scheduler.step()
    alone = _quickest(scheduler.step, 20)
    victims = iter(random.Random(1).sample(added, 1000))

    def step() -> None:
        inbox.send(Abort(next(victims).rid))
        scheduler.step()

    return {"abort": _quickest(step, 100) - alone}


def stream(rows: int) -> Figures:
    """`Engine.stream` of `rows` prompts; every piece is taken."""
    from radix_runtime import offline_loop
    from radix_runtime.offline import Engine

    def null_engine(args: Any, config: Any) -> NullEngine:
        return NullEngine(rows, config.vocab_size)

    setattr(offline_loop, "create_executor", null_engine)  # noqa: B010  (it is imported there)
    engine = Engine(max_running_requests=rows, chunked_prefill_size=1 << 20, check_invariants="off")
    costs = []
    for turn in range(3):
        numbers = range(turn * rows, (turn + 1) * rows)
        prompts = [_prompt(number, engine.config.vocab_size).tolist() for number in numbers]
        params = {"max_new_tokens": 512, "temperature": 0.0, "ignore_eos": True}
        began = time.thread_time()
        tokens = sum(1 for _ in engine.stream(input_ids=prompts, sampling_params=params))
        costs.append((time.thread_time() - began) / tokens)
        assert tokens == 512 * rows
    return {"a token": 1e6 * min(costs)}


CASES = {"decode": decode, "churn": churn, "cancel": cancel, "stream": stream}


if __name__ == "__main__":
    main()
