"""`python -m bench.gpu_runtime.occupancy MODEL...`: does every setting hold under a full load?

For each model, context, number of rows and chunk, an engine with random weights in a process of its
own is kept full for --seconds: as many requests as it has rows run, more wait, prompts are up to as
long as the context, and some requests ask for penalties, log-probabilities or many choices, which
take memory too. Of each it tells whether it ran out of memory, how full rows and KV pool were, and
which share of what the rest has left the pool has. Exit status 1 if a cell fails, or has less than
--share.

    python -m bench.gpu_runtime.occupancy qwen3-0.6b llama3-8b --seconds 20 --json cells.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from radix_runtime.cli.figures import machine
from radix_runtime.cli.output_file import output_file
from radix_runtime.engine.facts import engine_facts
from radix_runtime.offline import Engine

from .gpu_watch import gpu_name
from .models import model_folder
from .process import ERROR_BYTES, ROOT

LONG_CONTEXT = 32768
_START_SECONDS = 180.0  # of a process, beside the load
_OPEN_CALLS = 4
_LOOK_SECONDS = 0.25
_GIB = 1 << 30

Figures = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A setting. `folder` holds a config.json; `settings` go over the engine's others."""

    folder: str
    context: int
    rows: int
    chunk: int
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """For people."""
        return f"{Path(self.folder).name} {self.context} {self.rows} {self.chunk}"


def requests(
    rng: random.Random, heads: random.Random, count: int, context: int, vocabulary: int
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts of up to seven eighths of the context and their parameters. The first tokens are from
    `heads`, all else from `rng`: equal work is not found in the cache."""
    body = rng.choices(range(3, min(vocabulary, 250)), k=context)
    prompts = []
    params = []
    for _ in range(count):
        length = rng.randint(1, max(1, context * 7 // 8))
        start = rng.randrange(context - length + 1)
        prompts.append(
            [*heads.choices(range(3, vocabulary), k=8), *body[start : start + length]][:length]
        )
        given: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.8]),
            "top_p": rng.choice([1.0, 0.9]),
            "max_new_tokens": rng.randint(1, max(1, min(512, context - length))),
            "ignore_eos": True,
        }
        if rng.random() < 0.2:
            given["repetition_penalty"] = 1.1
        params.append(given)
    return prompts, params


class FullLoad:
    """Keeps an engine full, from one thread: some calls are open, each of as many requests as half
    of the rows, and one that has ended is replaced. After `lap` calls the same lengths and
    parameters come again, in prompts that begin with other tokens."""

    def __init__(
        self, engine: Engine, *, context: int, rows: int, seed: int = 0, lap: int | None = None
    ) -> None:
        self._engine = engine
        self._seed = seed
        self._rng = random.Random(seed)
        self._heads = random.Random(f"heads {seed}")
        self._context = context
        self._count = max(1, rows // 2)
        self._lap = lap
        self._begun = 0  # calls
        self.laps: list[float] = []  # when each began, on time.monotonic's clock
        self.finished = 0  # calls
        self._calls = [self._call() for _ in range(_OPEN_CALLS)]

    def _call(self) -> Iterator[Any]:
        if self._lap is not None and self._begun % self._lap == 0:
            self._rng = random.Random(self._seed)
            self.laps.append(time.monotonic())
        self._begun += 1
        vocabulary = self._engine.config.vocab_size
        prompts, params = requests(self._rng, self._heads, self._count, self._context, vocabulary)
        scored = self._rng.random() < 0.25
        return self._engine.stream(
            input_ids=prompts,
            sampling_params=params,
            return_logprob=scored,
            top_logprobs_num=5 if scored else 0,
        )

    def run(self, seconds: float) -> Iterator[None]:
        """Works for so long; yields after each answer that has grown."""
        end = time.monotonic() + seconds
        turn = itertools.cycle(range(len(self._calls)))
        while time.monotonic() < end:
            index = next(turn)
            if next(self._calls[index], None) is None:
                self.finished += 1
                self._calls[index] = self._call()
            yield

    def close(self) -> None:
        """Aborts what is open, and waits until nothing runs."""
        for call in self._calls:
            call.close()  # type: ignore[attr-defined]
        self._engine.generate(input_ids=[[3]], sampling_params={"max_new_tokens": 1})


def measure(cell: Cell, seconds: float) -> Figures:
    """The figures of a cell, in this process."""
    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_running_requests": cell.rows,
        "chunked_prefill_size": cell.chunk,
        "context_length": cell.context,
    }
    begin = time.monotonic()
    with Engine(cell.folder, **{**options, **cell.settings}) as engine:
        start_s = time.monotonic() - begin
        runner: Any = engine.executor.runner
        pool = int(engine_facts(runner)["kv_cache_bytes"] or 0)
        load = FullLoad(engine, context=cell.context, rows=cell.rows)
        seen: list[dict[str, float]] = []
        next_look = 0.0
        for _ in load.run(seconds):
            if time.monotonic() >= next_look:
                seen.append(_stats(engine))
                next_look = time.monotonic() + _LOOK_SECONDS
        load.close()
        free = runner.device.memory().available
        return {
            "start_s": start_s,
            "kv_pool_gib": pool / _GIB,
            "free_gib": free / _GIB,
            "pool_share": pool / (pool + free),
            **_figures(seen, _stats(engine)),
        }


def _stats(engine: Engine) -> dict[str, float]:
    """The scheduler's figures now."""
    (stats,) = engine.get_server_info()["internal_states"]
    return stats


def _figures(seen: list[dict[str, float]], after: dict[str, float]) -> Figures:
    """Of the looks at a load, and at its end."""
    running = [stats["num_running_reqs"] for stats in seen]
    return {
        "kv_tokens": after["max_total_num_tokens"],
        "rows_max": max(running),
        "rows_mean": sum(running) / len(running),
        "pool_used_max": max(stats["token_usage"] for stats in seen),
        "retractions": after["num_retractions_total"],
        "failed": after["num_failed_requests_total"],
        "generated": after["generation_tokens_total"],
        "prefilled": after["prefill_tokens_total"],
    }


def measure_apart(cell: Cell, seconds: float) -> Figures:
    """The same in a process of its own; `error` where it ends early."""
    order = json.dumps({"cell": asdict(cell), "seconds": seconds})
    command = [sys.executable, "-m", __spec__.name, "--cell", order]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_START_SECONDS + 3 * seconds,
        )
    except subprocess.TimeoutExpired:
        return {"error": "took too long"}
    if done.returncode != 0:
        return {"error": done.stderr.strip()[-ERROR_BYTES:] or f"ended with {done.returncode}"}
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def table(rows: list[Figures]) -> str:
    """The cells as Markdown."""
    lines = [
        "| model | context | rows | chunk | KV tokens | pool, GiB | free, GiB | pool's share "
        "| rows, most | pool used, most | retractions | |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        cell, got = row["cell"], row["figures"]
        name = Path(cell["folder"]).name
        head = f"| {name} | {cell['context']} | {cell['rows']} | {cell['chunk']} |"
        if "error" in got:
            error = got["error"].splitlines()[-1] if got["error"] else ""
            lines.append(f"{head} | | | | | | | {error} |")
            continue
        lines.append(
            f"{head} {got['kv_tokens']} | {got['kv_pool_gib']:.1f} | {got['free_gib']:.2f} "
            f"| {got['pool_share']:.1%} | {got['rows_max']:.0f} | {got['pool_used_max']:.0%} "
            f"| {got['retractions']} | |"
        )
    return "\n".join(lines) + "\n"


def is_good(figures: Figures, share: float) -> bool:
    """Whether the cell served all that it was asked, with a pool that large."""
    return (
        "error" not in figures
        and figures["failed"] == 0
        and figures["generated"] > 0
        and figures["pool_share"] >= share
    )


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Every combination, contexts of a model's own where it has no longer ones."""
    for folder in args.models:
        config = json.loads((folder / "config.json").read_text())
        longest = config["max_position_embeddings"]
        contexts = dict.fromkeys(min(context, longest) for context in args.contexts)
        for context, rows, chunk in itertools.product(contexts, args.rows, args.chunks):
            yield Cell(
                folder=str(folder),
                context=context,
                rows=rows,
                chunk=chunk,
                settings=args.settings,
            )


def main() -> None:
    args = _parser().parse_args()
    if args.cell is not None:
        order = json.loads(args.cell)
        print(json.dumps(measure(Cell(**order["cell"]), order["seconds"])))
        return
    report: dict[str, Any] = {**machine(), "gpu": gpu_name(), "seconds": args.seconds, "cells": []}
    for cell in cells(args):
        figures = measure_apart(cell, args.seconds)
        report["cells"].append({"cell": asdict(cell), "figures": figures})
        said = figures.get("error") or ", ".join(f"{k} {v:.4g}" for k, v in figures.items())
        print(f"{cell.name}: {said}", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print("\n" + table(report["cells"]), end="")
    bad = [row for row in report["cells"] if not is_good(row["figures"], args.share)]
    print(f"{len(report['cells']) - len(bad)} of {len(report['cells'])} cells are good")
    sys.exit(bool(bad))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_runtime.occupancy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", type=model_folder, nargs="*", metavar="MODEL")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, LONG_CONTEXT])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--seconds", type=float, default=20.0, help="of load in each cell")
    parser.add_argument("--share", type=float, default=0.95, help="least of the KV pool")
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON", help="further ones of the engine"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures there")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
