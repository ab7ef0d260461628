"""`python -m bench.api_process`: what a streamed token costs the API process of a server.

    python -m bench.api_process                         # chat completions, 256 streams
    python -m bench.api_process --against ../before     # beside another checkout, in turns
    python -m bench.api_process --routes chat completions generate --json out.json
    python -m bench.api_process --api-processes 1 2     # as many of them behind the port

Supervisor, API process and detokenizer are those of `radix serve`. In place of the scheduler a
process gives every stream one token of English text at each tick. A client that only counts events
reads the streams. When all of them run, CPU time of the API process is taken over some hundred
ticks, all of its threads included:

    process     microseconds of all threads of all API processes a token
    loop        of these the event loop's thread
    kernel      of all threads, in system calls: sending is most of it
    events      a token; below 1 the API process, or the machine, could not keep up: raise --tick-ms
    busiest     the share of the CPU time that the busiest of the API processes has taken
    write only  the loop's thread where it writes the same events ready-made and does nothing else:
                what the kernel takes for one send a token

Each figure is the median of the rounds. With --against the checkouts take turns, and each figure is
followed by the other's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from radix_runtime.cli.output_file import output_file

from .client import PATHS, Client, write_only
from .instance import WARM_TICKS, WORK

ROOT = Path(__file__).resolve().parents[2]
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.api_process", description=__doc__)
    parser.add_argument("--routes", nargs="+", choices=sorted(PATHS), default=["chat"])
    parser.add_argument("--api-processes", type=int, nargs="+", default=[1])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--ticks", type=int, default=200, help="that are measured")
    parser.add_argument("--tick-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--json", type=output_file, help="where the figures go too")
    args = parser.parse_args()
    checkouts = [ROOT] if args.against is None else [ROOT, args.against.resolve()]
    found = {}
    for route in args.routes:
        for count in args.api_processes:
            name = route if args.api_processes == [1] else f"{route}, {count}"
            found[name] = _measure(route, args, checkouts, count)
    print("\n".join(_table(found)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def _measure(
    route: str, args: argparse.Namespace, checkouts: list[Path], processes: int
) -> list[Figures]:
    """The medians of each checkout."""
    runs: list[list[Figures]] = [[] for _ in checkouts]
    for _ in range(args.rounds):
        for checkout, found in zip(checkouts, runs, strict=True):
            found.append(_run(route, args, checkout=checkout, processes=processes))
    medians = []
    for found in runs:
        medians.append({name: statistics.median(run[name] for run in found) for name in found[0]})
    print(f"{route}: done", file=sys.stderr)
    return medians


def _run(route: str, args: argparse.Namespace, *, checkout: Path, processes: int) -> Figures:
    """One server of a checkout and one client."""
    paths = [checkout / "runtime", checkout / "kernel" / "python", ROOT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with tempfile.TemporaryDirectory() as folder:
        work = {
            "streams": args.streams,
            "processes": processes,
            "ticks": args.ticks,
            "seconds": args.tick_ms / 1e3,
            "file": str(Path(folder) / "figures.json"),
        }
        environment[WORK] = json.dumps(work)
        command = [sys.executable, "-m", "bench.api_process.instance"]
        server = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            client = Client(route, streams=args.streams, tokens=_tokens(work))
            events, piece = uvloop.run(client.run(port))
            each = json.loads(Path(work["file"]).read_text())
        finally:
            server.terminate()
            server.wait()
    tokens = args.streams * args.ticks
    cpu = {name: sum(one[name] for one in each) for name in each[0]}
    return {
        "process": 1e6 * cpu["process"] / tokens,
        "loop": 1e6 * cpu["loop"] / tokens,
        "kernel": 1e6 * cpu["kernel"] / tokens,
        "events": events / (args.streams * _tokens(work)),
        "busiest": max(one["process"] for one in each) / cpu["process"],
        "write only": 1e6
        * uvloop.run(write_only(piece, args.streams, args.ticks, args.tick_ms / 1e3)),
    }


def _tokens(work: dict[str, Any]) -> int:
    """Of each answer; some are not measured."""
    return int(work["ticks"]) + 2 * WARM_TICKS


def _table(found: dict[str, list[Figures]]) -> Iterator[str]:
    """The figures in Markdown."""
    for number, (route, sides) in enumerate(found.items()):
        if number == 0:
            yield "| route | " + " | ".join(sides[0]) + " |"
            yield "|---|" + " --: |" * len(sides[0])
        cells = [" / ".join(f"{side[name]:.2f}" for side in sides) for name in sides[0]]
        yield f"| {route} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
