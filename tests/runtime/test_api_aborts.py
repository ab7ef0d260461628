"""Clients that go away or abort: what they had running ends, and nothing else."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import pytest

from radix_runtime.messages import Abort
from radix_runtime.server import listener
from radix_runtime.server.metrics import RequestCounts
from tests.runtime.api_stack import LONG, Stack, events, in_background


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_is_aborted(slow: Stack, stream: bool, n: int) -> None:
    body = json.dumps({**LONG, "stream": stream, "n": n}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        if stream:
            assert b"200 OK" in connection.recv(4096)
        slow.wait(lambda: len(slow.manager._open) == 1)
    slow.wait(lambda: len(slow.manager._open) == 0 and slow.scheduler.is_idle)
    assert len(slow.sent_of(Abort)) == 1 and slow.manager.counts.aborted == 1
    assert len(slow.engine.steps) < 150


def test_a_client_that_reads_nothing_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "WRITE_STALL", 0.5)
    scores = {"return_logprob": True, "top_logprobs_num": 20, "return_text_in_logprobs": True}
    sampling = {"max_new_tokens": 200, "ignore_eos": True, "n": 16}
    data = json.dumps(
        {"text": "abc", "stream": True, **scores, "sampling_params": sampling}
    ).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(data)
    with Stack(pages=1024, delay=0.05) as stack, socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", stack.port))
        silent.sendall(head + data)
        stack.wait(lambda: stack.manager.counts.accepted == 1)
        stack.wait(lambda: 'status="499"' in httpx.get(f"{stack.url}/metrics").text)
        assert stack.manager.counts == RequestCounts(accepted=1, aborted=1)
        assert len(stack.sent_of(Abort)) == 1
        stack.check_idle()


def test_abort_request(slow: Stack) -> None:
    # Without `ignore_eos` one random answer in a hundred ends before it is aborted.
    sampling = {"max_new_tokens": 200, "ignore_eos": True}
    body = {"text": "abc", "rid": "mine", "sampling_params": sampling}
    thread, result = in_background(
        lambda: httpx.post(f"{slow.url}/generate", json=body, timeout=20)
    )
    slow.wait(lambda: len(slow.manager._open) == 1 and len(slow.engine.steps) > 0)
    slow.running.clear()  # nor does a busy machine let it run to its end
    for count in (1, 0):
        answer = httpx.post(f"{slow.url}/abort_request", json={"rid": "mine"})
        assert answer.status_code == 200
        if count:
            assert answer.json() == {"aborting": 1}
            slow.running.set()
            thread.join(60)
    meta = result[0].json()["meta_info"]
    assert result[0].status_code == 200 and meta["finish_reason"]["type"] == "abort"
    assert httpx.post(f"{slow.url}/abort_request", json={"rid": "never"}).json() == {"aborting": 0}
    assert slow.manager.counts.aborted == 1


@pytest.mark.parametrize("rid", ["early", "other"])
def test_an_abort_reaches_a_call_whose_text_is_being_read(
    rid: str, slow: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = slow.manager.tokenizer.encode
    reading = threading.Event()
    go_on = threading.Event()

    def slowly(text: str, special_tokens: bool = True) -> list[int]:
        reading.set()
        assert go_on.wait(10)
        return encode(text, special_tokens)

    monkeypatch.setattr(slow.manager.tokenizer, "encode", slowly)
    body = {
        "text": "abc",
        "rid": "early",
        "sampling_params": {"max_new_tokens": 20, "ignore_eos": True},
    }
    thread, answer = in_background(
        lambda: httpx.post(f"{slow.url}/generate", json=body, timeout=20).json()
    )
    assert reading.wait(10)
    assert httpx.post(f"{slow.url}/abort_request", json={"rid": rid}).json() == {"aborting": 0}
    go_on.set()
    thread.join(60)
    ended = "abort" if rid == "early" else "length"
    assert answer[0]["meta_info"]["finish_reason"]["type"] == ended
    # A later call may bear the name again.
    again = httpx.post(f"{slow.url}/generate", json=body, timeout=20).json()
    assert again["meta_info"]["finish_reason"]["type"] == "length"


def test_abort_all_and_abort_of_a_call(slow: Stack) -> None:
    url = f"{slow.url}/v1/completions"
    thread, result = in_background(lambda: httpx.post(
        url, json={**LONG, "prompt": ["a", "b"], "rid": "call"}, timeout=20))  # fmt: skip
    other, kept = in_background(lambda: httpx.post(url, json=LONG, timeout=20))
    slow.wait(lambda: len(slow.manager._open) == 3)
    assert httpx.post(f"{slow.url}/abort_request", json={"rid": "call"}).json() == {"aborting": 2}
    thread.join(60)
    assert [c["finish_reason"] for c in result[0].json()["choices"]] == ["abort", "abort"]
    assert len(slow.manager._open) == 1
    httpx.post(f"{slow.url}/abort_request", json={"abort_all": True})
    other.join(60)
    assert kept[0].json()["choices"][0]["finish_reason"] == "abort"


def test_a_client_that_takes_a_name_again_gets_its_own_text(slow: Stack) -> None:
    url = f"{slow.url}/v1/completions"
    first = {**LONG, "prompt": "abc", "rid": "job-1", "stream": True, "seed": 1}
    own = {
        "prompt": "xyz",
        "max_tokens": 12,
        "ignore_eos": True,
        "rid": "job-1",
        "stream": True,
        "seed": 2,
    }
    alone = httpx.post(url, json={**own, "rid": None}, timeout=20).text
    with httpx.stream("POST", url, json=first, timeout=20) as answer:
        next(answer.iter_lines())
        slow.running.clear()
    slow.wait(lambda: len(slow.sent_of(Abort)) == 1)
    thread, result = in_background(lambda: httpx.post(url, json=own, timeout=20))
    slow.wait(lambda: len(slow.manager._open) == 1)
    slow.running.set()  # the answer to the abort comes after the second request
    thread.join(20)

    def text(answer: str) -> list[tuple[str, str | None]]:
        choices = [choice for event in events(answer) for choice in event["choices"]]
        return [(choice["text"], choice["finish_reason"]) for choice in choices]

    assert text(result[0].text) == text(alone)
    aborted = httpx.post(f"{slow.url}/abort_request", json={"rid": "job-1"}, timeout=20)
    assert aborted.json() == {"aborting": 0}
