"""A sample of `make torture`'s fuzz, with the time of the event loop measured; and `bench overload`
against a server that is overloaded."""

from __future__ import annotations

import argparse
import random

import httpx

from radix_runtime.cli import bench_overload
from tests.runtime.api_stack import Stack
from tests.runtime.loop_monitor import LoopHeld
from tests.torture.fuzz import random_request

REQUESTS = 250
JSON = {"content-type": "application/json"}


def test_random_requests_get_no_5xx_and_do_not_hold_the_loop() -> None:
    rng = random.Random()
    held = 0
    with Stack(monitored=True, pages=256) as stack, httpx.Client(timeout=60) as client:
        for _ in range(REQUESTS):
            stack.on_loop(stack.monitor.reset)
            path, content = random_request(rng)
            answer = client.post(stack.url + path, content=content, headers=JSON)
            assert answer.status_code < 500, (path, content[:500], answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()) == {"error"}
            try:
                stack.monitor.check()
            except LoopHeld as error:
                held += 1  # a busy machine's clock counts interrupts now and then
                assert held < 5, (path, content[:500], str(error))
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
    assert result["failed"] == 0 and result["errors"] == []
    assert result["peak"]["served"] > 0 and result["overload"]["served"] > 0
    assert result["overload"]["refused"] > 0
    assert result["goodput_over_peak"] > 0 and result["recovery_s"] < 20
    assert result["overload"]["p99_health_ms"] > 0
