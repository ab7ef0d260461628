"""`python -m bench.serving greedy`: what a decode step of greedy rows saves by writing no logits.

The steps of a batch take their tokens from the fused kernel and from logits in turns, one by one,
so that the two meet the same state of the machine; differences are of neighbours. Random weights,
contexts from 128 on.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cpu import MODEL, PEERS

CONTEXT = 128


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serving greedy", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with a config.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weights", default="bf16", choices=list(PEERS))
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[32, 1], help="of a batch (at most 32)"
    )
    parser.add_argument("--steps", type=int, default=96, help="of each kind and batch")
    args = parser.parse_args(argv)

    from .radix import Model

    model = Model(folder=args.model, weights=args.weights, threads=args.threads)
    fused = model.runner.model.greedy_tokens

    def switch(is_fused: bool) -> None:
        model.runner.model.greedy_tokens = fused if is_fused else lambda hidden: None

    measure_turns(model, args, switch, _line)


def measure_turns(
    model: Any,
    args: argparse.Namespace,
    switch: Callable[[bool], None],
    line: Callable[[int, list[float], list[float]], str],
) -> None:
    """Prints a `line` for each number of rows, of the seconds of steps with `switch(False)` and
    with `switch(True)`, which take turns."""
    times = _take_turns(model.runner, switch)
    print(f"{args.model.name} {args.weights}, radix {model.version}, {args.threads} threads")
    for rows in args.rows:
        model.decode(rows, CONTEXT, 1)  # brings the prompts into the cache
        times.clear()
        while len(times[rows, True]) < args.steps:
            model.decode(rows, CONTEXT, 32)
        print(line(rows, times[rows, False], times[rows, True]), flush=True)


def _take_turns(runner: Any, switch: Callable[[bool], None]) -> dict[tuple[int, bool], list[float]]:
    """Seconds of decode steps from now on, by rows and by what `switch` was called with before
    each: True and False in turns."""
    run = runner.run
    times: dict[tuple[int, bool], list[float]] = defaultdict(list)
    is_fused = False

    def timed(plan: Any) -> Any:
        nonlocal is_fused
        is_fused = not is_fused
        switch(is_fused)
        start = time.perf_counter()
        result = run(plan)
        if plan.num_decode == len(plan.rows):
            times[len(plan.rows), is_fused].append(time.perf_counter() - start)
        return result

    runner.run = timed
    return times


def _line(rows: int, logits: list[float], fused: list[float]) -> str:
    """Pairs of neighbours; the last may have none."""
    saved = statistics.median(a - b for a, b in zip(logits, fused, strict=False))
    usual = statistics.median(logits)
    return (
        f"  {rows:2d} rows: with logits {usual * 1e3:.2f} ms, "
        f"fused {statistics.median(fused) * 1e3:.2f} ms, "
        f"saved {saved * 1e6:.0f} us ({saved / usual:.1%}), {len(fused)} pairs"
    )
