"""`python -m bench.clients`: clients that read the same streams, beside what the server sent.

A server in a process of its own sends an event to each of --streams streams every --tick-ms; what a
client reports differs from that by what the client itself costs. `of server` is the client's tokens
a second over the server's own; below 1 the client, or the machine, was the limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from radix_runtime.cli.figures import Record, figures, machine
from radix_runtime.cli.load_backends import OpenAI
from radix_runtime.cli.load_client import Job
from radix_runtime.cli.load_processes import run_load
from radix_runtime.cli.output_file import output_file
from radix_runtime.cli.raw_client import Target
from radix_runtime.cli.workload import Item

from .others import aiohttp_records, httpx_records

ROOT = Path(__file__).resolve().parents[2]
Client = Callable[[str, int, int], list[Record]]


def radix_records(processes: int) -> Client:
    """Ours, with so many processes."""

    def run(url: str, streams: int, tokens: int) -> list[Record]:
        address = httpx.URL(url)
        target = Target(
            host=address.host, port=address.port or 80, is_tls=False, prefix="", api_key=None
        )
        job = Job(
            target=target,
            backend=OpenAI("stream", temperature=0.0, cache_salt=""),
            items=[Item([1], tokens)] * streams,
            due=[0.0] * streams,
            concurrency=0,
        )
        return run_load(job, processes, lambda done: None).records

    return run


def clients(processes: int) -> dict[str, Client]:
    """Those that are installed."""
    found = {"radix": radix_records(processes), "httpx": httpx_records}
    if importlib.util.find_spec("aiohttp") is not None:
        found["aiohttp"] = aiohttp_records
    return found


class StreamServer:
    """The server in its process; `with StreamServer(tick_ms) as url`."""

    def __init__(self, tick_ms: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.clients.server", "--tick-ms", str(tick_ms)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def __enter__(self) -> str:
        assert self._process.stdout is not None
        return f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()


def measure(client: Client, url: str, streams: int, tokens: int) -> dict[str, Any]:
    """A client's figures, and what the server says of the same streams."""
    httpx.get(f"{url}/stats")
    cpu = time.process_time()
    found = figures(client(url, streams, tokens))
    sent = httpx.get(f"{url}/stats").json()
    found["cpu_seconds"] = time.process_time() - cpu
    found["server_events"] = sent["events"]
    found["server_throughput"] = sent["events"] / max(sent["seconds"], 1e-9)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="events of a stream")
    parser.add_argument("--tick-ms", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=1, help="of our client")
    parser.add_argument("--only", nargs="+", help="these clients")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args()
    report: dict[str, Any] = {**machine(), **vars(args), "json": None, "clients": {}}
    for name, client in clients(args.processes).items():
        if args.only and name not in args.only:
            continue
        with StreamServer(args.tick_ms) as url:
            found = measure(client, url, args.streams, args.tokens)
        report["clients"][name] = found
        print(
            f"{name:8} {found['output_throughput']:9,.0f} tok/s, of server "
            f"{found['output_throughput'] / found['server_throughput']:.3f}"
            f" ({found['server_throughput']:,.0f}), ttft {found['median_ttft_ms']:.1f} ms,"
            f" itl p50 {found['median_itl_ms']:.2f} p99 {found['p99_itl_ms']:.2f} ms",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
