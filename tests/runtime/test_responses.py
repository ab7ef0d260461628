"""The `openai` package as agents use it: chat and responses, whole and as streams, and loops of
three turns with tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.runtime.agent_rig import (
    CITIES,
    FINAL,
    SCHEMA,
    TURNS,
    call_text,
    saw_both_answers,
    serve,
)
from tests.runtime.scripted_server import CONTEXT, MODEL, ScriptedServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with serve(tmp_path_factory.mktemp("template")) as server:
        yield server


@pytest.fixture
def oai(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    server.answers.clear()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client:
        yield client
    assert not server.answers and not server.manager._open


@pytest.fixture
def http(server: ScriptedServer) -> Iterator[httpx.Client]:
    server.answers.clear()
    headers = {"x-api-key": "key"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=20) as client:
        yield client


# Chat Completions -------------------------------------------------------------------------------


def test_chat_in_a_loop_with_tools(server: ScriptedServer, oai: openai.OpenAI) -> None:
    server.answers += TURNS
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    messages: list[Any] = [{"role": "user", "content": "Paris and Rome?"}]
    for _ in range(3):
        answer = oai.chat.completions.create(model=MODEL, messages=messages, tools=[tool])
        message = answer.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or []:
            assert call.type == "function"
            city = json.loads(call.function.arguments)["city"]
            content = CITIES[city]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    assert (message.content, answer.choices[0].finish_reason) == (FINAL, "stop")
    assert message.model_extra == {"reasoning_content": "I know."}
    assert saw_both_answers(server)


def test_chat_stream_accumulated_by_the_client(server: ScriptedServer, oai: openai.OpenAI) -> None:
    server.answers.append(TURNS[0])
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    with oai.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "?"}], tools=[tool]
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    call = (final.choices[0].message.tool_calls or [])[0]
    assert call.function.arguments == '{"city": "Paris"}'
    assert final.choices[0].finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.done" in kinds


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


def test_parsed_answers(server: ScriptedServer, oai: openai.OpenAI) -> None:
    """A pydantic model as response format of both APIs, and as a strict tool."""
    text = '{"city": "Paris", "degrees": 20}'
    call = f'<tool_call>\n{{"name": "Weather", "arguments": {text}}}\n</tool_call>'
    server.answers += [text, text, call]
    user: Any = [{"role": "user", "content": "?"}]
    expected = Weather(city="Paris", degrees=20)
    answer = oai.chat.completions.parse(model=MODEL, messages=user, response_format=Weather)
    assert answer.choices[0].message.parsed == expected
    constraint = server.requests[-1].constraint
    assert constraint is not None
    assert constraint.kind == "json_schema" and "</think>" in constraint.before
    response = oai.responses.parse(model=MODEL, input="?", text_format=Weather)
    assert response.output_parsed == expected
    tool = openai.pydantic_function_tool(Weather)
    called = oai.chat.completions.parse(model=MODEL, messages=user, tools=[tool])
    (parsed,) = called.choices[0].message.tool_calls or []
    assert parsed.function.parsed_arguments == expected
    constraint = server.requests[-1].constraint
    assert constraint is not None and constraint.kind == "lark"


# Responses --------------------------------------------------------------------------------------

FUNCTION: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}


def test_responses_in_a_loop_with_tools(server: ScriptedServer, oai: openai.OpenAI) -> None:
    server.answers += TURNS
    items: list[Any] = [{"role": "user", "content": "Paris and Rome?"}]
    for _ in range(3):
        answer = oai.responses.create(
            model=MODEL, input=items, tools=[FUNCTION], instructions="Be brief.", store=False
        )
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        for item in answer.output:
            if item.type == "function_call":
                text = CITIES[json.loads(item.arguments)["city"]]
                output = {"type": "function_call_output", "call_id": item.call_id, "output": text}
                items.append(output)
    assert answer.output_text == FINAL and answer.status == "completed"
    assert saw_both_answers(server) and "Be brief." in server.prompts[-1]
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_the_stream_of_responses_is_the_whole(server: ScriptedServer, oai: openai.OpenAI) -> None:
    server.answers += [TURNS[0]] * 3
    whole = oai.responses.create(model=MODEL, input="?", tools=[FUNCTION])
    events = list(oai.responses.create(model=MODEL, input="?", tools=[FUNCTION], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed"
    assert [_plain(item) for item in last.response.output] == [
        _plain(item) for item in whole.output
    ]
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    texts: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.type] = texts.get(event.type, "") + event.delta
    assert texts == {
        "response.reasoning_text.delta": "First Paris.",
        "response.output_text.delta": "I look.",
        "response.function_call_arguments.delta": '{"city": "Paris"}',
    }
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == done and len(added) == 3
    with oai.responses.stream(model=MODEL, input="?", tools=[FUNCTION]) as stream:
        final = stream.get_final_response()
    assert final.output_text == "I look."


def _plain(item: Any) -> dict[str, Any]:
    return {k: v for k, v in item.model_dump().items() if k not in ("id", "call_id")}


def test_a_response_that_was_cut(server: ScriptedServer, oai: openai.OpenAI) -> None:
    server.answers.append("One two three four five six seven.")
    answer = oai.responses.create(model=MODEL, input="?", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    server.answers.append("One two three four five six seven.")
    events = oai.responses.create(model=MODEL, input="?", max_output_tokens=3, stream=True)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.status for item in done] == ["incomplete"]


def test_calls_that_were_cut(server: ScriptedServer, http: httpx.Client) -> None:
    """A call is complete if its arguments are, whatever ended the answer."""
    call = call_text("Paris")
    for answer, fields, status in (
        (call, {"stop": "Pari"}, "incomplete"),
        (call + call, {"max_output_tokens": len(server.tokenizer.encode(call)) + 4}, "completed"),
    ):
        server.answers.append(answer)
        given = {"model": MODEL, "input": "?", "tools": [FUNCTION], "tool_choice": "required"}
        output = http.post("/v1/responses", json={**given, **fields}).json()["output"]
        assert [item["status"] for item in output] == [status]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"store": True}, "unsupported_parameter", "store"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"truncation": "auto"}, "invalid_value", "truncation"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "invalid_tool", "tools[0]"),
        ({"tools": [{**FUNCTION, "name": "a b"}]}, "invalid_tool", "tools[0].name"),
        ({"tools": [FUNCTION, FUNCTION]}, "invalid_tool", "tools[1].name"),
        (
            {"tools": [{**FUNCTION, "parameters": {"properties": []}}]},
            "invalid_tool",
            "tools[0].parameters.properties",
        ),
        ({"tools": [FUNCTION], "tool_choice": "x"}, "invalid_tool", "tool_choice"),
        ({"input": []}, "empty_input", "input"),
        ({"input": [{"type": "input_image"}]}, "unsupported_parameter", "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "unsupported_parameter",
            "input[0].content[0].type",
        ),
        (
            {
                "input": [
                    {"role": "assistant", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"type": "function_call_output", "call_id": "c", "output": "x"},
                ],
                "instructions": "Be brief.",
            },
            "invalid_value",
            "input[2].call_id",
        ),
        ({"input": [{"role": "wizard", "content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "invalid_type", "input[0].content"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "invalid_value", "input"),
        ({"input": "x " * CONTEXT}, "context_length_exceeded", "input"),
        ({"max_output_tokens": CONTEXT}, "context_length_exceeded", "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "missing_field", "text.format.schema"),
        (
            {"text": {"format": {"type": "json_object"}}, "regex": "a"},
            "invalid_combination",
            "regex",
        ),
        ({"reasoning": {"effort": "high"}}, "unsupported_parameter", "reasoning.effort"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"max_tokens": 5}, "unknown_parameter", "max_tokens"),
    ],
)
def test_what_responses_refuses(http: httpx.Client, fields: Any, code: str, param: str) -> None:
    response = http.post("/v1/responses", json={"model": MODEL, "input": "x", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)


def test_input_of_every_kind(server: ScriptedServer, http: httpx.Client) -> None:
    server.answers.append("ok")
    items = [
        {"type": "message", "role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes", "x": 1}]},
        {"role": "user", "content": "More"},
    ]
    body = {"input": items, "metadata": {"a": "b"}, "user": "u", "store": False}
    answer = http.post("/v1/responses", json=body).json()
    assert answer["output"][0]["content"][0]["text"] == "ok"
    assert "<|im_start|>system\nRules." in server.prompts[-1]
    assert "<think>\nHm\n</think>\n\nYes<|im_end|>" in server.prompts[-1]
