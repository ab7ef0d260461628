"""What the tests of parsers share: answers of every family, and how they are parsed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise, takewhile
from typing import Any

from radix_runtime.text.chat_template import ChatTemplate
from radix_runtime.text.machine import MAX_HEAD, Event, Parser
from radix_runtime.text.tool_parsers import tool_parsers
from tests.runtime.tool_templates import ENDS, TEMPLATES

FULL = bool(os.environ.get("RADIX_TEST_FULL"))
FAMILIES = sorted(TEMPLATES)
Schemas = dict[str, dict[str, Any]]
Calls = Sequence[tuple[str, Any]]
WEATHER: Schemas = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": ["number", "null"]},
            "tags": {"type": "array"},
            "more": {},
        },
    }
}


def make(family: str, schemas: Schemas) -> Parser:
    return tool_parsers.get(family.split()[0])(schemas)


@cache
def _template(family: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[family], special_tokens={})


def render(family: str, calls: Calls, *, content: str = "", **fields: Any) -> str:
    """An answer with these calls, as a model of the family writes it."""
    template = _template(family)
    user = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": content, **fields}
    if calls:
        answer["tool_calls"] = [
            {
                "id": _call_id(family, name, number),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
    prompt = template.render([user])
    whole = template.render([user, answer], add_generation_prompt=False)
    pairs = zip(prompt, whole, strict=False)
    text = whole[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
    for end in ENDS:
        text = text.removesuffix(end)
    if text.startswith(_NO_THOUGHT):
        text = text.removeprefix(_NO_THOUGHT).removeprefix("\n")
    return text


_NO_THOUGHT = "\n<think></think>"  # GLM's, which the reasoning parser takes away


def _call_id(family: str, name: str, number: int) -> str:
    if family == "kimi_k2":
        return f"functions.{name}:{number}"
    return f"call{number:05}"


def parse(parser: Parser, pieces: Iterable[str]) -> tuple[list[tuple[str, str]], str]:
    """The events, those of one kind in a row as one, and the text that they stand for."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    events += parser.finish()
    merged: list[tuple[str, str]] = []
    for event in events:
        if event.kind == "markup":
            continue
        if merged and merged[-1][0] == event.kind != "call":
            merged[-1] = (event.kind, merged[-1][1] + event.text)
        elif event.text:
            merged.append((event.kind, event.text))
    return merged, "".join(event.raw for event in events)


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def calls_of(events: Iterable[tuple[str, str]]) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = []
    for kind, text in events:
        if kind == "call":
            calls.append((text, None))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], json.loads(text))
    return calls


def text_of(events: Iterable[tuple[str, str]], kind: str = "content") -> str:
    return "".join(text for k, text in events if k == kind)


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": ""},
    {"city": "Zürich \U0001f1e8\U0001f1ed", "days": 3},
    {"city": 'a "quoted" \\ back\\slash', "days": -1, "exact": True},
    {"city": "two\nlines\n", "where": None, "tags": []},
    {"city": "</tool_call", "where": 2.5, "tags": ["</tool_call>", '"', "\\", {"a": [None]}]},
    {"city": "5", "days": 0, "exact": False, "more": {"deep": {"er": ["]", "}"]}}},
    {"city": "null", "more": [1, "2", None]},
    {"city": " padded "},
    {"city": "{}", "more": "plain text"},
]


PLAIN = [
    "",
    "Hello.",
    "a < b and b > c; {x} [y] <|z|>",
    "<tool_call",
    "<tool_call>hello</tool_call>",
    '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
    '<tool_call>{"arguments": {}, "name": "f"}</tool_call>',
    '{"name": "not_a_tool", "parameters": {}}',
    '{"answer": 42}',
    "[TOOL_CALLS]",
    "[TOOL_CALLS][1, 2]",
    "[TOOL_CALLS] no name {",
    "<|python_tag|>import math",
    "<function=>x</function>",
    "<function=a b>",
    "<minimax:tool_call>\n<invoke>",
    "<|tool_calls_section_begin|><|tool_calls_section_end|>",
    "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
    "<|channel|>commentary<|message|>x",
    "\n\n<tool_call>\n\n",
    "x" * 3 * MAX_HEAD,
    "<tool_call>" + " " * 3 * MAX_HEAD + '{"name": "f", "arguments": {}}',
    '<tool_call>{"name": "' + "f" * 3 * MAX_HEAD + '", "arguments": {}}',
]
