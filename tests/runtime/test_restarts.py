"""A process that may die does so, in the real server: it is started again, the rest serves on."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import httpx
import psutil
import pytest

from radix_runtime.processes.restarts import MAX_DEATHS
from tests.runtime.server_process import Server

pytestmark = pytest.mark.serial  # a toy that is silent for three seconds is killed

TOY_SERVER = (sys.executable, "-m", "tests.runtime.toy_roles")


def toy(server: Server) -> psutil.Process:
    """The living process of the role `toy`."""
    server.note_family()
    return server.find("radix: toy")


def answers(server: Server) -> list[tuple[int, int]]:
    """Every answer so far: the number of its question, and the process that gave it."""
    found = re.findall(r"answer (\d+) of pid (\d+)", server.log())
    return [(int(number), int(pid)) for number, pid in found]


def wait_for_answers(server: Server, pid: int) -> None:
    server.wait_for(rf"answer \d+ of pid {pid}\n", limit=60)


def serves(server: Server) -> bool:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        body = {"prompt": "Say hello.", "max_tokens": 4, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
        return answer.status_code == 200 and client.get("/health").status_code == 200


def test_a_process_that_dies_is_started_again_and_nothing_is_lost() -> None:
    with Server(command=TOY_SERVER) as server:
        first = toy(server)
        wait_for_answers(server, first.pid)
        first.kill()
        server.wait_for("toy/0 is down, gone: False", limit=60)
        server.wait_for("toy/0 is up, generation 1", limit=60)
        second = toy(server)
        assert second.pid != first.pid
        wait_for_answers(server, second.pid)
        assert "the toy process was killed by SIGKILL; it is started again" in server.log()
        assert serves(server)

        numbers = [number for number, _ in answers(server)]
        assert len(set(numbers)) == len(numbers)
        assert set(range(max(numbers))) - set(numbers) == set(), "each question has its answer"
        givers = [pid for _, pid in answers(server)]
        assert givers == sorted(givers, key=[first.pid, second.pid].index)

        server.process.terminate()
        assert server.wait_exit(30) == 0
        server.assert_nothing_left()


def test_a_process_that_dies_too_often_is_given_up_and_the_rest_serves_on() -> None:
    with Server(command=TOY_SERVER) as server:
        for generation in range(MAX_DEATHS):
            victim = toy(server)
            wait_for_answers(server, victim.pid)
            victim.kill()
            if generation + 1 < MAX_DEATHS:
                server.wait_for(f"toy/0 is up, generation {generation + 1}", limit=60)
        server.wait_for("toy/0 is down, gone: True", limit=60)
        assert "5 deaths within 60 s it is not started again" in server.log()
        time.sleep(1.5)
        server.note_family()
        assert not any("radix: toy" in " ".join(p.cmdline()) for p in server.family)
        assert server.process.poll() is None and serves(server)
        server.process.terminate()
        assert server.wait_exit(30) == 0
        server.assert_nothing_left()


def test_a_restartable_process_that_hangs_is_killed() -> None:
    with Server(command=TOY_SERVER) as server:  # --step-timeout 3
        victim = toy(server)
        wait_for_answers(server, victim.pid)
        victim.suspend()
        server.wait_for("the toy process has been silent for 3 s and is killed", limit=60)
        server.wait_for("toy/0 is up, generation 1", limit=60)
        assert serves(server)
        server.process.terminate()
        assert server.wait_exit(30) == 0
        server.assert_nothing_left()


def test_the_end_of_any_other_process_is_the_end() -> None:
    with Server(command=TOY_SERVER) as server:
        os.kill(server.find("radix: asker").pid, signal.SIGKILL)
        assert server.wait_exit(30) == 70
        assert "the asker process was killed by SIGKILL" in server.log()
        server.assert_nothing_left()
