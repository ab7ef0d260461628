"""What templates are given of tools: arguments as they take them, reasoning under their name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radix_runtime.text.chat_template import ChatTemplate
from tests.runtime.tool_templates import TEMPLATES

CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "f", "arguments": {"a": [1, "ü"]}},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "content": "1", "tool_call_id": "call00000"},
]


@pytest.mark.parametrize("family", TEMPLATES)
def test_tools_are_written(family: str) -> None:
    template = ChatTemplate(TEMPLATES[family], special_tokens={})
    assert template.takes_tools and not {"tools", "documents"} & template.variables(with_tools=True)
    tools = [{"type": "function", "function": {"name": "my_tool", "parameters": {}}}]
    assert "my_tool" in template.render(MESSAGES[:1], tools=tools)
    assert "my_tool" not in template.render(MESSAGES[:1])


@pytest.mark.parametrize(
    "written", ["c.function.arguments | tojson", "'' + c.function.arguments"], ids=["json", "text"]
)
def test_arguments_are_an_object_or_a_text(written: str) -> None:
    """Some templates write them as JSON, some add a text; both give the same prompt."""
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ " + written + " }}"
        "{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source, special_tokens={})
    expected = json.dumps({"a": [1, "ü"]}, ensure_ascii=False)
    assert template.render(MESSAGES) == expected
    assert CALL["function"]["arguments"] == {"a": [1, "ü"]}  # type: ignore[index]


def test_reasoning_under_another_name() -> None:
    source = (
        "{% for message in messages %}{% if message.thinking %}<{{ message.thinking }}>{% endif %}"
        "{% endfor %}"
    )
    template = ChatTemplate(source, special_tokens={})
    assert template.render(MESSAGES) == "<Hm.>"
    with_content = [MESSAGES[0], {**MESSAGES[1], "content": "I look."}, MESSAGES[2]]
    assert template.render(with_content) == ""
