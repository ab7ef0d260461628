"""`radix serve` as a real process, load on it, and what must be left when it has gone: nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from tests.child import IMPORT_PATH

ROOT = Path(__file__).parents[2]
START_LIMIT = 120.0
PROMPT = "Tell me a long story."


def environment(runtime_dir: str) -> dict[str, str]:
    """The private directory comes to `runtime_dir`, so that leftovers are seen."""
    return {**os.environ, "PYTHONPATH": IMPORT_PATH, "XDG_RUNTIME_DIR": runtime_dir}


class Server:
    """Start with `with Server(flags...) as server`; `server.url` answers then. `command` is what
    runs in place of `radix serve`."""

    def __init__(self, *flags: str, wait: bool = True, command: Sequence[str] = ()) -> None:
        self.runtime_dir = tempfile.mkdtemp(prefix="rt-")
        self._shm = set(os.listdir("/dev/shm"))
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)
        given = ["--max-total-tokens", "32768", "--num-threads", "1", *flags]
        if "--port" not in flags:
            given += ["--port", "0"]
        self.process = subprocess.Popen(
            command or [sys.executable, "-m", "radix_runtime.cli", "serve", *given],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment(self.runtime_dir),
        )
        self.family: list[psutil.Process] = []
        self.url = self._wait_ready() if wait else ""

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def wait_for(self, pattern: str, limit: float = START_LIMIT) -> re.Match[str]:
        deadline = time.monotonic() + limit
        while not (match := re.search(pattern, self.log())):
            assert self.process.poll() is None, f"exit {self.process.returncode}\n{self.log()}"
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        return match

    def _wait_ready(self) -> str:
        url = self.wait_for(r"ready: (http://\S+)")[1]
        self.note_family()
        return url

    def note_family(self) -> None:
        me = psutil.Process(self.process.pid)
        self.family = [me, *me.children(recursive=True)]

    def find(self, role: str) -> psutil.Process:
        """`supervisor`, or the first process whose title or command line names `role`."""
        if role == "supervisor":
            return self.family[0]
        return next(p for p in self.family if role in " ".join(p.cmdline()))

    def wait_exit(self, limit: float) -> int:
        return self.process.wait(limit)

    def assert_nothing_left(self, limit: float = 20.0) -> None:
        deadline = time.monotonic() + limit
        while left := self._left():
            assert time.monotonic() < deadline, f"{left}\n{self.log()}"
            time.sleep(0.05)

    def _left(self) -> list[str]:
        alive = [
            f"process {p.pid}"
            for p in self.family
            if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
        ]
        shm = [n for n in set(os.listdir("/dev/shm")) - self._shm if "radix" in n]
        return alive + os.listdir(self.runtime_dir) + shm

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                for process in self.family or [psutil.Process(self.process.pid)]:
                    if process.is_running():
                        process.kill()
                self.process.wait()
        os.unlink(self._log.name)
        if not os.listdir(self.runtime_dir):
            os.rmdir(self.runtime_dir)


class Call(threading.Thread):
    """One long chat request; after `join`: `status`, `code` (of the error), `done` ([DONE] came),
    `broken` (the connection was cut), `ended` (time)."""

    def __init__(self, url: str, stream: bool, tokens: int = 1800, prompt: str = PROMPT) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        self.stream = stream
        self.status = 0
        self.chunks = 0
        self.code: str | None = None
        self.done = False
        self.broken = False
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        url = f"{self._url}/v1/chat/completions"
        try:
            # Nothing is encrypted here: reading the system's certificates would take 40 ms of CPU.
            with httpx.stream("POST", url, json=self._body, timeout=120, verify=False) as answer:
                self.status = answer.status_code
                if self.stream and self.status == 200:
                    for line in answer.iter_lines():
                        self._line(line)
                else:
                    body = json.loads(answer.read())
                    self.code = body.get("error", {}).get("code")
        except httpx.HTTPError:
            self.broken = True
        self.ended = time.monotonic()

    def _line(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            chunk = json.loads(line[6:])
            self.chunks += 1
            if "error" in chunk:
                self.code = chunk["error"]["code"]


def start_load(server: Server, streams: int = 3, others: int = 3) -> list[Call]:
    """Returns when every stream has begun and the engine runs them all. What ends before that, as
    on a fast machine, is called again."""
    calls = [Call(server.url, i < streams) for i in range(streams + others)]
    deadline = time.monotonic() + 60
    while any(c.stream and c.chunks < 3 for c in calls) or running(server) < len(calls):
        assert time.monotonic() < deadline, server.log()
        for number, call in enumerate(calls):
            if call.ended:
                assert not call.broken and not call.code, server.log()
                calls[number] = Call(server.url, call.stream)
        time.sleep(0.01)
    return calls


def running(server: Server) -> int:
    info = httpx.get(f"{server.url}/get_server_info", timeout=30).json()
    return int(info["internal_states"][0]["num_running_reqs"])


def join(calls: list[Call], since: float) -> float:
    """Waits for all; seconds from `since` to the end of the last."""
    for call in calls:
        call.join(60)
        assert not call.is_alive(), "a client hangs"
    return max(call.ended for call in calls) - since
