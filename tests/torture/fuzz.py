"""Requests that no client should send: every documented field with values it is not for, bodies of
odd shapes and sizes, and bytes that are no HTTP."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from typing import Any

import httpx
import msgspec

from radix_runtime.server import protocol
from radix_runtime.server.unbuilt import HARMLESS, UNBUILT
from tests.runtime.server_process import Server

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -1e300, "", "a", "\x00", "\ud7ff",
    "x" * 5000, [], [0], [-1], [2**31], ["a"], [[]], [[1, "a"]], [None], {}, {"a": 1},
    {"1": 1000}, {"type": "text"},
    [{"role": "user"}], [{"role": "user", "content": "hi"}], [{"role": "x", "content": [{}]}],
]  # fmt: skip
ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (
        protocol.ChatBody,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    ),
    "/v1/completions": (protocol.CompletionBody, {"prompt": "hi", "max_tokens": 2}),
    "/generate": (protocol.GenerateBody, {"text": "hi", "sampling_params": {"max_new_tokens": 2}}),
    "/tokenize": (protocol.TokenizeBody, {"prompt": "hi"}),
    "/detokenize": (protocol.DetokenizeBody, {"tokens": [5, 6]}),
    "/abort_request": (protocol.AbortBody, {"rid": "x"}),
}


def bad_bodies(rng: random.Random) -> bytes:
    """A body whose bytes are wrong, not only its values."""
    good = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
    depth = rng.randrange(1, 2000)
    return rng.choice(
        [
            good[: rng.randrange(len(good))],
            bytes(rng.randrange(256) for _ in range(rng.randrange(200))),
            b'{"prompt":' + b"[" * depth + b"]" * depth + b"}",
            b'{"prompt":[' + b"[5]," * rng.randrange(30_000) + b"[5]]}",
            b'{"prompt":"' + b"a" * rng.randrange(2_000_000) + b'"}',
            b'{"max_tokens":' + b"9" * rng.randrange(1, 1000) + b"}",
            b'{"temperature":NaN,"prompt":"x"}',
            b'{"prompt":"\\ud800"}',
        ]
    )


def fuzz(seconds: float) -> list[str]:
    """Sends them for so long; anything above 499, or an error without its object, is a fault."""
    rng = random.Random()
    statuses: Counter[int] = Counter()
    broken: list[str] = []
    with Server("--max-total-tokens", "8192") as server, httpx.Client(timeout=60) as client:
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(broken) < 10:
            if rng.random() < 0.1:
                port = int(server.url.rpartition(":")[2])
                if b" 500 " in answer_to_bytes(port, random_bytes(rng))[:16]:
                    broken.append("fuzz: bytes that are no HTTP: 500")
                continue
            path, content = random_request(rng)
            headers = {"content-type": "application/json"}
            answer = client.post(server.url + path, content=content, headers=headers)
            statuses[answer.status_code] += 1
            if answer.status_code >= 500 and answer.status_code != 503:
                broken.append(f"fuzz: {path} {content[:300]!r}: {answer.status_code}")
            elif answer.status_code >= 400 and set(answer.json()) != {"error"}:
                broken.append(f"fuzz: {path}: {answer.text[:200]}")
        if client.get(f"{server.url}/health_generate").status_code != 200:
            broken.append("fuzz: the server is not well afterwards")
        if "Traceback" in server.log():
            broken.append("fuzz: a traceback in the log")
    print(f"{sum(statuses.values())} requests: {dict(sorted(statuses.items()))}")
    return broken


def random_request(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body."""
    path = rng.choice(list(ROUTES))
    if rng.random() < 0.2:
        return path, bad_bodies(rng)
    kind, good = ROUTES[path]
    fields = [
        *kind.__struct_encode_fields__,
        *rng.sample(sorted(HARMLESS), 2),
        *rng.sample(sorted(UNBUILT), 2),
    ]
    body = dict(good)
    for name in rng.sample(fields, rng.randrange(1, 4)):
        body[name] = rng.choice(VALUES)
    return path, json.dumps(body).encode()


def random_bytes(rng: random.Random) -> bytes:
    """An HTTP request with some bytes changed."""
    data = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\nhello"
    mutated = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        mutated[rng.randrange(len(mutated))] = rng.randrange(256)
    return bytes(mutated)


def answer_to_bytes(port: int, data: bytes) -> bytes:
    """All that comes back; nothing if the connection is reset."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        try:
            while more := connection.recv(1 << 16):
                answer += more
        except ConnectionResetError:
            pass
    return answer
