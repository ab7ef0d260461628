"""Connections: how many, how slow, how broken; and answers that must arrive before their end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import httpx
import pytest

from radix_runtime.server import connection, incoming_body
from tests.child import IMPORT_PATH
from tests.runtime.api_stack import MODEL, Stack
from tests.runtime.bad_requests import CHAT, good_request

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def small() -> Iterator[Stack]:
    with Stack(max_connections=20, max_body_size=20_000, pages=256) as stack:
        yield stack


@pytest.fixture
def served(small: Stack) -> Iterator[Stack]:
    yield small
    small.wait(lambda: not small.connections())


def connect(stack: Stack) -> socket.socket:
    return socket.create_connection(("127.0.0.1", stack.port), timeout=20)


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nx-request-id: " in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


def everything(client: socket.socket) -> bytes:
    """All until the server ends the connection, which it must not do by a reset."""
    received = b""
    while part := client.recv(1 << 16):
        received += part
    return received


def test_too_many_connections_are_told_so(served: Stack) -> None:
    clients = [connect(served) for _ in range(20)]
    served.wait(lambda: len(served.connections()) == 20)
    with connect(served) as late:
        assert error_of(everything(late)) == (503, "engine_overloaded")
    for client in clients:
        client.sendall(GET)
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        client.close()
    served.wait(lambda: not served.connections())
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_headers_have_some_seconds(served: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)
    with connect(served) as silent, connect(served) as slow, connect(served) as second:
        slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-a: ")
        second.sendall(GET)
        assert second.recv(1000).startswith(b"HTTP/1.1 200")
        second.sendall(GET[:10])
        assert everything(silent) == b""
        for client in (slow, second):
            assert error_of(everything(client)) == (408, "request_timeout")


@pytest.mark.parametrize(
    "data",
    [
        b"no HTTP at all\r\n\r\n",
        b"GET http://evil.example/health HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nbad name: 1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=["noise", "absolute", "header", "smuggling"],
)
def test_what_the_parser_refuses_is_an_error_object_and_the_end(served: Stack, data: bytes) -> None:
    with connect(served) as client:
        client.sendall(data + GET)  # no second answer follows
        assert error_of(everything(client)) == (400, "invalid_http")


@pytest.mark.parametrize("close", [True, False])
def test_who_writes_all_before_reading_gets_the_answer(served: Stack, close: bool) -> None:
    """10 MB against a limit of 20,000 bytes; urllib and others read only when all is written."""
    data = b"x" * 10_000_000
    lines = [b"POST /v1/chat/completions HTTP/1.1", b"host: localhost"]
    lines += [b"content-type: application/json", b"content-length: %d" % len(data)]
    if close:
        lines.append(b"connection: close")
    with connect(served) as client:
        client.sendall(b"\r\n".join([*lines, b"", data]))
        assert error_of(everything(client)) == (413, "request_too_large")
    request = urllib.request.Request(
        served.url + CHAT, data=data, headers={"content-type": "text/plain"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    assert caught.value.code == 413


def test_a_refused_body_is_not_read_for_ever(
    served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming_body, "_LINGER", 0.5)
    with connect(served) as client:
        client.sendall(
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        )
        client.sendall(b"content-length: 999999999\r\n\r\n")
        start = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < start + 10:
                client.sendall(b"x" * 1000)
                time.sleep(0.05)
        assert time.monotonic() < start + 5


def test_a_whole_body_has_a_minute(served: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not keep it open."""
    monkeypatch.setattr(incoming_body, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(incoming_body, "_LINGER", 0.1)
    with connect(served) as client:
        client.sendall(
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        )
        client.sendall(b"content-length: 1000\r\n\r\n")
        for _ in range(4):
            client.sendall(b" ")
            time.sleep(0.1)
        assert error_of(everything(client)) == (408, "request_timeout")
    assert served.manager.admission.choices == 0


def test_small_writes_go_out_at_once(served: Stack) -> None:
    """Nagle's algorithm would hold the second write of an answer back for 40 ms."""
    with httpx.Client(base_url=served.url) as client:
        client.post(CHAT, json=good_request(MODEL))
        (only,) = served.connections()
        connected = only.transport.get_extra_info("socket")
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


_RAISE = """
import logging, resource
from radix_runtime.processes import supervisor
logging.basicConfig(format="%(message)s")
most = 300
resource.setrlimit(resource.RLIMIT_NOFILE, (100, most))
supervisor._raise_descriptor_limit(10)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
supervisor._raise_descriptor_limit(4096)
"""


def test_the_limit_of_open_files_is_raised_as_far_as_it_may() -> None:
    variables = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    done = subprocess.run(
        [sys.executable, "-c", _RAISE], env=variables, capture_output=True, text=True, check=True
    )
    assert "the limit of open files is 300" in done.stderr and "4096" in done.stderr
    assert done.stderr.count("limit") == 2  # "ulimit" is the second: one warning, of the larger
