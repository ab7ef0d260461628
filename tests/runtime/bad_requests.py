"""Malformed requests and what each must be answered with. Used over the fake engine here and
over a real server elsewhere: `bad_requests` takes the sizes of the model that is served."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
INVALID = "invalid_request_error"
NOT_FOUND = "not_found_error"


@dataclass(frozen=True)
class Bad:
    """`body`: bytes as they are, anything else as JSON."""

    name: str
    path: str
    body: Any
    code: str
    param: str | None = None
    status: int = 400
    type: str = INVALID
    method: str = "POST"
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()

    def payload(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def good_request(model: str) -> dict[str, Any]:
    """A chat request that any server must answer."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": "What is 1 + 1?"}],
        "max_tokens": 4,
        "temperature": 0,
    }


def bad_call(
    name: str, path: str, body: Any, code: str, param: str | None = None, **answer: Any
) -> Bad:
    """A line of the tables below; `answer`: what else differs from a 400."""
    return Bad(name=name, path=path, body=body, code=code, param=param, **answer)


def bad_requests(model: str, vocab: int, context: int) -> list[Bad]:
    return [
        *_bodies(),
        *_chat_messages(model, context),
        *_chat_sampling(model, vocab),
        *_chat_options(model, context),
        *_completions(model, vocab, context),
        *_generate(vocab, context),
        *_others(vocab),
    ]


def _chat_body(model: str, **fields: Any) -> dict[str, Any]:
    return {**good_request(model), **fields}


def _bodies() -> list[Bad]:
    deep = b'{"messages":' + b"[" * 200 + b"]" * 200 + b"}"
    return [
        bad_call("no json", CHAT, b"{nope", "invalid_json"),
        bad_call("empty body", CHAT, b"", "invalid_json"),
        bad_call("truncated", COMPLETIONS, b'{"prompt":"a"', "invalid_json"),
        bad_call("not utf-8", CHAT, b'{"model":"\xff\xfe"}', "invalid_json"),
        bad_call("lone surrogate", CHAT, b'{"model":"\\ud800"}', "invalid_json"),
        bad_call("too deep", CHAT, deep, "invalid_json"),
        bad_call("far too deep", CHAT, b"[" * 100_000, "invalid_json"),
        bad_call("huge integer", CHAT, b'{"n":' + b"9" * 5000 + b"}", "invalid_json"),
        bad_call("an array", CHAT, [1, 2], "invalid_type"),
        bad_call("NaN", CHAT, b'{"temperature":NaN}', "invalid_type", "temperature"),
        bad_call("-Infinity", COMPLETIONS, b'{"top_p":-Infinity}', "invalid_type", "top_p"),
        bad_call("1e999", CHAT, b'{"temperature":1e999}', "invalid_type", "temperature"),
        bad_call("nested 1e999", GENERATE, b'{"sampling_params":{"min_p":1e999}}',
            "invalid_type", "sampling_params.min_p"),
        bad_call("form", CHAT, b"a=b", "unsupported_media_type", status=415,
            content_type="application/x-www-form-urlencoded"),
        bad_call("no content type", CHAT, b"{}", "unsupported_media_type", status=415,
            content_type=""),
        bad_call("gzip", CHAT, gzip.compress(b"{}"), "unsupported_media_type", status=415,
            headers=(("content-encoding", "gzip"),)),
    ]  # fmt: skip


def _chat_messages(model: str, context: int) -> list[Bad]:
    user = {"role": "user", "content": "hi"}
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]

    def bad(name: str, code: str, param: str, **fields: Any) -> Bad:
        return bad_call(name, CHAT, _chat_body(model, **fields), code, param)

    without = {k: v for k, v in good_request(model).items() if k != "messages"}
    return [
        bad_call("no messages", CHAT, without, "missing_field", "messages"),
        bad("messages []", "empty_input", "messages", messages=[]),
        bad("messages text", "invalid_type", "messages", messages="hi"),
        bad("no role", "missing_field", "messages[0].role", messages=[{"content": "x"}]),
        bad("no content", "missing_field", "messages[0].content", messages=[{"role": "user"}]),
        bad("bad role", "invalid_value", "messages[1].role",
            messages=[user, {"role": "wizard", "content": "x"}]),
        bad("unknown in message", "unknown_parameter", "messages[0].colour",
            messages=[{**user, "colour": 1}]),
        bad("image", "unsupported_parameter", "messages[0].content[0].type",
            messages=[{"role": "user", "content": image}]),
        bad("assistant last", "invalid_value", "messages",
            messages=[user, {"role": "assistant", "content": "x"}]),
        bad("too long", "context_length_exceeded", "messages",
            messages=[{"role": "user", "content": "7 " * context}]),
        bad("far too long", "context_length_exceeded", "messages",
            messages=[{"role": "user", "content": "7" * 1_000_000}]),
    ]  # fmt: skip


def _chat_sampling(model: str, vocab: int) -> list[Bad]:
    def bad(name: str, code: str, param: str, **fields: Any) -> Bad:
        return bad_call(name, CHAT, _chat_body(model, **fields), code, param)

    return [
        bad("temperature < 0", "invalid_value", "temperature", temperature=-0.1),
        bad("temperature text", "invalid_type", "temperature", temperature="0.5"),
        bad("temperature true", "invalid_type", "temperature", temperature=True),
        bad("top_p 0", "invalid_value", "top_p", top_p=0),
        bad("top_p 1.5", "invalid_value", "top_p", top_p=1.5),
        bad("top_k -2", "invalid_value", "top_k", top_k=-2),
        bad("top_k 1.0", "invalid_type", "top_k", top_k=1.0),
        bad("min_p 2", "invalid_value", "min_p", min_p=2),
        bad("presence 3", "invalid_value", "presence_penalty", presence_penalty=3),
        bad("frequency -3", "invalid_value", "frequency_penalty", frequency_penalty=-3),
        bad("repetition tiny", "invalid_value", "repetition_penalty", repetition_penalty=1e-38),
        bad("repetition 0", "invalid_value", "repetition_penalty", repetition_penalty=0),
        bad("n 0", "invalid_value", "n", n=0),
        bad("n 10^9", "invalid_value", "n", n=10**9),
        bad("n true", "invalid_type", "n", n=True),
        bad("n '3'", "invalid_type", "n", n="3"),
        bad("max_tokens 0", "invalid_value", "max_tokens", max_tokens=0),
        bad("both limits", "invalid_combination", "max_tokens", max_completion_tokens=5),
        bad("min over max", "invalid_value", "min_tokens", min_tokens=5),
        bad("seed 2^63", "invalid_value", "seed", seed=2**63),
        bad("33 stops", "invalid_value", "stop", stop=["x"] * 33),
        bad("empty stop", "invalid_value", "stop", stop=[""]),
        bad("long stop", "invalid_value", "stop", stop="x" * 257),
        bad("stop numbers", "invalid_type", "stop[0]", stop=[1]),
        bad("stop id", "invalid_value", "stop_token_ids", stop_token_ids=[vocab]),
        bad("stop id -1", "invalid_value", "stop_token_ids", stop_token_ids=[-1]),
        bad("bias id", "invalid_value", "logit_bias", logit_bias={str(vocab): 1}),
        bad("bias value", "invalid_value", "logit_bias", logit_bias={"1": 101}),
        bad("bias key", "invalid_type", "logit_bias", logit_bias={"x": 1}),
    ]


def _chat_options(model: str, context: int) -> list[Bad]:
    tool = {"type": "function", "function": {"name": "f"}}

    def bad(name: str, code: str, param: str, **fields: Any) -> Bad:
        return bad_call(name, CHAT, _chat_body(model, **fields), code, param)

    return [
        bad("top_logprobs 21", "invalid_value", "top_logprobs", logprobs=True, top_logprobs=21),
        bad("prompt_logprobs -1", "invalid_value", "prompt_logprobs", prompt_logprobs=-1),
        bad("prompt_logprobs 21", "invalid_value", "prompt_logprobs", prompt_logprobs=21),
        bad("prompt_logprobs true", "invalid_type", "prompt_logprobs", prompt_logprobs=True),
        bad("prompt_logprobs in a stream", "invalid_combination", "prompt_logprobs",
            prompt_logprobs=0, stream=True),
        bad("top alone", "invalid_combination", "top_logprobs", top_logprobs=2),
        bad("logprobs 2", "invalid_type", "logprobs", logprobs=2),
        bad("stream_options", "invalid_combination", "stream_options",
            stream_options={"include_usage": True}),
        bad("stream option", "unknown_parameter", "stream_options.x", stream=True,
            stream_options={"x": 1}),
        bad("unknown", "unknown_parameter", "frobnicate", frobnicate=1),
        bad("tools", "unsupported_parameter", "tools", tools=[tool]),
        bad("two constraints", "invalid_combination", "regex",
            response_format={"type": "json_object"}, regex="a"),
        bad("constraint without end", "invalid_combination", "ignore_eos",
            response_format={"type": "json_object"}, ignore_eos=True),
        bad("lookaround", "invalid_grammar", "regex", regex="(?=a)b"),
        bad("long regex", "invalid_grammar", "regex", regex="a" * 2049),
        bad("schema keyword", "unsupported_schema", "/properties/a/contains",
            json_schema={"properties": {"a": {"contains": {}}}}),
        bad("schema", "invalid_schema", "response_format.json_schema.schema", response_format={
            "type": "json_schema", "json_schema": {"name": "a", "schema": [1]}}),
        bad("grammar", "invalid_grammar", "ebnf", ebnf="((("),
        bad("guided", "unsupported_parameter", "guided_json", guided_json={}),
        bad("template", "unsupported_parameter", "chat_template", chat_template="{{ 1 }}"),
        bad("template variable", "unknown_parameter", "chat_template_kwargs.tokenize",
            chat_template_kwargs={"tokenize": True}),
        bad("max_tokens", "context_length_exceeded", "max_tokens", max_tokens=context),
        bad("max_completion_tokens", "context_length_exceeded", "max_completion_tokens",
            max_tokens=None, max_completion_tokens=context),
        bad_call("other model", CHAT, _chat_body("gpt-99"), "model_not_found", "model",
            status=404, type=NOT_FOUND),
    ]  # fmt: skip


def _completions(model: str, vocab: int, context: int) -> list[Bad]:
    def bad(name: str, code: str, param: str | None, **fields: Any) -> Bad:
        body = {"model": model, "prompt": "hello", "max_tokens": 2, **fields}
        return bad_call(f"completions: {name}", COMPLETIONS, body, code, param)

    return [
        bad_call(
            "completions: no prompt", COMPLETIONS, {"model": model}, "missing_field", "prompt"
        ),
        bad("prompt ''", "empty_input", "prompt", prompt=""),
        bad("prompt []", "empty_input", "prompt", prompt=[]),
        bad("prompt [[]]", "empty_input", "prompt", prompt=[[]]),
        bad("prompt ['']", "empty_input", "prompt", prompt=["a", ""]),
        bad("mixed", "invalid_type", "prompt", prompt=["a", 1]),
        bad("bool ids", "invalid_type", "prompt[0]", prompt=[True]),
        bad("id over", "invalid_token_id", "prompt", prompt=[1, vocab]),
        bad("id -1", "invalid_token_id", "prompt", prompt=[[1], [-1]]),
        bad("id 2^70", "invalid_token_id", "prompt", prompt=[2**70]),
        bad("257 prompts", "invalid_value", "prompt", prompt=["a"] * 257),
        bad("ids too long", "context_length_exceeded", "prompt", prompt=[5] * (context + 1)),
        bad("logprobs 6", "invalid_value", "logprobs", logprobs=6),
        bad("logprobs true", "invalid_type", "logprobs", logprobs=True),
        bad("max_tokens -1", "invalid_value", "max_tokens", max_tokens=-1),
        bad("suffix", "unsupported_parameter", "suffix", suffix="x"),
        bad("best_of", "unsupported_parameter", "best_of", best_of=2),
    ]  # fmt: skip


def _generate(vocab: int, context: int) -> list[Bad]:
    def bad(name: str, code: str, param: str | None, **fields: Any) -> Bad:
        return bad_call(f"generate: {name}", GENERATE, fields, code, param)

    return [
        bad("nothing", "missing_field", "text"),
        bad("both", "invalid_combination", "text", text="a", input_ids=[1]),
        bad("empty", "empty_input", "text", text=""),
        bad("no ids", "empty_input", "input_ids", input_ids=[]),
        bad("id", "invalid_token_id", "input_ids", input_ids=[vocab]),
        bad("mixed", "invalid_type", "input_ids", input_ids=[1, [2]]),
        bad("parameter", "unknown_parameter", "sampling_params.max_tokens", text="a",
            sampling_params={"max_tokens": 3}),
        bad("temperature", "invalid_value", "sampling_params.temperature", text="a",
            sampling_params={"temperature": -1}),
        bad("lengths", "invalid_value", "sampling_params", text=["a", "b"],
            sampling_params=[{}]),
        bad("rids", "invalid_value", "rid", text="a", rid=["x", "y"]),
        bad("grammar", "invalid_grammar", "sampling_params.regex", text="a",
            sampling_params={"regex": "(a"}),
        bad("image", "unsupported_parameter", "image_data", text="a", image_data="x"),
        bad("start", "invalid_value", "logprob_start_len", text="a", return_logprob=True,
            logprob_start_len=999),
        bad("start alone", "invalid_combination", "return_logprob", text="a", logprob_start_len=0),
        bad("top alone", "invalid_combination", "return_logprob", text=["a", "b"],
            return_logprob=[False, False], top_logprobs_num=[0, 2]),
        bad("new tokens", "context_length_exceeded", "sampling_params.max_new_tokens", text="a",
            sampling_params={"max_new_tokens": context}),
    ]  # fmt: skip


def _others(vocab: int) -> list[Bad]:
    message = {"role": "user", "content": "x"}
    special = {"messages": [message], "add_special_tokens": True}
    generation = {"prompt": "a", "add_generation_prompt": False}
    template = {"prompt": "a", "chat_template_kwargs": {}}
    embed = {"model": "x", "input": "a"}
    lost = {"status": 404, "type": NOT_FOUND}
    get = {"method": "GET"}
    upgrade = (
        ("connection", "Upgrade"),
        ("upgrade", "WebSocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA=="),
    )
    return [
        bad_call("detokenize: id", "/detokenize", {"tokens": [vocab]},
            "invalid_token_id", "tokens"),
        bad_call("tokenize: nothing", "/tokenize", {}, "missing_field", "prompt"),
        bad_call("tokenize: special tokens", "/tokenize", special,
            "invalid_combination", "add_special_tokens"),
        bad_call("tokenize: generation", "/tokenize", generation,
            "invalid_combination", "add_generation_prompt"),
        bad_call("tokenize: template", "/tokenize", template,
            "invalid_combination", "chat_template_kwargs"),
        bad_call("abort: nothing", "/abort_request", {}, "missing_field", "rid"),
        bad_call("embeddings", "/v1/embeddings", embed, "unsupported_task"),
        bad_call("no route", "/v1/nothing", {}, "not_found", **lost),
        bad_call("double slash", "//v1/models", b"", "not_found", **lost, **get),
        bad_call("wrong method", CHAT, b"", "method_not_allowed", status=405, **get),
        bad_call("delete", "/health", b"", "method_not_allowed", status=405, method="DELETE"),
        bad_call("model", "/v1/models/none", b"", "model_not_found", "model", **lost, **get),
        bad_call("websocket", "/v1/realtime", b"", "unsupported_upgrade", headers=upgrade, **get),
        bad_call("flush timeout", "/flush_cache?timeout=x", b"", "invalid_value", "timeout", **get),
    ]  # fmt: skip
