"""The `openai` package against a real server: uvicorn, scheduler, detokenizer, fake engine."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.runtime.api_stack import MODEL, Stack

HI = [{"role": "user", "content": "Say something."}]


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="-", max_retries=0) as client:
        yield client
    stack.check_idle()


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": MODEL, "messages": HI, "max_tokens": 40, "seed": 7, **fields}
    fields.setdefault("extra_body", {"ignore_eos": True})  # the fake model may draw an end
    return client.chat.completions.create(**fields)


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL and answer.created > 0
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content and choice.logprobs is None
    usage = answer.usage
    assert usage.completion_tokens == 40
    assert usage.total_tokens == usage.prompt_tokens + 40
    assert chat(client).choices[0].message.content == choice.message.content


def test_usage_tells_what_the_cache_gave(stack: Stack, client: openai.OpenAI) -> None:
    httpx.post(f"{stack.url}/flush_cache").raise_for_status()
    first = chat(client).usage
    second = chat(client).usage
    assert first.prompt_tokens_details.cached_tokens == 0
    whole_pages = (second.prompt_tokens - 1) // 4 * 4
    assert second.prompt_tokens_details.cached_tokens == whole_pages > 0
    salted = chat(client, extra_body={"cache_salt": "mine"}).usage
    assert salted.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("n", [1, 2])
def test_stream_is_the_whole_in_pieces(client: openai.OpenAI, n: int) -> None:
    whole = chat(client, n=n)
    chunks = list(chat(client, n=n, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    deltas: dict[int, list[Any]] = defaultdict(list)
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            deltas[choice.index].append(choice)
    assert set(deltas) == set(range(n))
    for choice in whole.choices:
        parts = deltas[choice.index]
        assert (parts[0].delta.role, parts[0].delta.content) == ("assistant", "")
        assert all(part.delta.role is None for part in parts[1:])
        assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + ["length"]
        assert parts[-1].delta.content is None
        text = "".join(part.delta.content or "" for part in parts)
        assert text == choice.message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40 * n
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    if n == 2:
        assert whole.choices[0].message.content != whole.choices[1].message.content


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(client, max_tokens=5, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5


def test_chat_logprobs(client: openai.OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=3).choices[0]
    content = whole.logprobs.content
    assert len(content) == 40
    assert b"".join(bytes(t.bytes) for t in content).decode("utf-8", "replace") == (
        whole.message.content
    )
    assert all(len(t.top_logprobs) == 3 and t.logprob >= -9999 for t in content)
    streamed = [
        token
        for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert streamed == content


def test_stop_string(client: openai.OpenAI) -> None:
    text = chat(client).choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    cut = text[: text.index(stop)]
    ended = chat(client, stop=stop)
    choice = ended.choices[0]
    assert (choice.message.content, choice.finish_reason) == (cut, "stop")
    assert choice.matched_stop == stop and ended.usage.completion_tokens < 40
    streamed = chat(client, stop=["never found", stop], stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == cut
    kept = chat(client, stop=stop, extra_body={"no_stop_trim": True}).choices[0]
    assert kept.message.content == cut + stop


def test_stop_token(stack: Stack, client: openai.OpenAI) -> None:
    ids = httpx.post(f"{stack.url}/generate", json={"text": "abc", "sampling_params": {
        "seed": 3, "max_new_tokens": 8}}).json()["output_ids"]  # fmt: skip
    extra = {"stop_token_ids": [ids[5]]}
    answer = client.completions.create(
        model=MODEL, prompt="abc", seed=3, max_tokens=8, extra_body=extra, logprobs=0
    )
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.matched_stop) == ("stop", ids[5])
    first = ids.index(ids[5])
    assert answer.usage.completion_tokens == first + 1 == len(choice.logprobs.tokens)
    assert choice.text == stack.tokenizer.decode(ids[:first], skip_special_tokens=True)


def test_completions_order_is_prompt_major(client: openai.OpenAI) -> None:
    create = client.completions.create
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "seed": 5}
    both = create(prompt=["alpha", "beta"], n=2, **fields)
    alone = [create(prompt=p, n=2, **fields) for p in ("alpha", "beta")]
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert [c.text for c in both.choices] == [c.text for a in alone for c in a.choices]
    assert both.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone)
    assert both.usage.completion_tokens == 24
    texts: dict[int, str] = defaultdict(str)
    for chunk in create(prompt=["alpha", "beta"], n=2, stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [texts[i] for i in range(4)] == [c.text for c in both.choices]
    assert create(prompt="alpha", model=MODEL).usage.completion_tokens <= 16


def test_completions_of_ids(stack: Stack, client: openai.OpenAI) -> None:
    ids = stack.tokenizer.encode("alpha")
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "seed": 5}
    text = client.completions.create(prompt="alpha", **fields).choices[0].text
    for prompt in (ids, [ids]):
        assert client.completions.create(prompt=prompt, **fields).choices[0].text == text


def test_echo_with_logprobs(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL, "prompt": "hello there", "max_tokens": 4, "echo": True, "seed": 1,
    }  # fmt: skip
    choice = client.completions.create(logprobs=2, **fields).choices[0]
    scores = choice.logprobs
    assert choice.text.startswith("hello there")
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    assert all(isinstance(v, float) for v in scores.token_logprobs[1:])
    for token, top in list(zip(scores.tokens, scores.top_logprobs, strict=True))[1:]:
        # Parts of characters have one text, so the likeliest stands for all of them.
        assert token in top and (1 if "\ufffd" in top else 2) <= len(top) <= 3
    for token, offset in zip(scores.tokens, scores.text_offset, strict=True):
        if "\ufffd" not in token and token != "<|im_end|>":
            assert choice.text[offset:].startswith(token)
    streamed = list(client.completions.create(logprobs=2, stream=True, **fields))
    assert "".join(c.choices[0].text for c in streamed) == choice.text
    parts = [c.choices[0].logprobs for c in streamed if c.choices[0].logprobs]
    assert [o for p in parts for o in p.text_offset] == scores.text_offset
    only = client.completions.create(logprobs=0, **{**fields, "max_tokens": 0})
    assert only.choices[0].text == "hello there" and only.usage.completion_tokens == 0
    assert only.choices[0].logprobs.token_logprobs == scores.token_logprobs[:-4]


@pytest.mark.parametrize("skip", [True, False])
def test_offsets_of_an_echo_with_special_tokens(
    stack: Stack, client: openai.OpenAI, skip: bool
) -> None:
    """They index the text that is echoed: written special tokens are in it, those of ids only if
    they are shown."""
    text = "<|im_start|>user\nhé there<|im_end|>"
    ids = stack.tokenizer.encode(text)
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 4,
        "echo": True,
        "logprobs": 0,
        "seed": 1,
    }
    for prompt in (text, ids):
        extra = {"skip_special_tokens": skip, "ignore_eos": True}
        choice = client.completions.create(prompt=prompt, **fields, extra_body=extra).choices[0]
        scores = choice.logprobs
        shows_special = prompt is text or not skip
        assert choice.text.startswith(text) == shows_special
        for token, offset in zip(scores.tokens, scores.text_offset, strict=True):
            if "\ufffd" not in token and (shows_special or not token.startswith("<|")):
                assert choice.text[offset:].startswith(token), (token, offset)
        echo = text if shows_special else "user\nhé there"
        assert scores.text_offset[len(ids)] == len(echo)


def test_models(client: openai.OpenAI) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 256
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nope")
    assert caught.value.code == "model_not_found"


def test_errors_become_the_clients_exceptions(stack: Stack, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, temperature=-1)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        chat(client, model="nope")
    with pytest.raises(openai.BadRequestError) as template:
        client.post("/chat/completions", cast_to=object, body={
            "messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]})  # fmt: skip
    assert template.value.param == "messages[0].content[0].text"


def test_error_after_the_first_chunk(stack: Stack, client: openai.OpenAI) -> None:
    """The client sees an exception, and no [DONE] comes."""
    armed = [False]
    stack.engine.nan_rows = lambda step, row: armed[0]
    stack.delay = 0.01
    try:
        stream = chat(client, stream=True, max_tokens=200, extra_body={"ignore_eos": True})
        seen = []
        with pytest.raises(openai.APIError) as caught:
            for chunk in stream:
                seen.append(chunk)
                armed[0] = len(seen) > 3
        assert len(seen) > 3 and caught.value.code == "numerical_error", caught.value
        armed[0] = False
        lines = []
        body = {"messages": HI, "stream": True, "max_tokens": 200, "ignore_eos": True}
        with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body) as raw:
            for line in raw.iter_lines():
                lines.append(line)
                armed[0] = len(lines) > 6
        assert raw.status_code == 200 and "data: [DONE]" not in lines
        assert json.loads([x for x in lines if x][-1][6:])["error"]["type"] == "server_error"
    finally:
        stack.engine.nan_rows = lambda step, row: False
        stack.delay = 0.0


def test_content_parts_and_roles(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "it"}]
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    same = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Say\nit"}]
    a, b = (chat(client, messages=m, max_tokens=8) for m in (messages, same))
    assert a.choices[0].message.content == b.choices[0].message.content
    assert a.usage.prompt_tokens == b.usage.prompt_tokens
