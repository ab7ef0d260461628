"""POST /generate: a real server on the fake engine."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from radix_runtime.server import json_pieces
from radix_runtime.server.json_pieces import to_json
from tests.runtime.api_stack import Stack, events


def generate(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


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
    ids = stack.tokenizer.encode("hello there")
    meta = out["meta_info"]
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
        own = [e["meta_info"]["input_token_logprobs"] for e in pieces if e["index"] == i]
        assert list(itertools.chain.from_iterable(own)) == scores[i]


def test_a_stream_repeats_its_logprobs_without_encoding_them_again(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[Any] = []

    def spy(entry: Any) -> bytes:
        if isinstance(entry, list) and isinstance(entry[0], float | list):
            encoded.append(entry)
        return to_json(entry)

    monkeypatch.setattr(json_pieces, "to_json", spy)
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
