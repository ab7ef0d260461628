"""A server that has nothing to do leaves the machine alone, its kernel threads too."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.runtime.server_process import Server

pytestmark = pytest.mark.serial  # CPU time

SECONDS = 4.0
LIMIT = 0.02  # of a core; about 0.0025 is usual
TRIES = 3  # on a busy machine the last work of the start comes late


def test_an_idle_server_takes_next_to_no_cpu():
    with Server("--num-threads", "2") as server:
        body = {"prompt": "Say hello.", "max_tokens": 16}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        time.sleep(1.0)  # the check of the idle state, the last wake-ups
        server.note_family()
        shares: list[float] = []
        while len(shares) < TRIES and min(shares, default=1.0) >= LIMIT:
            before = _cpu_seconds(server)
            time.sleep(SECONDS)
            shares.append((_cpu_seconds(server) - before) / SECONDS)
        assert min(shares) < LIMIT, shares


def _cpu_seconds(server: Server) -> float:
    times = [process.cpu_times() for process in server.family]
    return sum(t.user + t.system for t in times)
