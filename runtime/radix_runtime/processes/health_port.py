"""`--health-port`: health, readiness and metrics from the supervisor, which no load stalls."""

import http.client
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ..errors import ConfigError
from ..server.listener import check_port

_TIMEOUT = 2.0  # seconds for a client, and for an API process to give the metrics
_MAX_CALLS = 32  # at a time


class HealthPort:
    """Serves /health, /ping, /ready and /metrics on threads of this process. `health` and `ready`
    give the reason why it is not so, or None. Metrics come from one of the API processes, for all,
    asked for at `url`; where it does not answer, or cannot for all, the last ones are given unless
    they need a key (`metrics_need_key`). Raises ConfigError if the port cannot be had."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        url: str,
        health: Callable[[], str | None],
        ready: Callable[[], str | None],
        metrics_need_key: bool,
    ) -> None:
        check_port("--health-port", port)
        metrics = _Metrics(url, may_repeat=not metrics_need_key)
        handler = _handler(metrics, health=health, ready=ready)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server_type = type("Server", (ThreadingHTTPServer,), {"address_family": family})
        try:
            self._server: ThreadingHTTPServer = server_type((host, port), handler)
        except OSError as error:
            raise ConfigError(f"--health-port {port} of {host}: {error.strerror}") from error
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()


State = Callable[[], str | None]


def _handler(metrics: "_Metrics", *, health: State, ready: State) -> type[BaseHTTPRequestHandler]:
    slots = threading.BoundedSemaphore(_MAX_CALLS)

    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT

        def do_GET(self) -> None:
            if not slots.acquire(blocking=False):
                self._answer(503, b"busy")
                return
            try:
                self._serve()
            finally:
                slots.release()

        def _serve(self) -> None:
            path = self.path.partition("?")[0]
            if path in ("/health", "/ping"):
                self._state(health())
            elif path == "/ready":
                self._state(health() or ready())
            elif path == "/metrics":
                self._answer(*metrics.fetch(self.headers.get("authorization")))
            else:
                self._answer(404, b"there are /health, /ready and /metrics")

        def _state(self, reason: str | None) -> None:
            self._answer(200 if reason is None else 503, b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response_only(status)
            self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)

    return Handler


class _Metrics:
    """The metrics that one of the API processes gives for all, or those that were given last."""

    def __init__(self, url: str, may_repeat: bool) -> None:
        self._address = url.removeprefix("http://")
        self._may_repeat = may_repeat
        self._last = b""

    def fetch(self, authorization: str | None) -> tuple[int, bytes]:
        """Status and text."""
        headers = {} if authorization is None else {"authorization": authorization}
        connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT)
        try:
            connection.request("GET", "/metrics", headers=headers)
            response = connection.getresponse()
            text = response.read()
        except OSError:
            return self._repeated(b"")
        finally:
            connection.close()
        if response.status == 503:
            return self._repeated(text)
        if response.status == 200 and self._may_repeat:
            self._last = text
        return response.status, text

    def _repeated(self, reason: bytes) -> tuple[int, bytes]:
        """The last metrics; where there are none, a 503 with this text."""
        return (200, self._last) if self._last else (503, reason)
