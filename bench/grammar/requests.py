"""What a schema costs a request: its first token over HTTP, and the throughput of an engine."""

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from radix_runtime import Engine

from .processes import schema

_START_LIMIT = 300.0  # seconds until a server is ready
_STOP_LIMIT = 30.0  # and until it has ended
_WARM_REQUESTS = 5  # of each kind
_MAX_TOKENS = 1_024
_PROMPT = "Give me an object."


def first_token(args: argparse.Namespace) -> None:
    """Prints the time to the first token of requests without a schema, with a new one, and with one
    that the server has seen. They take turns, one at a time, so each meets the same machine."""
    print(f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    seconds: dict[str, list[float]] = {"no schema": [], "new schema": [], "known schema": []}
    with _server(args.flags) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for number in range(_WARM_REQUESTS + args.requests):
            text = schema(number).text
            for name, given in zip(seconds, (None, text, text), strict=True):
                seconds[name].append(_ask(connection, given))
    least = {name: _percentiles(values[_WARM_REQUESTS:]) for name, values in seconds.items()}
    for name, (median, late) in least.items():
        print(f"{name}: first token after p50 {median:.2f}, p95 {late:.2f} ms")
    median, late = least["no schema"]
    for name in ("new schema", "known schema"):
        more, later = least[name]
        print(f"{name} adds {more - median:.2f} ms at p50, {later - late:.2f} at p95")


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    median, late = np.percentile(seconds, [50, 95]) * 1000
    return float(median), float(late)


def _ask(connection: http.client.HTTPConnection, schema_text: str | None) -> float:
    """Seconds until the first event of an answer."""
    body: dict[str, Any] = {"prompt": _PROMPT, "max_tokens": 2, "stream": True, "ignore_eos": True}
    if schema_text is not None:
        body["json_schema"] = schema_text
        del body["ignore_eos"]
    data = json.dumps(body)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    line = response.readline()
    seconds = time.perf_counter() - began
    rest = response.read()
    if response.status != 200 or not line.startswith(b"data: "):
        raise AssertionError(f"{response.status}: {line + rest!r}")
    return seconds


@contextmanager
def _server(flags: list[str]) -> Iterator[int]:
    """The port of `radix serve` in processes of its own."""
    command = [sys.executable, "-m", "radix_runtime.cli", "serve", "--port", "0", *flags]
    with tempfile.NamedTemporaryFile("w+") as output:  # a pipe would have to be read on
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield _port_of(server, Path(output.name))
        finally:
            server.terminate()
            try:
                server.wait(_STOP_LIMIT)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _port_of(server: subprocess.Popen[bytes], output: Path) -> int:
    """Waits until the server is ready."""
    deadline = time.monotonic() + _START_LIMIT
    while server.poll() is None and time.monotonic() < deadline:
        found = re.search(r"ready: http://\S+:(\d+)", output.read_text())
        if found:
            return int(found[1])
        time.sleep(0.1)
    raise AssertionError(f"the server is not ready:\n{output.read_text()}")


def throughput(args: argparse.Namespace) -> None:
    """Prints the time of answers under one schema, and of as many tokens of the same requests
    without it, in turns, and the median of their ratios."""
    print(f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    prompts = [f"{_PROMPT} Number {number}." for number in range(args.requests)]
    with Engine(model_path=args.model_path, dtype=args.dtype) as engine:
        ratios = [_round(engine, prompts, number) for number in range(args.rounds + 1)][1:]
    shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"throughput with a schema over that without: {statistics.median(ratios):.3f} ({shown})")


def _round(engine: Engine, prompts: list[str], number: int) -> float:
    """Seconds without the schema over seconds with it."""
    base = {"temperature": 1.0, "max_new_tokens": _MAX_TOKENS}
    bound = [
        {**base, "seed": number * 1000 + i, "json_schema": schema(0).text}
        for i in range(len(prompts))
    ]
    outputs, with_schema = _timed(engine, prompts, bound)
    lengths = [output["meta_info"]["completion_tokens"] for output in outputs]
    free = [{**base, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
    outputs, without = _timed(engine, prompts, free)
    if [output["meta_info"]["completion_tokens"] for output in outputs] != lengths:
        raise AssertionError("the lengths are not the same")
    tokens = sum(lengths)
    print(f"{tokens} tokens: {tokens / with_schema:.0f} a second, without {tokens / without:.0f}")
    return without / with_schema


def _timed(engine: Engine, prompts: list[str], params: list[dict[str, Any]]) -> tuple[Any, float]:
    engine.flush_cache()
    began = time.perf_counter()
    outputs = engine.generate(prompts, params)
    return outputs, time.perf_counter() - began
