"""A sample of `make torture`'s fuzz, with the time of the event loop measured; and `bench overload`
against a server that is overloaded."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable

import httpx
import pytest

from radix_runtime.cli import bench_overload
from tests.runtime.api_stack import Stack
from tests.runtime.loop_monitor import LIMIT
from tests.torture.fuzz import answer_to_bytes, random_bytes, random_request

FULL = bool(os.environ.get("RADIX_TEST_FULL"))
REQUESTS = 20_000 if FULL else 250
TRIES = 3  # on a busy machine the clock of a thread also counts interrupts
JSON = {"content-type": "application/json"}


def send(stack: Stack, client: httpx.Client, rng: random.Random) -> Callable[[], int]:
    """What sends a random request, as often as it is called, and gives its status: 0 for none."""
    if rng.random() < 0.1:
        data = random_bytes(rng)

        def send_bytes() -> int:
            answer = answer_to_bytes(stack.port, data)
            status = int(answer.split(b" ", 2)[1]) if answer else 0
            assert status < 500, (data, answer[:500])
            return status

        return send_bytes
    path, content = random_request(rng)

    def send_request() -> int:
        answer = client.post(stack.url + path, content=content, headers=JSON)
        assert answer.status_code < 500, (path, content[:500], answer.text)
        if answer.status_code >= 400:
            assert set(answer.json()) == {"error"}
        return answer.status_code

    return send_request


def hold_time(stack: Stack, request: Callable[[], int]) -> float:
    """The least time, of some tries, that a callback held the loop; seconds of its CPU."""
    worst = []
    for _ in range(TRIES):
        stack.on_loop(stack.monitor.reset)
        request()
        worst.append(stack.monitor.worst.cpu)
        if worst[-1] < LIMIT:
            break
    return min(worst)


@pytest.mark.timeout(7200 if FULL else 300)
def test_random_requests_get_no_5xx_and_do_not_hold_the_loop() -> None:
    seed = random.randrange(1 << 32) if FULL else 17
    print(f"seed {seed}")
    rng = random.Random(seed)
    with Stack(monitored=True, pages=256) as stack, httpx.Client(timeout=120) as client:
        for number in range(REQUESTS):
            request = send(stack, client, rng)
            held = hold_time(stack, request)
            assert held < LIMIT, (seed, number, stack.monitor.report())
        stack.check_idle()


def test_bench_overload() -> None:
    with Stack(delay=0.01, max_queued_requests=4, pages=256) as stack:
        flags = argparse.Namespace(
            url=stack.url,
            api_key=None,
            factor=10.0,
            seconds=1.5,
            concurrency=8,
            prompt_tokens=8,
            answer_tokens=4,
        )
        result = bench_overload.measure(flags)
        stack.check_idle()
    assert result["errors"] == [] and result["failed"] == 0
    assert result["peak"]["served"] > 0 and result["overload"]["served"] > 0
    assert result["overload"]["refused"] > 0
    assert result["goodput_over_peak"] > 0 and result["recovery_s"] < 20
    assert result["overload"]["p99_health_ms"] > 0
