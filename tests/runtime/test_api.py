"""Routes beside OpenAI's, health, disconnects: a real server on the fake engine."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radix_runtime.errors import RequestError
from radix_runtime.messages import Abort, Generate, RequestFailed
from radix_runtime.server import admin, sglang_api, supervisor
from radix_runtime.server.http_call import to_json
from tests.runtime.api_stack import CONTEXT, MODEL, VOCAB, Stack
from tests.runtime.bad_requests import good_request

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=20) as client:
        yield client
    stack.check_idle()


def generate(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(text: str) -> list[Any]:
    frames = text.split("\n\n")
    assert frames.pop() == "" and frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


# /generate --------------------------------------------------------------------------------


def test_generate(client: httpx.Client) -> None:
    out = generate(client, text="abc", sampling_params={"max_new_tokens": 5, "seed": 2}, rid="r1")
    meta = out["meta_info"]
    assert set(out) == {"text", "output_ids", "meta_info"} and len(out["output_ids"]) == 5
    assert meta["id"] == "r1" and meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["completion_tokens"] == 5 and meta["cached_tokens"] == 0
    assert 0 < meta["e2e_latency"] < 20 and meta["weight_version"] == "default"
    again = client.put("/generate", json={
        "input_ids": client.post("/tokenize", json={"prompt": "abc"}).json()["tokens"],
        "sampling_params": {"max_new_tokens": 5, "sampling_seed": 2},
    }).json()  # fmt: skip
    assert again["output_ids"] == out["output_ids"]
    assert generate(client, text="abc")["meta_info"]["completion_tokens"] <= 128


def test_generate_nothing(client: httpx.Client) -> None:
    out = generate(client, text="abc", sampling_params={"max_new_tokens": 0})
    assert (out["text"], out["output_ids"]) == ("", [])
    assert out["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_generate_stream_is_cumulative(client: httpx.Client) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 20, "seed": 4}}
    whole = generate(client, **body)
    response = client.post("/generate", json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    seen = events(response.text)
    for before, after in itertools.pairwise(seen):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert seen[-1]["text"] == whole["text"] and seen[-1]["output_ids"] == whole["output_ids"]
    assert seen[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    pieces = events(client.post("/generate", json={
        **body, "stream": True, "incremental_streaming_output": True}).text)  # fmt: skip
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [token for piece in pieces for token in piece["output_ids"]] == whole["output_ids"]


def test_generate_batch(client: httpx.Client) -> None:
    params = [{"max_new_tokens": 3, "seed": 1}, {"max_new_tokens": 4, "seed": 2, "n": 2}]
    out = generate(client, text=["abc", "xyz"], sampling_params=params, rid=["p", "q"])
    assert [o["meta_info"]["id"] for o in out] == ["p", "q", "q"]
    assert [len(o["output_ids"]) for o in out] == [3, 4, 4]
    alone = generate(client, text="abc", sampling_params=params[0])
    assert alone["output_ids"] == out[0]["output_ids"]
    assert isinstance(generate(client, text=["abc"], sampling_params=params[0]), list)
    seen = events(client.post("/generate", json={
        "text": ["abc", "xyz"], "sampling_params": params, "stream": True}).text)  # fmt: skip
    last = {event["index"]: event["output_ids"] for event in seen}
    assert last == {i: o["output_ids"] for i, o in enumerate(out)}


def test_generate_logprobs(stack: Stack, client: httpx.Client) -> None:
    body = {
        "text": "hello there", "return_logprob": True, "logprob_start_len": 2,
        "top_logprobs_num": 2, "return_text_in_logprobs": True,
        "sampling_params": {"max_new_tokens": 3, "seed": 1},
    }  # fmt: skip
    out = generate(client, **body)
    ids, meta = stack.tokenizer.encode("hello there"), out["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == ids[2:]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == out["output_ids"]
    assert all(v <= 0 and isinstance(t, str) for v, _, t in meta["output_token_logprobs"])
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2, 2]
    assert len(meta["input_top_logprobs"]) == len(ids) - 2
    from_start = generate(client, **{**body, "logprob_start_len": 0})["meta_info"]
    assert from_start["input_token_logprobs"][0][0] is None
    assert from_start["input_top_logprobs"][0] is None
    plain = generate(client, **{**body, "logprob_start_len": -1, "top_logprobs_num": 0})
    assert plain["meta_info"]["input_token_logprobs"] == []
    assert "output_top_logprobs" not in plain["meta_info"]
    streamed = events(client.post("/generate", json={**body, "stream": True}).text)[-1]
    assert streamed["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"]


def test_every_choice_has_the_logprobs_of_the_prompt(client: httpx.Client) -> None:
    body = {
        "text": ["hello there", "abc"], "return_logprob": True, "logprob_start_len": 0,
        "sampling_params": {"n": 3, "max_new_tokens": 3, "seed": 1},
    }  # fmt: skip
    out = generate(client, **body)
    scores = [o["meta_info"]["input_token_logprobs"] for o in out]
    assert scores[0] == scores[1] == scores[2] != scores[3] == scores[4] == scores[5]
    assert all(len(s) == o["meta_info"]["prompt_tokens"] for s, o in zip(scores, out, strict=True))
    streamed = events(client.post("/generate", json={**body, "stream": True}).text)
    last = {event["index"]: event["meta_info"]["input_token_logprobs"] for event in streamed}
    assert [last[i] for i in range(6)] == scores
    body |= {"stream": True, "incremental_streaming_output": True}
    pieces = events(client.post("/generate", json=body).text)
    for i in range(6):  # in pieces, once
        assert [
            p for e in pieces if e["index"] == i for p in e["meta_info"]["input_token_logprobs"]
        ] == scores[i]


def test_a_stream_repeats_its_logprobs_without_encoding_them_again(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[Any] = []
    monkeypatch.setattr(sglang_api, "to_json", lambda entry: encoded.append(entry) or to_json(entry))
    body = {
        "text": "abc", "return_logprob": True, "top_logprobs_num": 2, "stream": True,
        "sampling_params": {"max_new_tokens": 240, "ignore_eos": True, "seed": 1},
    }  # fmt: skip
    seen = events(client.post("/generate", json=body).text)
    assert [e["meta_info"]["output_token_logprobs"] for e in seen] == [
        seen[-1]["meta_info"]["output_token_logprobs"][: len(e["output_ids"])] for e in seen
    ]
    # How many tokens an event has depends on how fast they come; a machine gave four events for 40
    # tokens.
    assert len(seen[-1]["meta_info"]["output_top_logprobs"]) == 240 and len(seen) > 3
    assert len(encoded) == 2 * 240


# Small routes -----------------------------------------------------------------------------


def test_tokenize_is_what_runs(stack: Stack, client: httpx.Client) -> None:
    body = good_request(MODEL)
    tokens = client.post("/tokenize", json={"messages": body["messages"]}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == CONTEXT
    usage = client.post(CHAT, json=body).json()["usage"]
    assert usage["prompt_tokens"] == tokens["count"]
    sent = stack.sent_of(Generate)[-1].input_ids
    assert [int.from_bytes(sent[i : i + 4], "little") for i in range(0, len(sent), 4)] == (
        tokens["tokens"]
    )
    listed = client.post("/v1/tokenize", json={"prompt": ["a b", "c"]}).json()
    assert listed["count"] == [len(t) for t in listed["tokens"]]
    text = client.post("/detokenize", json={"tokens": listed["tokens"]}).json()["text"]
    assert text == ["a b", "c"]
    one = client.post("/v1/detokenize", json={"tokens": [2], "skip_special_tokens": False})
    assert one.json() == {"text": "<|im_end|>"}


def test_request_id(client: httpx.Client) -> None:
    given = client.get("/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    odd = client.get("/health", headers={"x-request-id": "a b" * 100})
    assert odd.headers["x-request-id"] != "a b" * 100
    assert len(odd.headers.get_list("x-request-id")) == 1


def test_info_routes(client: httpx.Client) -> None:
    info = client.get("/get_model_info").json()
    assert info["max_model_len"] == CONTEXT and info["vocab_size"] == VOCAB
    assert info["served_model_name"] == MODEL and info["is_generation"] is True
    assert info == client.get("/model_info").json()
    server = client.get("/server_info").json()
    assert server["max_total_num_tokens"] == 256 and server["page_size"] == 4
    assert "page_size" not in server["defaulted"] and "tp_size" in server["defaulted"]
    assert "--page-size 4" in server["launch_command"]
    assert server["internal_states"][0]["num_running_reqs"] == 0
    assert client.get("/docs").status_code == client.get("/openapi.json").status_code == 404


def test_request_log_has_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with Stack(log_requests=True) as stack:
        body = {"prompt": "a secret text", "max_tokens": 2}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body)
        httpx.post(f"{stack.url}/v1/completions", json={**body, "secret_field": 1})
        httpx.get(f"{stack.url}/no%0Asuch")
        stack.check_idle()
    lines = [r.getMessage() for r in caplog.records if r.name.endswith("gate")]
    assert [line.split()[3] for line in lines] == ["200", "400", "404"]
    assert r"GET '/no\nsuch' 404" in lines[2]
    assert lines[0].startswith(answer.headers["x-request-id"])
    assert "secret" not in caplog.text


def test_docs_when_asked() -> None:
    with Stack(enable_docs=True) as stack:
        paths = httpx.get(f"{stack.url}/openapi.json").json()["paths"]
        assert "requestBody" in paths[CHAT]["post"] and "/v1/models/{model}" in paths
        assert httpx.get(f"{stack.url}/docs").status_code == 200


def test_metrics(stack: Stack, client: httpx.Client) -> None:
    def sample(name: str, **labels: str) -> float:
        text = client.get("/metrics").text
        for family in text_string_to_metric_families(text):
            for item in family.samples:
                if item.name == name and labels.items() <= item.labels.items():
                    return item.value
        raise AssertionError(f"{name} is not there")

    client.post("/flush_cache")
    names = ("prefill_tokens_total", "cached_tokens_total", "generation_tokens_total")
    before = [sample(f"radix:{name}") for name in names]
    first = sample("radix:time_to_first_token_seconds_count")
    for _ in range(2):
        client.post("/v1/completions", json={
            "prompt": [9] * 22, "max_tokens": 6, "ignore_eos": True})  # fmt: skip
    after = [sample(f"radix:{name}") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [22 + 2, 20, 12]
    assert sample("radix:time_to_first_token_seconds_count") == first + 2
    assert sample("radix:requests_total", outcome="ok") == stack.manager.counts.ok
    assert sample("radix:requests_accepted_total") == stack.manager.counts.accepted
    assert sample("radix:open_requests") == 0
    assert sample("radix:http_requests_total", route="/v1/completions", status="200") >= 2
    for i in range(5):  # no label grows with what clients send
        client.get(f"/nothing/{i}")
        client.get(f"/v1/models/{i}")
    assert "nothing" not in client.get("/metrics").text
    assert sample("radix:http_requests_total", route="/v1/models/{model:path}", status="404") >= 5
    assert sample("radix:http_requests_total", route="other", status="404") >= 5
    client.get("/generate")
    client.get("/health", headers={"x-long": "x" * 70_000})
    assert sample("radix:http_requests_total", route="other", status="405") >= 1
    assert sample("radix:http_requests_total", route="other", status="431") >= 1


def test_only_what_ended_well_is_timed(slow: Stack) -> None:
    def counted() -> float:
        (family,) = slow.manager.metrics.whole.collect()
        return next(sample.value for sample in family.samples if sample.name.endswith("_count"))

    def send(**body: object) -> int:
        fields = {"prompt": [5] * 8, "max_tokens": 2, "ignore_eos": True, **body}
        return httpx.post(f"{slow.url}/v1/completions", json=fields, timeout=20).status_code

    before = counted()
    assert send() == 200 and counted() == before + 1
    thread, answer = in_background(lambda: send(**LONG))
    slow.wait(lambda: len(slow.manager._open) == 1)
    slow.on_loop(
        lambda: slow.manager.handle(
            RequestFailed(next(iter(slow.manager._open)), 400, "invalid_value", "no")
        )
    )
    thread.join(10)
    assert answer == [400] and slow.manager.counts.refused == 1 and counted() == before + 1
    slow.send(Abort(""))


def test_flush_cache(client: httpx.Client) -> None:
    body = {"prompt": [7] * 18, "max_tokens": 1}
    cached = []
    for method in ("GET", "POST"):
        for _ in range(2):
            usage = client.post("/v1/completions", json=body).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert client.request(method, "/flush_cache").status_code == 200
    assert cached == [0, 16, 0, 16]


# With a slow engine -----------------------------------------------------------------------


@pytest.fixture
def slow() -> Iterator[Stack]:
    with Stack(delay=0.02, pages=256) as stack:
        yield stack
        stack.check_idle()


LONG = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}


def in_background(work: Any) -> tuple[threading.Thread, list[Any]]:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(work()), daemon=True)
    thread.start()
    return thread, result


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_is_aborted(slow: Stack, stream: bool, n: int) -> None:
    body = json.dumps({**LONG, "stream": stream, "n": n}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        if stream:
            assert b"200 OK" in connection.recv(4096)
        slow.wait(lambda: len(slow.manager._open) == 1)
    slow.wait(lambda: len(slow.manager._open) == 0 and slow.scheduler.is_idle)
    assert len(slow.sent_of(Abort)) == 1 and slow.manager.counts.aborted == 1
    assert len(slow.engine.steps) < 150


def test_a_client_that_reads_nothing_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WRITE_STALL", 0.5)
    scores = {"return_logprob": True, "top_logprobs_num": 20, "return_text_in_logprobs": True}
    sampling = {"max_new_tokens": 200, "ignore_eos": True, "n": 16}
    data = json.dumps(
        {"text": "abc", "stream": True, **scores, "sampling_params": sampling}
    ).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with Stack(pages=1024, delay=0.05) as stack, socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", stack.port))
        silent.sendall(head % len(data) + data)
        stack.wait(lambda: stack.manager.counts.accepted == 1)
        stack.wait(lambda: 'status="499"' in httpx.get(f"{stack.url}/metrics").text)
        assert asdict(stack.manager.counts) == {
            "accepted": 1,
            "ok": 0,
            "aborted": 1,
            "failed": 0,
            "refused": 0,
        }
        assert len(stack.sent_of(Abort)) == 1
        stack.check_idle()


def test_abort_request(slow: Stack) -> None:
    body = {"text": "abc", "rid": "mine", "sampling_params": {"max_new_tokens": 200}}
    thread, result = in_background(
        lambda: httpx.post(f"{slow.url}/generate", json=body, timeout=20)
    )
    slow.wait(lambda: len(slow.manager._open) == 1)
    for count in (1, 0):
        answer = httpx.post(f"{slow.url}/abort_request", json={"rid": "mine"})
        assert answer.status_code == 200
        if count:
            assert answer.json() == {"aborting": 1}
            thread.join(10)
    meta = result[0].json()["meta_info"]
    assert result[0].status_code == 200 and meta["finish_reason"]["type"] == "abort"
    assert httpx.post(f"{slow.url}/abort_request", json={"rid": "never"}).json() == {"aborting": 0}
    assert slow.manager.counts.aborted == 1


@pytest.mark.parametrize("rid", ["early", "other"])
def test_an_abort_reaches_a_call_whose_text_is_being_read(
    rid: str, slow: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, reading, go_on = slow.manager.tokenizer.encode, threading.Event(), threading.Event()

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
    thread.join(10)
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
    thread.join(10)
    assert [c["finish_reason"] for c in result[0].json()["choices"]] == ["abort", "abort"]
    assert len(slow.manager._open) == 1
    httpx.post(f"{slow.url}/abort_request", json={"abort_all": True})
    other.join(10)
    assert kept[0].json()["choices"][0]["finish_reason"] == "abort"


def test_flush_while_busy(slow: Stack) -> None:
    thread, _ = in_background(lambda: httpx.post(
        f"{slow.url}/v1/completions", json={**LONG, "max_tokens": 100}, timeout=20))  # fmt: skip
    slow.wait(lambda: len(slow.manager._open) == 1)
    error = httpx.post(f"{slow.url}/flush_cache")
    assert (error.status_code, error.json()["error"]["code"]) == (400, "busy")
    assert httpx.post(f"{slow.url}/flush_cache?timeout=20", timeout=30).status_code == 200
    thread.join(10)


def test_engine_death(slow: Stack) -> None:
    url = f"{slow.url}/v1/completions"
    dead = RequestError(500, "engine_dead", "the engine has died")
    thread, whole = in_background(lambda: httpx.post(url, json=LONG, timeout=20))
    slow.wait(lambda: len(slow.manager._open) == 1)
    lines: list[str] = []
    with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=20) as streamed:
        for line in filter(None, streamed.iter_lines()):
            lines.append(line)
            slow.on_loop(lambda: slow.manager.fail_all(dead))
    thread.join(10)
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
        probe.sendall(b"GET /health_generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
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
        thread.join(10)
        assert result[0].status_code == 200
        stack.check_idle()


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
        stack.wait(lambda: len(stack.sent_of(Generate)) == 12)
        stack.running.set()
        thread.join(20)
        other.join(20)
        assert taken[0].status_code == 200 and "overloaded" not in taken[0].text
        assert (refused[0].status_code, refused[0].json()["error"]["code"]) == (
            503,
            "engine_overloaded",
        )
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
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")
        assert (
            "10" in refused.json()["error"]["message"] and "9" in refused.json()["error"]["message"]
        )
        assert "retry-after" not in refused.headers
        stack.check_idle()


def test_a_client_that_takes_a_name_again_gets_its_own_text(slow: Stack) -> None:
    url, first = (
        f"{slow.url}/v1/completions",
        {**LONG, "prompt": "abc", "rid": "job-1", "stream": True, "seed": 1},
    )
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
        return [(c["text"], c["finish_reason"]) for e in events(answer) for c in e["choices"]]

    assert text(result[0].text) == text(alone)
    assert slow.manager.abort("job-1") == 0


def test_deadline(slow: Stack) -> None:
    slow.args.request_timeout = 0.3
    answer = httpx.post(f"{slow.url}/v1/completions", json=LONG, timeout=20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
