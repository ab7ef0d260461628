"""A server on its way out: what still runs ends, and nobody's request is lost."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time

import httpx
import pytest

from tests.runtime.api_stack import LONG, MODEL, Stack, in_background
from tests.runtime.bad_requests import CHAT, good_request
from tests.runtime.server_process import Call, Server, join, start_load


def test_drain_and_undrain(slow: Stack) -> None:
    """What runs goes on; what comes is refused, and its connection ends."""
    thread, running = in_background(
        lambda: httpx.post(f"{slow.url}/v1/completions", json=LONG, timeout=30)
    )
    slow.wait(lambda: len(slow.manager._open) == 1)
    with httpx.Client(base_url=slow.url) as client:
        for _ in range(2):
            assert client.post("/drain").json() == {"draining": True, "open_requests": 1}
        assert client.get("/health").status_code == 200
        for answer in (client.get("/ready"), client.post(CHAT, json=good_request(MODEL))):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            assert answer.headers["connection"] == "close" and answer.headers["retry-after"] == "1"
        thread.join(30)
        assert running[0].status_code == 200
        assert running[0].json()["usage"]["completion_tokens"] == 200
        assert client.post("/undrain").json() == {"draining": False, "open_requests": 0}
        assert client.get("/ready").status_code == 200
        answer = client.post(CHAT, json=good_request(MODEL))
        assert answer.status_code == 200 and "connection" not in answer.headers


def test_a_delay_admits_while_it_is_not_ready() -> None:
    with Stack(drain_delay=3.0) as stack, httpx.Client(base_url=stack.url) as client:
        client.post("/drain")
        assert client.get("/ready").status_code == 503
        assert client.post(CHAT, json=good_request(MODEL)).status_code == 200
        stack.wait(lambda: stack.manager.drain.refuses)
        stack.manager.drain._delay = 0.1
        assert client.post(CHAT, json=good_request(MODEL)).status_code == 503
        client.post("/undrain")
        client.post("/drain")
        client.post("/undrain")
        time.sleep(0.3)  # the second drain was undone before its delay had passed
        assert client.post(CHAT, json=good_request(MODEL)).status_code == 200
        stack.check_idle()


def test_only_admins_drain() -> None:
    with Stack(api_key="client", admin_api_key="admin") as stack:
        for path in ("/drain", "/undrain"):
            url = stack.url + path
            assert httpx.post(url, headers={"authorization": "Bearer client"}).status_code == 403
            assert httpx.post(url, headers={"authorization": "Bearer admin"}).status_code == 200


def test_sigterm_lets_open_requests_end() -> None:
    # The client is made before: it takes long enough on a busy machine for the answers to end.
    with Server("--drain-timeout", "60") as server, httpx.Client(base_url=server.url) as client:
        calls = [Call(server.url, stream, tokens=1200) for stream in (True, True, False)]
        deadline = time.monotonic() + 30
        while any(call.stream and call.chunks < 3 for call in calls):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.process.terminate()
        server.wait_for("open requests have 60 s to end")
        late = client.post(CHAT, json=good_request("default"), timeout=10)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "not_ready")
        undone = client.post("/undrain")
        assert undone.status_code == 503
        assert server.wait_exit(60) == 0
        join(calls, time.monotonic())
        for call in calls:
            assert call.status == 200 and call.code is None and not call.broken
            assert call.done == call.stream
        server.assert_nothing_left()


@pytest.mark.parametrize("second", [None, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_the_drain(second: int | None) -> None:
    """The timeout, or a second signal, ends what is still open with an error."""
    with Server("--drain-timeout", "1" if second is None else "600") as server:
        calls = start_load(server, 2, 1)
        start = time.monotonic()
        server.process.terminate()
        server.wait_for("to end")
        if second is not None:
            server.process.send_signal(second)
        assert server.wait_exit(30) == 0
        assert join(calls, start) < 30
        assert {call.code for call in calls} == {"not_ready"}
        server.assert_nothing_left()


def test_an_idle_server_ends_at_once() -> None:
    with Server("--drain-timeout", "600") as server:
        server.process.terminate()
        assert server.wait_exit(20) == 0
        server.assert_nothing_left()


def test_a_clean_end_under_load_runs_every_process_to_its_end() -> None:
    """None is killed, even where the results of many prompts are under way that nobody takes."""
    with Server() as server:
        calls = [Call(server.url, stream=False, tokens=20) for _ in range(40)]
        time.sleep(0.5)
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.wait_exit(30) == 0
        join(calls, start)
        assert "by itself" not in server.log()
        server.assert_nothing_left()


ROUNDS = 10 if os.environ.get("RADIX_TEST_FULL") else 1


class Balancer:
    """Sends requests to those servers that are ready, as a load balancer does that asks each of
    them every 100 ms. It retries nothing."""

    def __init__(self, ports: list[int]) -> None:
        self.failed: list[str] = []
        self.served = 0
        self._ports = ports
        self._ready = dict.fromkeys(ports, False)
        self._stopping = False
        self._turns = itertools.count()
        self._threads = [threading.Thread(target=self._watch, args=(port,)) for port in ports]
        self._threads += [threading.Thread(target=self._ask) for _ in range(4)]
        for thread in self._threads:
            thread.start()

    def is_ready(self, port: int) -> bool:
        return self._ready[port]

    def _watch(self, port: int) -> None:
        while not self._stopping:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5, verify=False)
                self._ready[port] = answer.status_code == 200
            except httpx.HTTPError:
                self._ready[port] = False
            time.sleep(0.1)

    def _ask(self) -> None:
        body = {**good_request("default"), "max_tokens": 10}
        while not self._stopping:
            ready = [port for port in self._ports if self._ready[port]]
            if not ready:
                time.sleep(0.02)
                continue
            port = ready[next(self._turns) % len(ready)]
            try:
                url = f"http://127.0.0.1:{port}{CHAT}"
                answer = httpx.post(url, json=body, timeout=60, verify=False)
                if answer.status_code == 200:
                    self.served += 1
                else:
                    self.failed.append(answer.text)
            except httpx.HTTPError as error:
                self.failed.append(repr(error))

    def stop(self) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join(60)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.timeout(900)
def test_a_rolling_restart_loses_no_request() -> None:
    ports = [free_port(), free_port()]
    # The balancer knows within 100 ms, on a busy machine much later.
    flags = ("--drain-delay", "3", "--drain-timeout", "60")
    servers = {port: Server("--port", str(port), *flags) for port in ports}
    balancer = Balancer(ports)
    try:
        for _ in range(ROUNDS):
            for port in ports:
                deadline = time.monotonic() + 120
                while not all(balancer.is_ready(each) for each in ports):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                servers[port].process.terminate()
                assert servers[port].wait_exit(70) == 0
                servers[port].__exit__(None, None, None)
                servers[port] = Server("--port", str(port), *flags)
    finally:
        balancer.stop()
        for server in servers.values():
            server.__exit__(None, None, None)
    assert balancer.failed == [] and balancer.served > 20


def test_the_health_port_needs_nothing_of_the_api_process() -> None:
    health = free_port()
    with Server("--health-port", str(health)) as server:
        url = f"http://127.0.0.1:{health}"

        def status(path: str) -> int:
            return httpx.get(url + path, timeout=10).status_code

        assert [status(path) for path in ("/health", "/ping", "/ready", "/other")] == [
            200, 200, 200, 404,
        ]  # fmt: skip
        assert "radix:open_requests" in httpx.get(f"{url}/metrics").text
        for path, wanted in (("/drain", 503), ("/undrain", 200)):
            httpx.post(server.url + path)
            deadline = time.monotonic() + 30
            while status("/ready") != wanted:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        api = server.find("radix: api")
        api.suspend()
        start = time.monotonic()
        assert status("/health") == status("/ready") == 200
        assert "radix:open_requests" in httpx.get(f"{url}/metrics", timeout=10).text
        while status("/health") == 200:  # silent for 10 s
            assert time.monotonic() - start < 40
            time.sleep(0.1)
        api.resume()
        server.process.terminate()
        assert server.wait_exit(30) == 0
        server.assert_nothing_left()
