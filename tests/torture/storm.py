"""Calls that end in every way a client can end them; afterwards nothing may be left of them."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections import Counter

import httpx

from tests.runtime.server_process import Server

_CLIENTS = 8
_ROUND = 10.0  # seconds of storm between two looks at what is left


def storm(seconds: float) -> list[str]:
    """Runs for so long and prints what was left after each round."""
    ways: Counter[str] = Counter()
    broken: list[str] = []
    print("| after s | calls | open | running | used tokens | scheduler MB | api MB | files |")
    print("|---|---|---|---|---|---|---|---|")
    with Server("--max-total-tokens", "12000") as server:
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            _round(server, ways, min(_ROUND, seconds))
            broken += _left(server, time.monotonic() - start, sum(ways.values()))
        server.process.terminate()
        if server.wait_exit(15) != 0:
            broken.append("storm: the server did not end with 0")
        if "Traceback" in server.log():
            broken.append("storm: a traceback in the log")
    print("\n" + ", ".join(f"{way} {count}" for way, count in sorted(ways.items())))
    return broken


def _round(server: Server, ways: Counter[str], seconds: float) -> None:
    end = time.monotonic() + seconds

    def client() -> None:
        rng = random.Random()
        while time.monotonic() < end:
            way = rng.choice(("reset", "reset at once", "close", "half close", "partial", "whole"))
            try:
                _call(server, rng, way)
            except OSError:
                pass  # the server may be quicker
            ways[way] += 1

    threads = [threading.Thread(target=client) for _ in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _call(server: Server, rng: random.Random, way: str) -> None:
    body = {
        "prompt": "once upon a time " * rng.randrange(1, 40),
        "max_tokens": rng.randrange(1, 200),
        "ignore_eos": True,
        "n": rng.randrange(1, 5),
        "stream": rng.random() < 0.7,
        **rng.choice(({}, {"stop": ["the"]}, {"logprobs": 3}, {"cache_salt": str(rng.random())})),
    }
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        if way.startswith("reset"):
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if way == "partial":
            connection.sendall((head + data)[: rng.randrange(1, len(head + data))])
            return
        connection.sendall(head + data)
        if way == "half close":
            connection.shutdown(socket.SHUT_WR)
        if way in ("whole", "half close"):
            while connection.recv(1 << 16):
                pass
        elif way != "reset at once":
            connection.recv(rng.randrange(1, 4096))


def _left(server: Server, seconds: float, calls: int) -> list[str]:
    """Prints a row; what was still there after ten seconds."""
    deadline = time.monotonic() + 10
    while True:
        info = httpx.get(f"{server.url}/get_server_info", timeout=30).json()
        state = info["internal_states"][0]
        counts = info["requests"]
        ended = sum(counts[name] for name in ("ok", "aborted", "failed", "refused"))
        left = (counts["accepted"] - ended, state["num_running_reqs"], state["num_used_tokens"])
        if not any(left) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    memory = [
        server.find(role).memory_info().rss / 1e6 for role in ("radix: scheduler", "radix: api")
    ]
    files = server.find("radix: api").num_fds()
    cells = (f"{seconds:.0f}", calls, *left, *(f"{size:.0f}" for size in memory), files)
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)
    return [f"storm: {left} open, running and used tokens are left"] if any(left) else []
