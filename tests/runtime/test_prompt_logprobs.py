"""`prompt_logprobs` of OpenAI's routes, in vLLM's shape, against a real server with a fake engine.

The fake engine calls a prompt's token t the (t + 1)-th of its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.runtime.api_stack import MODEL, Stack

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url) as client:
        yield client
    stack.check_idle()


def answer_of(client: httpx.Client, path: str, **fields: Any) -> Any:
    response = client.post(path, json={"model": MODEL, "seed": 1, "max_tokens": 4, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def check_entries(stack: Stack, entries: list[Any], ids: list[int], top: int) -> None:
    """An entry a token, the token first, with what else is likely in its place."""
    assert len(entries) == len(ids) and entries[0] is None
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        keys = list(entry)
        assert keys[0] == str(token) and top <= len(keys) <= top + 1
        assert entry[keys[0]]["rank"] == token + 1
        ranks = [entry[key]["rank"] for key in keys[1:]]
        assert ranks == sorted(set(ranks)) and set(ranks) <= set(range(1, top + 1))
        for key, one in entry.items():
            assert set(one) == {"logprob", "rank", "decoded_token"}
            assert one["decoded_token"] == stack.tokenizer.id_to_text(int(key))


@pytest.mark.parametrize("top", [0, 1, 20])
def test_completions(stack: Stack, client: httpx.Client, top: int) -> None:
    prompts = ["hello there", "alpha beta gamma delta"]
    answer = answer_of(client, COMPLETIONS, prompt=prompts, n=2, prompt_logprobs=top)
    for choice in answer["choices"]:
        ids = stack.tokenizer.encode(prompts[choice["index"] // 2])
        check_entries(stack, choice["prompt_logprobs"], ids, top)
        assert choice["logprobs"] is None  # of the answer nobody has asked for any
    assert "prompt_logprobs" not in answer
    # They are those of /generate, and come again with the prefix cached.
    own = [entry and entry[str(i)]["logprob"] for i, entry in _pairs(stack, answer, prompts[0])]
    body = {"text": prompts[0], "return_logprob": True, "logprob_start_len": 0}
    scored = client.post("/generate", json=body).json()["meta_info"]["input_token_logprobs"]
    assert [value for value, _, _ in scored] == own
    again = answer_of(client, COMPLETIONS, prompt=prompts, n=2, prompt_logprobs=top)
    assert again["choices"] == answer["choices"]


def _pairs(stack: Stack, answer: Any, prompt: str) -> Iterator[tuple[int, Any]]:
    ids = stack.tokenizer.encode(prompt)
    return zip(ids, answer["choices"][0]["prompt_logprobs"], strict=True)


def test_the_prompt_alone(stack: Stack, client: httpx.Client) -> None:
    ids = [7, 8, 9]
    answer = answer_of(client, COMPLETIONS, prompt=ids, max_tokens=0, prompt_logprobs=2)
    (choice,) = answer["choices"]
    check_entries(stack, choice["prompt_logprobs"], ids, 2)
    assert choice["text"] == "" and answer["usage"]["completion_tokens"] == 0
    one = answer_of(client, COMPLETIONS, prompt=[7], max_tokens=0, prompt_logprobs=2)
    assert one["choices"][0]["prompt_logprobs"] == [None]


@pytest.mark.parametrize(("echoed", "top"), [(2, 5), (5, 2), (0, 3), (3, 0)])
def test_beside_an_echo_each_has_its_number(
    stack: Stack, client: httpx.Client, echoed: int, top: int
) -> None:
    fields = {"prompt": "hello there", "echo": True, "logprobs": echoed}
    plain = answer_of(client, COMPLETIONS, **fields)["choices"][0]
    both = answer_of(client, COMPLETIONS, **fields, prompt_logprobs=top)["choices"][0]
    entries = both.pop("prompt_logprobs")
    check_entries(stack, entries, stack.tokenizer.encode("hello there"), top)
    assert both == plain
    shown = answer_of(client, COMPLETIONS, **{**fields, "echo": False}, prompt_logprobs=top)
    choice = shown["choices"][0]
    assert choice["prompt_logprobs"] == entries
    assert len(choice["logprobs"]["tokens"]) == 4  # the answer's


def test_chat(stack: Stack, client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    fields = {"messages": messages, "n": 2}
    answer = answer_of(client, CHAT, **fields, prompt_logprobs=3, ignore_eos=True)
    tokenized = client.post("/tokenize", json={"model": MODEL, "messages": messages}).json()
    check_entries(stack, answer["prompt_logprobs"], tokenized["tokens"], 3)
    for choice in answer["choices"]:
        assert choice["logprobs"] is None and "prompt_logprobs" not in choice
    both = answer_of(
        client, CHAT, **fields, prompt_logprobs=3, logprobs=True, top_logprobs=1, ignore_eos=True
    )
    assert both["prompt_logprobs"] == answer["prompt_logprobs"]
    for choice in both["choices"]:
        assert all(len(entry["top_logprobs"]) == 1 for entry in choice["logprobs"]["content"])
    assert "prompt_logprobs" not in answer_of(client, CHAT, **fields)
    assert "prompt_logprobs" not in answer_of(client, CHAT, **fields, prompt_logprobs=None)


def test_the_openai_client_shows_them(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="-", max_retries=0) as client:
        body = {"prompt_logprobs": 1}
        given = client.completions.create(model=MODEL, prompt=[5, 6], extra_body=body)
        (first, second) = given.choices[0].prompt_logprobs
        assert first is None and second["6"]["rank"] == 7


def test_what_is_too_much_or_elsewhere(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radix_runtime.server.logprob_bound.MAX_LOGPROBS", 2 * 21 * 30)
    body = {"model": MODEL, "prompt_logprobs": 20, "n": 2, "max_tokens": 1}
    fits = client.post(COMPLETIONS, json={**body, "prompt": [5] * 30})
    assert fits.status_code == 200, fits.text
    error = client.post(COMPLETIONS, json={**body, "prompt": [5] * 31}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "prompt_logprobs")
    assert str(2 * 21 * 31) in error["message"]
    other = client.post("/generate", json={"text": "a", "prompt_logprobs": 1}).json()["error"]
    assert (other["code"], other["param"]) == ("unsupported_parameter", "prompt_logprobs")
