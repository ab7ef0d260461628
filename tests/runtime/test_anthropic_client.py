"""The `anthropic` package: messages, whole and as streams, tools, thinking, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pydantic
import pytest

from tests.runtime.agent_rig import CITIES, FINAL, SCHEMA, TURNS, call_text, saw_both_answers, serve
from tests.runtime.scripted_server import CONTEXT, MODEL, ScriptedServer

if TYPE_CHECKING:
    import anthropic  # it takes seconds to load, in every process that collects this file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with serve(tmp_path_factory.mktemp("template")) as server:
        yield server


@pytest.fixture
def claude(server: ScriptedServer) -> Iterator[anthropic.Anthropic]:
    import anthropic

    server.answers.clear()
    with anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0) as client:
        yield client
    assert not server.answers and not server.manager._open


@pytest.fixture
def http(server: ScriptedServer) -> Iterator[httpx.Client]:
    server.answers.clear()
    headers = {"x-api-key": "key"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=20) as client:
        yield client


# Anthropic Messages -----------------------------------------------------------------------------

TOOL: Any = {"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}


def test_messages_in_a_loop_with_tools(server: ScriptedServer, claude: anthropic.Anthropic) -> None:
    server.answers += TURNS
    messages: list[Any] = [{"role": "user", "content": "Paris and Rome?"}]
    for _ in range(3):
        answer = claude.messages.create(
            model=MODEL,
            max_tokens=500,
            messages=messages,
            tools=[TOOL],
            system=[{"type": "text", "text": "Brief.", "cache_control": {"type": "ephemeral"}}],
            metadata={"user_id": "u"},
        )
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": [{"type": "text", "text": CITIES[str(block.input["city"])]}],
            }
            for block in answer.content
            if block.type == "tool_use"
        ]
        assert (answer.stop_reason == "tool_use") == bool(results)
        messages.append({"role": "user", "content": results})
    thinking, text = answer.content
    assert thinking.type == "thinking" and thinking.thinking == "I know."
    assert text.type == "text" and text.text == FINAL and answer.stop_reason == "end_turn"
    assert saw_both_answers(server) and "<|im_start|>system\nBrief." in server.prompts[-1]
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0


def test_the_stream_of_messages_is_the_whole(
    server: ScriptedServer, claude: anthropic.Anthropic
) -> None:
    server.answers += [TURNS[0]] * 2
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "?"}],
        "tools": [TOOL],
    }
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_stop") == 3
    for one, other in zip(final.content, whole.content, strict=True):
        ignored = {"id"}
        assert one.model_dump(exclude=ignored) == other.model_dump(exclude=ignored)
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)


def test_how_messages_end(server: ScriptedServer, claude: anthropic.Anthropic) -> None:
    user: Any = [{"role": "user", "content": "?"}]
    server.answers += ["One two STOP three", "One two three four five six seven"]
    stopped = claude.messages.create(
        model=MODEL, max_tokens=50, messages=user, stop_sequences=["STOP"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    cut = claude.messages.create(model=MODEL, max_tokens=2, messages=user)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


def test_count_tokens(server: ScriptedServer, claude: anthropic.Anthropic) -> None:
    user: Any = [{"role": "user", "content": "Hello"}]
    fields: dict[str, Any] = {"model": MODEL, "messages": user, "system": "Be.", "tools": [TOOL]}
    counted = claude.messages.count_tokens(**fields)
    server.answers.append("ok")
    answer = claude.messages.create(max_tokens=5, **fields)
    assert counted.input_tokens == answer.usage.input_tokens


def test_thinking_is_turned_off(server: ScriptedServer, claude: anthropic.Anthropic) -> None:
    user: Any = [{"role": "user", "content": "?"}]
    server.answers += ["plain", "<think>\na\n</think>\n\nb"]
    claude.messages.create(model=MODEL, max_tokens=50, messages=user, thinking={"type": "disabled"})
    assert server.prompts[-1].endswith("<think>\n\n</think>\n\n")
    answer = claude.messages.create(
        model=MODEL, max_tokens=50, messages=user, extra_body={"thinking": {"type": "adaptive"}}
    )
    assert [block.type for block in answer.content] == ["thinking", "text"]


def test_the_budget_of_reasoning(server: ScriptedServer, claude: anthropic.Anthropic) -> None:
    """It goes with the request, beside a constraint too. test_reasoning_budget.py has what becomes
    of it, test_grammar_server.py a real server."""
    user: Any = [{"role": "user", "content": "?"}]
    forced: Any = {"tools": [TOOL], "tool_choice": {"type": "any"}}
    constraints = []
    for budget, fields in ((12, {}), (100, {}), (12, forced)):
        server.answers.append("<think>\na\n</think>\n\nb")
        answer = claude.messages.create(
            model=MODEL,
            max_tokens=100,
            messages=user,
            thinking={"type": "enabled", "budget_tokens": budget},
            **fields,
        )
        # Where calls are forced, a text is none of them.
        kinds = ["thinking"] if fields else ["thinking", "text"]
        assert [block.type for block in answer.content] == kinds
        constraints.append(server.requests[-1].constraint)
    plain, unneeded, tools = constraints
    assert plain is not None and plain.kind == "any" and unneeded is None
    assert plain.param == "thinking.budget_tokens", "for a server that cannot keep it"
    assert tools is not None and tools.kind == "lark"
    for given in (plain, tools):
        assert given.budget is not None and given.budget.tokens == 12
    assert server.tokenizer.decode(plain.budget.closing) == "\n</think>\n\n"


def test_a_budget_without_thinking(server: ScriptedServer, http: httpx.Client) -> None:
    """The prompt has closed the reasoning: there is nothing to count. The client sends no such
    thing, its types have no budget of thinking that is off."""
    for kind in ("enabled", "disabled"):
        server.answers.append("b")
        body = {
            "model": MODEL,
            "max_tokens": 100,
            "messages": [{"role": "user", "content": "?"}],
            "thinking": {"type": kind, "budget_tokens": 12},
        }
        assert http.post("/v1/messages", json=body).status_code == 200
        constraint = server.requests[-1].constraint
        assert (constraint is None) == (kind == "disabled")


# Structured outputs -----------------------------------------------------------------------------


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


def test_a_parsed_answer(server: ScriptedServer, claude: anthropic.Anthropic) -> None:
    """A pydantic model as the format: whole, as a stream, and as the schema itself."""
    server.answers += ['{"city": "Paris", "degrees": 20}'] * 3
    fields: Any = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "?"}]}
    expected = Weather(city="Paris", degrees=20)
    whole = claude.messages.parse(output_format=Weather, **fields)
    assert whole.parsed_output == expected
    with claude.messages.stream(output_format=Weather, **fields) as stream:
        assert stream.get_final_message().parsed_output == expected
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    claude.messages.create(output_config=config, **fields)
    first, second, third = (request.constraint for request in server.requests[-3:])
    for given in (first, second, third):
        assert given is not None and given.kind == "json_schema"
        assert given.param == "output_config.format.schema"
        assert "</think>" in given.before, "the reasoning is free"
    assert first == second and third is not None and json.loads(third.text) == SCHEMA


def test_a_format_beside_tools(server: ScriptedServer, claude: anthropic.Anthropic) -> None:
    """The rule of the chat's `response_format`: JSON or a call, where a call is forced a call."""
    config: Any = {"format": {"type": "json_schema", "schema": {"const": "the end"}}}
    grammars = []
    for choice in ("auto", "any"):
        server.answers.append(call_text("Paris"))
        answer = claude.messages.create(
            model=MODEL,
            max_tokens=100,
            messages=[{"role": "user", "content": "?"}],
            tools=[TOOL],
            tool_choice={"type": choice},  # type: ignore[misc,arg-type]
            output_config=config,
        )
        assert [block.type for block in answer.content] == ["tool_use"]
        constraint = server.requests[-1].constraint
        assert constraint is not None and constraint.kind == "lark"
        grammars.append(constraint.text)
    auto, forced = grammars
    assert "the end" in auto and "get_weather" in auto
    assert "the end" not in forced and "get_weather" in forced


FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("format", "code", "param"),
    [
        ({"type": "json_object"}, "invalid_value", ".type"),
        ({"schema": SCHEMA}, "missing_field", ".type"),
        ({"type": "json_schema"}, "missing_field", ".schema"),
        ({"type": "json_schema", "schema": "{}"}, "invalid_type", ".schema"),
        ({**FORMAT, "name": "place"}, "unknown_parameter", ".name"),
        ({**FORMAT, "strict": True}, "unknown_parameter", ".strict"),
        ("json", "invalid_type", ""),
    ],
)
def test_what_a_format_refuses(http: httpx.Client, format: Any, code: str, param: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        error = _refused(http, {"output_config": {"format": format}}, path)
        assert (error["code"], error["param"]) == (code, f"output_config.format{param}")
        assert error["param"] in error["message"]


def test_what_a_format_cannot_go_with(http: httpx.Client) -> None:
    given = {"output_config": {"format": FORMAT}}
    unkept = {"type": "json_schema", "schema": {"properties": {"a": {"contains": {}}}}}
    for fields, code, param in (
        ({**given, "regex": "a"}, "invalid_combination", "regex"),
        ({**given, "ignore_eos": True}, "invalid_combination", "ignore_eos"),
        ({"output_config": {"format": unkept}}, "unsupported_schema", "/properties/a/contains"),
        ({"output_config": {"task_budget": 5}}, "unknown_parameter", "output_config.task_budget"),
        ({"output_format": FORMAT}, "unsupported_parameter", "output_format"),
    ):
        error = _refused(http, fields)
        assert (error["code"], error["param"]) == (code, param)


def _refused(http: httpx.Client, fields: Any, path: str = "/v1/messages") -> Any:
    """The error of a body with these fields."""
    user = [{"role": "user", "content": "x"}]
    body = {"model": MODEL, "messages": user, **fields}
    if path == "/v1/messages":
        body.setdefault("max_tokens", 5)
    response = http.post(path, json=body)
    answer = response.json()
    assert (response.status_code, answer["type"]) == (400, "error"), answer
    assert answer["error"]["type"] == "invalid_request_error"
    return answer["error"]


# Errors -----------------------------------------------------------------------------------------


def test_errors_as_the_client_knows_them(
    server: ScriptedServer, claude: anthropic.Anthropic
) -> None:
    import anthropic

    user: Any = [{"role": "user", "content": "?"}]
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="other", max_tokens=5, messages=user)
    body: Any = missing.value.body
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as bad:
        claude.messages.create(model=MODEL, max_tokens=0, messages=user)
    assert bad.value.body["error"]["param"] == "max_tokens"  # type: ignore[index]
    with (
        anthropic.Anthropic(base_url=server.url, api_key="no", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model=MODEL, max_tokens=5, messages=user)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"max_tokens": None}, "missing_field", "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "unsupported_parameter",
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "unsupported_parameter",
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "empty_input", "messages"),
        (
            {"tools": [{"type": "bash_20250124", "name": "x"}]},
            "unsupported_parameter",
            "tools[0].type",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "invalid_tool", "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "invalid_tool", "tools[1].name"),
        (
            {"tools": [{"name": "a", "input_schema": {"type": "array"}}]},
            "invalid_tool",
            "tools[0].input_schema.type",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "invalid_tool", "tool_choice.type"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
            "invalid_tool",
            "tool_choice",
        ),
        ({"mcp_servers": [{"name": "x"}]}, "unsupported_parameter", "mcp_servers"),
        ({"output_config": {"effort": "high"}}, "unsupported_parameter", "output_config.effort"),
        (
            {"chat_template_kwargs": {"reasoning_effort": "high"}},
            "unsupported_parameter",
            "chat_template_kwargs.reasoning_effort",
        ),
        ({"max_tokens": CONTEXT}, "context_length_exceeded", "max_tokens"),
        ({"stop_sequences": ["x"] * 33}, "invalid_value", "stop_sequences"),
        ({"stop_sequences": ["x"] * 9000}, "invalid_value", "stop_sequences"),  # a large body
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "x"},
                            {"type": "tool_result", "tool_use_id": "z", "content": "x"},
                        ],
                    }
                ],
                "system": "Be brief.",
            },
            "invalid_value",
            "messages[0].content[1].tool_use_id",
        ),
        ({"messages": [{"role": "assistant", "content": ""}]}, "invalid_value", "messages"),
    ],
)
def test_what_messages_refuses(http: httpx.Client, fields: Any, code: str, param: str) -> None:
    error = _refused(http, fields)
    assert (error["code"], error["param"]) == (code, param)


def test_both_ways_to_send_a_key(server: ScriptedServer) -> None:
    codes = []
    for headers in (
        [("x-api-key", "key")],
        [("authorization", "Bearer key")],
        [("x-api-key", "key"), ("authorization", "Bearer key")],
        [("x-api-key", "no")],
        [("x-api-key", "")],
        [],
    ):
        codes.append(httpx.get(f"{server.url}/v1/models", headers=headers).status_code)
    assert codes == [200, 200, 401, 401, 401, 401]
