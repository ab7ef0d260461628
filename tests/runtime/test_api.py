"""Routes beside those that generate, request ids, the log and the metrics."""

from __future__ import annotations

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from prometheus_client.parser import text_string_to_metric_families

from radix_runtime import __version__
from radix_runtime.messages import Abort, Generate, RequestFailed, unpack_ids
from tests.runtime.api_stack import CONTEXT, LONG, MODEL, VOCAB, Stack, in_background
from tests.runtime.bad_requests import CHAT, good_request
from tests.runtime.scripted_server import ScriptedServer


def test_tokenize_is_what_runs(stack: Stack, client: httpx.Client) -> None:
    body = good_request(MODEL)
    tokens = client.post("/tokenize", json={"messages": body["messages"]}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == CONTEXT
    usage = client.post(CHAT, json=body).json()["usage"]
    assert usage["prompt_tokens"] == tokens["count"]
    sent = stack.sent_of(Generate)[-1].input_ids
    assert unpack_ids(sent).tolist() == tokens["tokens"]
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
        document = httpx.get(f"{stack.url}/openapi.json").json()
        OpenAPIV31SpecValidator(document).validate()
        paths = document["paths"]
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
    prompts = sample("radix:request_prompt_tokens_sum")
    outputs = sample("radix:request_generation_tokens_sum")
    for _ in range(2):
        client.post("/v1/completions", json={
            "prompt": [9] * 22, "max_tokens": 6, "ignore_eos": True})  # fmt: skip
    after = [sample(f"radix:{name}") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [22 + 2, 20, 12]
    assert sample("radix:time_to_first_token_seconds_count") == first + 2
    assert sample("radix:request_prompt_tokens_sum") == prompts + 2 * 22
    assert sample("radix:request_generation_tokens_sum") == outputs + 2 * 6
    assert sample("radix:requests_total", outcome="ok") == stack.manager.counts.ok
    assert sample("radix:requests_accepted_total") == stack.manager.counts.accepted
    assert sample("radix:open_requests") == 0
    assert sample("radix:http_requests_total", route="/v1/completions", status="200") >= 2
    for i in range(5):  # no label grows with what clients send
        client.get(f"/nothing/{i}")
        client.get(f"/v1/models/{i}")
    assert "nothing" not in client.get("/metrics").text
    assert sample("radix:http_requests_total", route="/v1/models/{model}", status="404") >= 5
    assert sample("radix:http_requests_total", route="other", status="404") >= 5
    client.get("/generate")
    client.get("/health", headers={"x-long": "x" * 70_000})
    assert sample("radix:http_requests_total", route="other", status="405") >= 1
    assert sample("radix:http_requests_total", route="other", status="431") >= 1


def test_metrics_say_what_they_are(client: httpx.Client) -> None:
    text = client.get("/metrics").text
    assert f'radix:info{{model="{MODEL}",version="{__version__}"}} 1.0' in text
    families = list(text_string_to_metric_families(text))
    for family in families:
        name = family.name.removeprefix("radix:").replace("_", " ")
        assert family.documentation and family.documentation != name, family.name
    samples = {sample.name for family in families for sample in family.samples}
    assert not any(name.endswith("_created") for name in samples)
    assert {"radix:num_queue_reqs", "radix:steps_total", "radix:num_pages"} <= samples


def test_what_is_not_there_is_named(client: httpx.Client) -> None:
    error = client.post(CHAT, json={**good_request(MODEL), "model": "gpt-99"}).json()["error"]
    assert error["message"] == f"The model `gpt-99` does not exist; this server has `{MODEL}`"
    long = client.post(CHAT, json={**good_request(MODEL), "model": "x" * 9999}).json()["error"]
    assert len(long["message"]) < 300
    error = client.post("/v1/rerank", json={}).json()["error"]
    assert error["message"].startswith("no such path: /v1/rerank; there are /v1/chat/completions")
    assert client.get("/nope").json()["error"]["message"] == "no such path: /nope"
    assert len(client.get("/" + "n" * 9999).json()["error"]["message"]) < 200


def test_a_completion_of_no_tokens(client: httpx.Client) -> None:
    """As lm-eval and the bench clients of peers ask for; the prompt is computed and cached."""
    body = {"prompt": "a b c", "max_tokens": 0}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_completion_with_and_without_special_tokens() -> None:
    with ScriptedServer() as server:
        server.tokenizer._prefix = [1]  # as one that begins with BOS
        for given, is_there in ((None, True), (True, True), (False, False)):
            server.answers.append("b")
            body = {"prompt": "a", "add_special_tokens": given}
            httpx.post(f"{server.url}/v1/completions", json=body).raise_for_status()
            ids = unpack_ids(server.requests[-1].input_ids)
            assert (ids[0] == 1) == is_there


def test_only_what_ended_well_is_timed(slow: Stack) -> None:
    def counted() -> int:
        buckets, _ = slow.manager.metrics.request_latency.figures()
        return sum(buckets)

    def send(**body: object) -> int:
        fields = {"prompt": [5] * 8, "max_tokens": 2, "ignore_eos": True, **body}
        return httpx.post(f"{slow.url}/v1/completions", json=fields, timeout=20).status_code

    before = counted()
    assert send() == 200 and counted() == before + 1
    thread, answer = in_background(lambda: send(**LONG))
    slow.wait(lambda: len(slow.manager._open) == 1)
    (rid,) = slow.manager._open
    failed = RequestFailed(rid=rid, status=400, code="invalid_value", message="no")
    slow.on_loop(lambda: slow.manager.handle(failed))
    thread.join(60)
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


def test_flush_while_busy(slow: Stack) -> None:
    thread, _ = in_background(lambda: httpx.post(
        f"{slow.url}/v1/completions", json={**LONG, "max_tokens": 100}, timeout=20))  # fmt: skip
    slow.wait(lambda: len(slow.manager._open) == 1)
    error = httpx.post(f"{slow.url}/flush_cache")
    assert (error.status_code, error.json()["error"]["code"]) == (400, "busy")
    assert httpx.post(f"{slow.url}/flush_cache?timeout=20", timeout=30).status_code == 200
    thread.join(60)


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_only_the_operator_enables_profiling(client: httpx.Client, path: str) -> None:
    refused = client.post(path, json={})
    assert refused.status_code == 400 and "--profile-dir" in refused.json()["error"]["message"]
    chosen = client.post(path, json={"output_dir": "/tmp"})
    assert chosen.json()["error"]["code"] == "unknown_parameter"
