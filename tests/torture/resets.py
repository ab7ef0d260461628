"""How soon the pages of a client that has gone are free again."""

from __future__ import annotations

import json
import socket
import statistics
import struct
import time

import httpx

from tests.runtime.server_process import Server

_STREAMS = 4  # that are reset together
_LIMIT = 10.0  # seconds for their pages


def resets(seconds: float) -> list[str]:
    """Four streams are reset, again and again; prints the time until the scheduler holds nothing of
    theirs, and for comparison that of one question to it. What did not come back."""
    times: list[float] = []
    questions: list[float] = []
    with Server() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        port = int(server.url.rpartition(":")[2])
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(times) < 2:
            start = time.perf_counter()
            _held(client)
            questions.append(time.perf_counter() - start)
            streams = [_stream(port) for _ in range(_STREAMS)]
            for stream in streams:
                stream.close()
            start = time.perf_counter()
            while _held(client):
                if time.perf_counter() - start > _LIMIT:
                    return [f"resets: {_held(client)} tokens and requests are left"]
            times.append(time.perf_counter() - start)
    print("| | times | p50, ms | p99, ms | most, ms |\n|---|--:|--:|--:|--:|")
    print(_line("reset of 4 streams to pages back", times))
    print(_line("a question to the scheduler", questions))
    return []


def _held(client: httpx.Client) -> int:
    """Tokens in use and requests that run."""
    state = client.get("/get_server_info").json()["internal_states"][0]
    return int(state["num_used_tokens"]) + int(state["num_running_reqs"])


def _stream(port: int) -> socket.socket:
    """One that has begun, and whose end is a reset."""
    body = {"prompt": "once upon a time", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.sendall(head + data)
    received = b""
    while b"data: " not in received:
        received += connection.recv(1 << 16)
    return connection


def _line(name: str, times: list[float]) -> str:
    cuts = statistics.quantiles(times, n=100)
    cells = [f"{1e3 * value:.0f}" for value in (cuts[49], cuts[98], max(times))]
    return f"| {name} | {len(times)} | {' | '.join(cells)} |"
