"""Calls that an answer must make, on the demo model and on random weights: they are read back and
obey the schemas of real functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from radix_runtime import Engine
from tests.runtime.bfcl import Question, questions
from tests.runtime.parity import engine
from tests.runtime.parser_rig import FULL
from tests.runtime.tool_templates import HERMES, KIMI_K2

TEMPLATES = {"hermes": HERMES, "kimi_k2": KIMI_K2}
# A model of chance ends no text, number or list: what ends one is favoured, and all are bounded.
ENDS = '" ] } , "} "]'
BOUNDS = {"string": {"maxLength": 20}, "array": {"maxItems": 3}}
COUNT = 400 if FULL else 12


@pytest.fixture(scope="module", params=["hermes demo", "hermes random", "kimi_k2 demo"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    family, weights = request.param.split()
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATES[family])
    load = {"load_format": "dummy", "random_seed": 1} if weights == "random" else {}
    with engine(None, chat_template=str(file), max_running_requests=16, **load) as made:
        yield made


def _bounded(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bounded(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    shown = {
        key: _bounded(value)
        for key, value in schema.items()
        if key != "description" or not isinstance(value, str)  # prompts stay short
    }
    bounds = BOUNDS.get(kind, {}) if isinstance(kind, str) and "enum" not in schema else {}
    return {**shown, **bounds}


def _tools(question: Question) -> list[dict[str, Any]]:
    found = []
    for name, schema in question.schemas.items():
        function = {"name": name.replace(".", "_")[:64], "parameters": _bounded(schema)}
        found.append({"type": "function", "function": function})
    return found


def _ask(served: Engine, question: Question, number: int) -> tuple[bool, list[Any]]:
    """Whether the answer ended with a call, and the calls, which must be right ones."""
    tools = _tools(question)
    choice: Any = "required"
    if number % 2:
        choice = {"type": "function", "function": {"name": tools[-1]["function"]["name"]}}
    variables = served.tokenizer.chat_template.variables(with_tools=True)  # type: ignore[union-attr]
    closing = served.tokenizer.encode(ENDS, False)  # type: ignore[union-attr]
    output = served.chat(
        [{"role": "user", "content": "What is 17 + 25?"}],
        {
            "temperature": (number % 3) / 2,
            "seed": number,
            "max_new_tokens": 600,
            "logit_bias": dict.fromkeys(closing, 20.0),
        },
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=False,
        chat_template_kwargs=({"enable_thinking": False} if "enable_thinking" in variables else {}),
    )
    message = output["message"]
    if output["meta_info"]["finish_reason"]["type"] != "stop":
        return False, []
    (call,) = message["tool_calls"]
    name = call["function"]["name"]
    assert message["content"] is None
    assert choice == "required" or name == choice["function"]["name"]
    schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}[name]
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    return True, message["tool_calls"]


def test_forced_calls_are_right_calls(served: Engine) -> None:
    asked = questions("multiple")[: COUNT // 2] + questions("simple_python")[: COUNT - COUNT // 2]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda pair: _ask(served, pair[1], pair[0]), enumerate(asked)))
    ended = sum(1 for has_ended, _ in answers if has_ended)
    assert ended >= 0.95 * len(answers), ended
