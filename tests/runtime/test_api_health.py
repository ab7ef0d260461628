"""Health and readiness, and the end of the engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import pytest

from radix_runtime.errors import RequestError
from radix_runtime.messages import Abort, Generate
from radix_runtime.server import admin
from tests.runtime.api_stack import LONG, MODEL, Stack, in_background
from tests.runtime.bad_requests import CHAT, good_request


def test_engine_death(slow: Stack) -> None:
    url = f"{slow.url}/v1/completions"
    dead = RequestError(status=500, code="engine_dead", message="the engine has died")
    thread, whole = in_background(lambda: httpx.post(url, json=LONG, timeout=20))
    slow.wait(lambda: len(slow.manager._open) == 1)
    lines: list[str] = []
    with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=20) as streamed:
        for line in filter(None, streamed.iter_lines()):
            lines.append(line)
            slow.on_loop(lambda: slow.manager.fail_all(dead))
    thread.join(60)
    assert json.loads(lines[-1][6:])["error"]["code"] == "engine_dead"
    assert "data: [DONE]" not in lines
    assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (500, "engine_dead")
    assert httpx.post(url, json=LONG).json()["error"]["code"] == "engine_dead"
    for probe in ("/health", "/ready", "/health_generate"):
        assert httpx.get(slow.url + probe).status_code == 503
    assert len(slow.manager._open) == 0 and slow.manager.counts.failed == 2
    slow.send(Abort(""))


def test_health_follows_the_heartbeat(stack: Stack, client: httpx.Client) -> None:
    assert client.get("/health").content == b""
    stack.dead_reason = "no heartbeat"
    try:
        for probe in ("/health", "/ping", "/ready", "/health_generate"):
            response = client.get(probe)
            assert response.status_code == 503 and "heartbeat" not in response.text
    finally:
        stack.dead_reason = None
    assert client.get("/ready").status_code == client.head("/health").status_code == 200


def test_health_generate_is_shared(slow: Stack) -> None:
    slow.running.clear()
    probes = [socket.create_connection(("127.0.0.1", slow.port), timeout=20) for _ in range(5)]
    for probe in probes:
        probe.sendall(
            b"GET /health_generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
    slow.wait(lambda: len(slow.sent_of(Generate)) == 1)
    assert httpx.get(f"{slow.url}/health").status_code == 200  # the loop has seen all of them
    slow.running.set()
    for probe in probes:
        assert probe.recv(1000).startswith(b"HTTP/1.1 200")
        probe.close()
    assert len(slow.sent_of(Generate)) == 1
    assert httpx.get(f"{slow.url}/health_generate").status_code == 200
    assert len(slow.sent_of(Generate)) == 2


def test_all_who_share_a_probe_that_fails_are_told_so(
    slow: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "_PROBE_TIMEOUT", 0.5)
    slow.running.clear()
    threads = [
        in_background(lambda: httpx.get(f"{slow.url}/health_generate", timeout=20))
        for _ in range(4)
    ]
    for thread, result in threads:
        thread.join(20)
        assert (result[0].status_code, result[0].json()["error"]["code"]) == (503, "unhealthy")
    slow.running.set()
    assert len(slow.sent_of(Generate)) == 1
    assert httpx.get(f"{slow.url}/health_generate", timeout=20).status_code == 200


def test_not_ready_while_loading() -> None:
    with Stack(ready=False, delay=0.02) as stack, httpx.Client(base_url=stack.url) as client:
        assert client.get("/health").status_code == 200
        for response in (client.get("/ready"), client.post(CHAT, json=good_request(MODEL))):
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json()["error"]["code"] == "not_ready"
            assert response.json()["error"]["type"] == "overloaded_error"
        assert client.get("/metrics").status_code == 200
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
        stack.on_loop(lambda: stack.manager.set_ready({"max_total_num_tokens": 256}))
        thread, result = in_background(
            lambda: httpx.post(stack.url + CHAT, json={**good_request(MODEL), "max_tokens": 20})
        )
        stack.wait(lambda: len(stack.manager._open) == 1)
        thread.join(60)
        assert result[0].status_code == 200
        stack.check_idle()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
def test_an_end_does_not_wait_for_texts_that_are_still_read(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template or a tokenizer that is at work has no say in how long clients wait."""
    dead = RequestError(status=500, code="engine_dead", message="the engine has died")
    with Stack() as stack:
        reached = threading.Event()

        async def never(*_: object, **__: object) -> None:
            reached.set()
            await asyncio.sleep(60)

        monkeypatch.setattr(stack.manager.text, "encode", never)
        monkeypatch.setattr(stack.manager.text, "encode_chat", never)
        body = good_request(MODEL) if path == CHAT else {"prompt": "a"}
        if path == "/generate":
            body = {"text": "a"}
        thread, answer = in_background(lambda: httpx.post(stack.url + path, json=body, timeout=20))
        assert reached.wait(10)
        stack.on_loop(lambda: stack.manager.fail_all(dead))
        thread.join(5)
        assert (answer[0].status_code, answer[0].json()["error"]["code"]) == (500, "engine_dead")
        assert not stack.manager.unsubmitted
