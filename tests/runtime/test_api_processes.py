"""`--api-processes`: a real server with two of them, seen from outside."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.runtime.server_process import Call, Server, join

A = {"authorization": "Bearer key-a"}
B = {"authorization": "Bearer key-b"}
ADMIN = {"authorization": "Bearer admin"}
TITLES = ("radix: api/0", "radix: api/1")
MOST_CONNECTIONS = 40


class Client:
    """A connection that stays open: all of its requests go to API process `number`."""

    def __init__(self, server: Server) -> None:
        address = urlsplit(server.url)
        self.connection = http.client.HTTPConnection(
            address.hostname or "", port=address.port, timeout=60
        )
        self.get("/ping")  # it has been accepted
        port = self.connection.sock.getsockname()[1]
        self.number = next(
            number
            for number, title in enumerate(TITLES)
            for each in server.find(title).net_connections("tcp")
            if each.raddr and each.raddr.port == port
        )

    def get(self, path: str, headers: dict[str, str] = ADMIN) -> tuple[int, str]:
        return self._call("GET", path, None, headers)

    def post(self, path: str, headers: dict[str, str] = ADMIN, **body: Any) -> tuple[int, Any]:
        status, text = self._call("POST", path, json.dumps(body), headers)
        return status, json.loads(text)

    def _call(
        self, method: str, path: str, body: str | None, headers: dict[str, str]
    ) -> tuple[int, str]:
        self.connection.request(method, path, body, {**headers, "content-type": "application/json"})
        answer = self.connection.getresponse()
        return answer.status, answer.read().decode()

    def metric(self, line: str) -> float:
        found = re.search(rf"^{re.escape(line)} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        assert found is not None, line
        return float(found[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("key-a\nkey-b\n")
    flags = {
        "api-processes": 2,
        "api-key-file": keys,
        "admin-api-key": "admin",
        "max-requests-per-key": 3,
        "max-connections": MOST_CONNECTIONS,
    }
    with Server(*(f"--{name}={value}" for name, value in flags.items())) as server:
        yield server


@contextmanager
def pair(server: Server) -> Iterator[list[Client]]:
    """A connection to each process."""
    found: dict[int, Client] = {}
    spare = []
    while len(found) < len(TITLES):
        client = Client(server)
        spare.append(client)
        found.setdefault(client.number, client)
        assert len(spare) < MOST_CONNECTIONS, "one process gets them all"
    yield [found[number] for number in sorted(found)]
    for client in spare:
        client.connection.close()


@pytest.fixture
def both(server: Server) -> Iterator[list[Client]]:
    with pair(server) as clients:
        yield clients


def long_call(client: Client, headers: dict[str, str], **fields: Any) -> tuple[Any, list[Any]]:
    """A call that runs until it is aborted; its thread and, later, its answer."""
    answer: list[Any] = []
    body = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True, **fields}

    def run() -> None:
        answer.append(client.post("/v1/completions", headers, **body))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, answer


class Stream(threading.Thread):
    """A long answer, piece by piece. `end` is the code of the error that ends it, `done`, or `cut`
    where the connection ended without either."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self.chunks = 0
        self.end = "cut"
        self._connection = client.connection
        self.start()

    def run(self) -> None:
        body = {"prompt": "abc", "max_tokens": 1800, "ignore_eos": True, "stream": True}
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        with suppress(OSError, http.client.HTTPException):
            for line in self._connection.getresponse():
                self._take(line)

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data: [DONE]"):
            self.end = "done"
        elif line.startswith(b"data: "):
            self.chunks += 1
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self.end = chunk["error"]["code"]


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_processes(server: Server) -> None:
    assert "2 API processes share the port" in server.log()
    assert server.find(TITLES[0]).pid != server.find(TITLES[1]).pid
    settings = httpx.get(f"{server.url}/server_info", headers=ADMIN).json()
    assert settings["api_processes"] == 2
    assert "--api-processes 2" in settings["launch_command"]


def test_connections_are_shared_and_bounded_together(server: Server) -> None:
    clients = [Client(server) for _ in range(MOST_CONNECTIONS)]
    counts = Counter(client.number for client in clients)
    # One process may be stopped by the machine for a while; it takes its share afterwards.
    assert min(counts[0], counts[1]) >= MOST_CONNECTIONS // 4, counts
    refused = httpx.get(f"{server.url}/ping")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_overloaded")
    for client in clients:
        client.connection.close()
    wait_for(lambda: httpx.get(f"{server.url}/ping").status_code == 200)


def test_every_answer_reaches_its_own_client(both: list[Client]) -> None:
    answers: list[tuple[int, Any]] = []

    def ask(client: Client, first: int) -> None:
        for number in range(first, first + 4):
            message = {"role": "user", "content": f"What is {number} + 25?"}
            body = {"messages": [message], "temperature": 0, "max_tokens": 16}
            status, answer = client.post("/v1/chat/completions", A, **body)
            text = answer["choices"][0]["message"]["content"] if status == 200 else answer
            answers.append((number, text))

    threads = [
        threading.Thread(target=ask, args=(client, 10 + 4 * client.number)) for client in both
    ]
    before = [client.metric('radix:requests_total{outcome="ok"}') for client in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [(n, f"{n} + 25 = {n + 25}.") for n in range(10, 18)]
    after = [client.metric('radix:requests_total{outcome="ok"}') for client in both]
    assert before[0] == before[1] and after == [count + 8 for count in before], "one server's"
    _, info = both[1].get("/server_info")
    assert json.loads(info)["requests"]["ok"] == after[0]


def test_names_and_aborts_are_of_the_server(both: list[Client]) -> None:
    first, second = both
    thread, answer = long_call(first, A, rid="job")
    wait_for(lambda: second.metric("radix:open_requests") == 1)
    accepted = second.metric("radix:requests_accepted_total")
    status, error = second.post("/v1/completions", A, prompt="a", max_tokens=2, rid="job")
    assert status == 400 and error["error"]["param"] == "rid"
    assert second.metric("radix:requests_accepted_total") == accepted, "it is not sent"
    status, _ = second.post("/v1/completions", B, prompt="a", max_tokens=2, rid="job")
    assert status == 200, "another key's names are its own"
    assert second.post("/abort_request", B, rid="job") == (200, {"aborting": 0})
    assert second.post("/abort_request", A, rid="job") == (200, {"aborting": 1})
    thread.join(60)
    assert answer[0][1]["choices"][0]["finish_reason"] == "abort"

    running = [long_call(client, key, n=2) for client, key in zip(both, (A, B), strict=True)]
    spare = Client.__new__(Client)
    spare.connection = http.client.HTTPConnection(first.connection.host, first.connection.port)
    wait_for(lambda: spare.metric("radix:num_running_reqs") == 4)
    assert spare.post("/abort_request", abort_all=True) == (200, {"aborting": 2})
    for thread, answer in running:
        thread.join(60)
        assert {each["finish_reason"] for each in answer[0][1]["choices"]} == {"abort"}
    spare.connection.close()


def test_a_key_is_bounded_in_all_processes(both: list[Client]) -> None:
    first, second = both
    thread, answer = long_call(first, A, n=2, rid="job")
    wait_for(lambda: second.metric("radix:num_running_reqs") == 2)
    status, error = second.post("/v1/completions", A, prompt="a", max_tokens=2, n=2)
    assert (status, error["error"]["code"]) == (429, "rate_limit_exceeded")
    assert second.post("/v1/completions", A, prompt="a", max_tokens=2)[0] == 200
    assert second.post("/v1/completions", B, prompt="a", max_tokens=2, n=3)[0] == 200
    assert second.post("/abort_request", A, rid="job")[1] == {"aborting": 1}
    thread.join(60)
    assert answer[0][0] == 200


@pytest.mark.parametrize("number", [0, 1])
def test_admin_commands_reach_the_server_wherever_they_arrive(server: Server, number: int) -> None:
    with pair(server) as clients:
        here, there = clients[number], clients[1 - number]
        assert here.post("/v1/completions", A, prompt="abcd " * 40, max_tokens=2)[0] == 200
        assert there.post("/flush_cache")[0] == 200
        assert here.metric("radix:cache_pages") == 0
        assert here.post("/drain")[1] == {"draining": True, "open_requests": 0}
        status, error = there.post("/v1/completions", A, prompt="a", max_tokens=2)
        assert (status, error["error"]["code"]) == (503, "not_ready")
    # While it drains, every answer ends its connection.
    undone = httpx.post(f"{server.url}/undrain", headers=ADMIN)
    assert undone.json() == {"draining": False, "open_requests": 0}
    with pair(server) as clients:
        for client in clients:
            assert client.get("/ready")[0] == 200
            assert client.post("/v1/completions", A, prompt="a", max_tokens=2)[0] == 200


def test_one_killed_process_is_the_end_of_all() -> None:
    with Server("--api-processes", "2") as server, pair(server) as clients:
        streams = [Stream(client) for client in clients]
        wait_for(lambda: all(stream.chunks >= 3 for stream in streams))
        os.kill(server.find(TITLES[1]).pid, signal.SIGKILL)
        assert server.wait_exit(20) == 70
        for stream in streams:
            stream.join(20)
        assert [stream.end for stream in streams] == ["engine_dead", "cut"]
        assert "the api/1 process was killed by SIGKILL" in server.log()
        server.assert_nothing_left()


def test_a_stopped_process_is_told_by_its_name(tmp_path: Path) -> None:
    with Server("--api-processes", "2", "--step-timeout", "3") as server:
        psutil.Process(server.find(TITLES[1]).pid).suspend()
        assert server.wait_exit(60) == 75
        assert "the api/1 process has been silent for 3 s" in server.log()
        server.assert_nothing_left()


def test_sigterm_waits_for_the_calls_of_all() -> None:
    with Server("--api-processes", "2", "--drain-timeout", "100") as server:
        calls = [Call(server.url, stream=True, tokens=300) for _ in range(4)]
        end = time.monotonic() + 60
        while any(call.chunks < 3 for call in calls):
            assert time.monotonic() < end
            time.sleep(0.01)
        server.process.terminate()
        assert server.wait_exit(100) == 0
        join(calls, time.monotonic())
        assert all(call.done and call.code is None for call in calls)
        server.assert_nothing_left()
