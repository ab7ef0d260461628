"""`--health-port`: what the supervisor answers for API processes that cannot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from radix_runtime.errors import ConfigError
from radix_runtime.processes.health_port import HealthPort

KEY = {"authorization": "Bearer metrics"}


def test_a_port_that_there_is_not() -> None:
    def state() -> str | None:
        return None

    with pytest.raises(ConfigError, match="--health-port must be at most 65535, got 99999"):
        HealthPort("127.0.0.1", 99999, url="", health=state, ready=state, metrics_need_key=False)


class Api:
    """Stands for the API processes: answers every call with `status` and `text`."""

    def __init__(self) -> None:
        self.status = 200
        self.text = b"radix:steps_total 1"
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response_only(api.status)
                self.send_header("content-length", str(len(api.text)))
                self.end_headers()
                self.wfile.write(api.text)

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join(20)


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    yield api
    api.close()


def port(api: Api, *, metrics_need_key: bool = False) -> HealthPort:
    return HealthPort(
        "127.0.0.1",
        0,
        url=api.url,
        health=lambda: None,
        ready=lambda: None,
        metrics_need_key=metrics_need_key,
    )


def metrics(port: HealthPort) -> tuple[int, bytes]:
    answer = httpx.get(f"http://127.0.0.1:{port.port}/metrics", headers=KEY, timeout=30)
    return answer.status_code, answer.content


def test_metrics_are_repeated_while_none_can_be_given_for_all(api: Api) -> None:
    health = port(api)
    given = api.text
    api.status = 503
    api.text = b"an API process does not answer"
    assert metrics(health) == (503, api.text), "there are none yet"
    api.status = 200
    api.text = given
    assert metrics(health) == (200, given)
    api.status = 503
    api.text = b"an API process does not answer"
    assert metrics(health) == (200, given)
    api.status = 401
    assert metrics(health) == (401, api.text)
    health.close()


def test_metrics_that_need_a_key_are_not_repeated(api: Api) -> None:
    health = port(api, metrics_need_key=True)
    assert metrics(health) == (200, api.text)
    api.status = 503
    assert metrics(health) == (503, api.text)
    health.close()
