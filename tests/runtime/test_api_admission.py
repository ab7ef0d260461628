"""Calls that do not fit the queue, or take too long."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from radix_runtime.messages import Generate
from tests.runtime.api_stack import LONG, Stack, in_background


@pytest.mark.parametrize("stream", [True, False])
def test_queue_full(stream: bool) -> None:
    """A call is taken or refused as a whole. Also a stream is refused with a status: nothing was
    sent before."""
    with Stack(delay=0.01, max_queued_requests=1) as stack:
        url = f"{stack.url}/v1/completions"
        body = {**LONG, "max_tokens": 20, "stream": stream}
        stack.running.clear()
        fits = {**body, "prompt": ["a"] * 9}
        thread, taken = in_background(lambda: httpx.post(url, json=fits, timeout=20))
        stack.wait(lambda: len(stack.sent_of(Generate)) == 9)
        late = {**body, "prompt": ["a"] * 3}
        other, refused = in_background(lambda: httpx.post(url, json=late, timeout=20))
        other.join(20)
        assert len(stack.sent_of(Generate)) == 9  # refused before the scheduler
        stack.running.set()
        thread.join(20)
        assert taken[0].status_code == 200 and "overloaded" not in taken[0].text
        assert refused[0].status_code == 503
        assert refused[0].json()["error"]["code"] == "engine_overloaded"
        assert int(refused[0].headers["retry-after"]) >= 1
        stack.check_idle()
        assert httpx.post(url, json={"prompt": "a"}, timeout=20).status_code == 200
        stack.check_idle()


@pytest.mark.parametrize(
    "size", [{"prompt": ["a"] * 10}, {"prompt": ["a"] * 5, "n": 2}, {"prompt": "a", "n": 10}]
)
def test_a_call_that_never_fits_is_not_told_to_come_again(size: dict[str, Any]) -> None:
    with Stack(max_queued_requests=1) as stack:
        refused = httpx.post(
            f"{stack.url}/v1/completions", json={**size, "max_tokens": 2}, timeout=20
        )
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "invalid_value")
        assert "10" in error["message"] and "9" in error["message"]
        assert "retry-after" not in refused.headers
        stack.check_idle()


def test_deadline(slow: Stack) -> None:
    slow.args.request_timeout = 0.3
    answer = httpx.post(f"{slow.url}/v1/completions", json=LONG, timeout=20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
