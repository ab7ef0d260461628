"""No request holds the event loop: the time of its callbacks beside requests made to hold it."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from radix_runtime.messages import Generate, unpack_ids
from radix_runtime.server import body_decoder
from tests.runtime.api_stack import MODEL, VOCAB, Stack
from tests.runtime.bad_requests import CHAT, good_request
from tests.runtime.loop_monitor import LoopHeld
from tests.runtime.test_json_scan import DEEP_AND_MALFORMED

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    with Stack(monitored=True, pages=256) as stack:
        for _ in range(2):  # what only the first request costs is no request's fault
            httpx.post(stack.url + CHAT, json=good_request(MODEL)).raise_for_status()
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    shared.on_loop(shared.monitor.reset)
    yield shared
    shared.check_idle()


def held_every_time(test: Callable[..., None]) -> Callable[..., None]:
    """A test that fails if the loop was held in each of three runs: on a busy machine the clock of
    a thread also counts interrupts, now and then 10 ms in a callback that does nothing."""

    @functools.wraps(test)
    def run(stack: Stack, **fixtures: Any) -> None:
        for left in (2, 1, 0):
            try:
                return test(stack, **fixtures)
            except LoopHeld:
                if left == 0:
                    raise
                stack.on_loop(stack.monitor.reset)

    return run


def post(stack: Stack, path: str, body: bytes) -> httpx.Response:
    return httpx.post(stack.url + path, content=body, headers=JSON, timeout=60)


@held_every_time
def test_a_malformed_body_does_not_hold_the_loop(stack: Stack) -> None:
    for _ in range(5):
        response = post(stack, CHAT, DEEP_AND_MALFORMED)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    stack.monitor.check()


@held_every_time
def test_a_long_number_is_refused_and_not_repeated(stack: Stack) -> None:
    body = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":' + b"9" * 400 + b"}"
    response = post(stack, CHAT, body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    assert len(response.content) < 200
    stack.monitor.check()


EIGHT_MB = 8_000_000
COMPLETIONS = "/v1/completions"


def large(**fields: Any) -> bytes:
    """A body that is too large for the event loop."""
    return json.dumps(fields).encode() + b" " * 300_000


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"prompt":[' + b"[5]," * (EIGHT_MB // 4) + b"[5]]}", "invalid_json"),
        (b'{"prompt":"x","user":[' + b"{}," * (EIGHT_MB // 3) + b"{}]}", "invalid_json"),
        (b'{"prompt":[' + b"5," * (EIGHT_MB // 2) + b"5]}", "context_length_exceeded"),
        (b'{"prompt":[' + b'"a",' * (EIGHT_MB // 4) + b'"a"]}', "invalid_value"),
        (
            b'{"prompt":"' + b'if (a[i] == \\"{\\") {\\n' * 300_000 + b'"}',
            "context_length_exceeded",
        ),
        (b'{"prompt":"x","stop_token_ids":[' + b"5," * 2_000_000 + b"5]}", "invalid_value"),
        (b'{"prompt":"x","logit_bias":{"1":' + b"9" * 400 + b"}}", "invalid_json"),
        (b'{"prompt":[' + b"5," * 200_000 + b"99999999999999999999]}", "invalid_token_id"),
        (b'{"prompt":"x"' + b"," * EIGHT_MB + b"}", "invalid_json"),
        (b'{"prompt":[' + b"[5]," * 19_000 + b"[5]]}", "invalid_value"),
    ],
    ids=[
        "lists",
        "objects",
        "ids",
        "texts",
        "source code",
        "stop ids",
        "number",
        "id",
        "commas",
        "prompts",
    ],
)
@held_every_time
def test_a_large_body_does_not_hold_the_loop(stack: Stack, body: bytes, code: str) -> None:
    response = post(stack, COMPLETIONS, body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)
    assert len(response.content) < 1000
    stack.monitor.check()


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/nothing"], ids=["read", "dropped"])
@held_every_time
def test_many_chunks_of_a_byte_do_not_hold_the_loop(stack: Stack, path: str) -> None:
    """Whole reads of them are parsed in one callback."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    head += "content-type: application/json\r\nconnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", stack.port), timeout=60) as client:
        client.sendall(head.encode() + b"1\r\n \r\n" * 500_000 + b"0\r\n\r\n")
        answer = b""
        while more := client.recv(1 << 16):
            answer += more
    code = b"invalid_json" if path == COMPLETIONS else b"not_found"
    assert code in answer
    stack.monitor.check()


@held_every_time
def test_a_large_body_means_what_a_small_one_does(stack: Stack) -> None:
    """All kinds of prompts, decoded in the process of large bodies and here."""
    options = {"max_tokens": 2, "ignore_eos": True, "temperature": 0, "logit_bias": {"7": 1.5}}
    options |= {"stop": ["zzz"], "seed": 1}
    for prompt in ("a b", ["a b", "c"], [5, 6, 7], [[5, 6], [7]]):
        answers = []
        for body in (
            json.dumps({"prompt": prompt, **options}).encode(),
            large(prompt=prompt, **options),
        ):
            response = post(stack, COMPLETIONS, body)
            assert response.status_code == 200, response.text
            answers.append([choice["text"] for choice in response.json()["choices"]])
        assert answers[0] == answers[1]
        count = len(answers[0])
        sent = stack.sent_of(Generate)[-2 * count :]
        for small, big in zip(sent[:count], sent[count:], strict=True):
            assert unpack_ids(small.input_ids).tolist() == unpack_ids(big.input_ids).tolist()
            assert small.sampling == big.sampling
    stack.monitor.check()


@held_every_time
def test_large_bodies_of_other_routes(stack: Stack) -> None:
    chat = post(stack, CHAT, large(**good_request(MODEL)))
    assert chat.status_code == 200 and "warnings" not in chat.json()
    ids = [[5] * 40, [6] * 40] * 128
    body = json.dumps({"tokens": ids, "skip_special_tokens": False}).encode()
    texts = post(stack, "/detokenize", body + b" " * 300_000).json()["text"]
    one = post(stack, "/detokenize", json.dumps({"tokens": ids[0]}).encode() + b" " * 300_000)
    assert texts[::2] == [one.json()["text"]] * 128
    counts = post(stack, "/tokenize", json.dumps({"prompt": texts}).encode() + b" " * 300_000)
    assert len(counts.json()["count"]) == 256
    for given, listed in (([5, 6], False), ([[5, 6]], True)):
        body = json.dumps({"input_ids": given, "sampling_params": {"max_new_tokens": 1}}).encode()
        answer = post(stack, "/generate", body + b" " * 300_000).json()
        assert isinstance(answer, list) == listed
    error = post(stack, "/generate", large(text="x", frobnicate=1)).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", "frobnicate")
    stack.monitor.check()


def test_the_process_of_large_bodies_may_die(stack: Stack) -> None:
    body = large(prompt=[5, 6], max_tokens=1)
    assert post(stack, COMPLETIONS, body).status_code == 200
    process = stack.app.state.bodies.helper.process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    error = post(stack, COMPLETIONS, body)
    assert (error.status_code, error.json()["error"]["code"]) == (500, "internal_error")
    assert post(stack, COMPLETIONS, body).status_code == 200


def test_a_body_that_is_not_decoded_in_time_is_a_503(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine whose cores are all busy."""
    body = large(prompt=[5, 6], max_tokens=1)
    assert post(stack, COMPLETIONS, body).status_code == 200
    os.kill(stack.app.state.bodies.helper.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(body_decoder, "_SECONDS", 0.5)
    late = post(stack, COMPLETIONS, body)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_overloaded")
    assert int(late.headers["retry-after"]) > 0
    monkeypatch.undo()
    assert post(stack, COMPLETIONS, body).status_code == 200


@held_every_time
def test_what_fits_is_served_whatever_its_text_contains(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets within a string are no structure, though they be millions."""
    monkeypatch.setattr(stack.manager.limits, "context_length", 8 << 20)
    monkeypatch.setattr(stack.manager.limits, "max_total_tokens", None)
    code = 'if (a[i] == "{") { b[i] = "\\\\"; }\n' * 60_000
    answer = post(stack, "/tokenize", json.dumps({"prompt": code}).encode()).json()
    texts = post(stack, "/detokenize", json.dumps({"tokens": answer["tokens"]}).encode()).json()
    assert texts["text"] == code
    stack.monitor.check()


def test_the_process_of_large_bodies_ends_with_its_parent(stack: Stack) -> None:
    """It has nothing else to wait for: its standard input ends."""
    assert post(stack, COMPLETIONS, large(prompt=[5, 6], max_tokens=1)).status_code == 200
    helper = stack.app.state.bodies.helper
    process = helper.process
    helper.process = None  # the next large body starts another
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()


# Answers ----------------------------------------------------------------------------------

SCORED = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}


@held_every_time
def test_an_answer_of_many_logprobs_does_not_hold_the_loop(stack: Stack) -> None:
    """1,600 tokens with 20 others each: 2.5 MB, which took 0.2 s in one piece."""
    call = {**good_request(MODEL), **SCORED, "n": 8, "logprobs": True, "top_logprobs": 20}
    for stream in (False, True):
        response = post(stack, CHAT, json.dumps({**call, "stream": stream}).encode())
        assert response.status_code == 200
        if not stream:
            choices = response.json()["choices"]
            assert len(response.content) > 2_000_000
            counts = [len(choice["logprobs"]["content"]) for choice in choices]
            assert counts == [200] * 8
    stack.monitor.check()


@held_every_time
def test_a_long_list_of_ids_does_not_hold_the_loop(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack.manager.limits, "context_length", 1 << 20)
    monkeypatch.setattr(stack.manager.limits, "max_total_tokens", None)
    text = "7 a " * 400_000
    for prompt, listed in ((text, False), ([text, "b"], True)):
        response = post(stack, "/tokenize", json.dumps({"prompt": prompt}).encode())
        answer = response.json()
        counts = answer["count"] if listed else [answer["count"]]
        lists = answer["tokens"] if listed else [answer["tokens"]]
        assert [len(ids) for ids in lists] == counts and counts[0] >= 400_000
    stack.monitor.check()


@held_every_time
def test_prompt_logprobs_of_many_prompts_do_not_hold_the_loop(stack: Stack) -> None:
    call = {
        "input_ids": [[5 + i % 100] * 200 for i in range(60)],
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 20,
    }
    for stream in (False, True):
        response = post(stack, "/generate", json.dumps({**call, "stream": stream}).encode())
        assert response.status_code == 200 and len(response.content) > 5_000_000
        if not stream:
            for answer in response.json():
                assert len(answer["meta_info"]["input_top_logprobs"]) == 200
    echo = {"prompt": call["input_ids"], "max_tokens": 1, "echo": True, "logprobs": 5}
    for stream in (False, True):
        response = post(stack, COMPLETIONS, json.dumps({**echo, "stream": stream}).encode())
        assert response.status_code == 200 and len(response.content) > 1_000_000
    ranked = {"prompt": call["input_ids"], "max_tokens": 1, "prompt_logprobs": 20}
    response = post(stack, COMPLETIONS, json.dumps(ranked).encode())
    assert response.status_code == 200 and len(response.content) > 5_000_000
    stack.monitor.check()


def test_the_bound_on_logprobs_is_of_a_call(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radix_runtime.server.logprob_bound.MAX_LOGPROBS", 8 * 21 * 100)
    before = len(stack.sent)
    call = {**good_request(MODEL), "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    too_much = json.dumps({**call, "n": 8, "max_tokens": 101}).encode()
    prompts = {
        "input_ids": [[5] * 200] * 5,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 20,
        "sampling_params": {"max_new_tokens": 1},
    }
    for path, body in ((CHAT, too_much), ("/generate", json.dumps(prompts).encode())):
        response = post(stack, path, body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "invalid_value"), error
        assert str(8 * 21 * 100) in error["message"] and "times fewer" in error["message"]
    assert len(stack.sent) == before
    fits = post(stack, CHAT, json.dumps({**call, "n": 8, "max_tokens": 100}).encode())
    assert fits.status_code == 200
    # Nobody asked for a length: it is what fits.
    del call["max_tokens"]
    clipped = post(stack, CHAT, json.dumps({**call, "n": 16}).encode())
    assert clipped.json()["usage"]["completion_tokens"] == 16 * 50


def test_a_large_answer_is_refused_before_its_ids_are_copied(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the process that decodes large bodies, with the words of this one."""
    most = 6 * 100
    monkeypatch.setattr("radix_runtime.server.logprob_bound.MAX_LOGPROBS", most)
    copied = 0

    def unpack(packed: bytes) -> Any:
        nonlocal copied
        copied += 1
        return unpack_ids(packed)

    monkeypatch.setattr(body_decoder, "unpack_ids", unpack)
    generate = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {**generate, "sampling_params": {"max_new_tokens": 1}}),
        (COMPLETIONS, {"echo": True, "logprobs": 5}),
        (COMPLETIONS, {"prompt_logprobs": 5}),
    ]
    for path, call in calls:
        name = "input_ids" if path == "/generate" else "prompt"
        short = [[5] * 20] * 2
        for prompts, code, count in (
            ([[5] * 60] * 2, "invalid_value", 0),
            ([[5] * 60, [5, VOCAB]], "invalid_token_id", 0),
            ([[5] * 60, [5] * 300], "context_length_exceeded", 0),
            (short, "", len(short)),
        ):
            data = json.dumps({name: prompts, **call}).encode()
            small = post(stack, path, data)
            copied = 0
            big = post(stack, path, data + b" " * 300_000)
            assert copied == count
            assert small.status_code == big.status_code == (400 if code else 200), big.text
            if code:
                assert small.json() == big.json()
                assert big.json()["error"]["code"] == code
