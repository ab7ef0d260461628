"""Parsers of calls and of reasoning: what a template writes is read back; a stream is the whole."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.text.answer_parser import AnswerMessage, AnswerParser
from radix_runtime.text.reasoning import reasoning_families
from radix_runtime.text.tokenizer import load_tokenizer
from radix_runtime.text.tool_parsers import tool_parsers
from radix_runtime.text.tool_parsers.tagged import TaggedCalls
from tests.runtime.bfcl import CATEGORIES, questions
from tests.runtime.parser_rig import (
    ARGUMENTS,
    FAMILIES,
    FULL,
    PLAIN,
    WEATHER,
    Calls,
    Schemas,
    calls_of,
    cut,
    make,
    parse,
    render,
    text_of,
)

# The calls of a benchmark ----------------------------------------------------------------------


def _fits(value: Any, schema: Any) -> bool:
    """Whether a value can be told from a string by its schema, and has its type."""
    given = schema.get("type") if isinstance(schema, dict) else None
    kinds: dict[Any, tuple[type, ...]] = {
        "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
        "array": (list,), "object": (dict,), None: (int, float, bool, list, dict),
    }  # fmt: skip
    if isinstance(value, bool):
        return given in ("boolean", None)
    return isinstance(value, kinds.get(given, ()))


def _askable(family: str, schemas: Schemas, calls: Calls) -> bool:
    """Between tags a value is text: one whose type is not its schema's cannot come back."""
    if not issubclass(tool_parsers.get(family.split()[0]), TaggedCalls):
        return True
    for name, arguments in calls:
        properties = schemas[name].get("properties", {})
        if not all(_fits(value, properties.get(key, {})) for key, value in arguments.items()):
            return False
    return True


def _allowed(name: str) -> str:
    """The benchmark's names as an API takes them."""
    return name.replace(".", "_")


def _cases(family: str, every: int) -> Iterable[tuple[Schemas, Calls]]:
    taken = 0
    left_out = 0
    for category in CATEGORIES:
        for question in questions(category)[::every]:
            schemas = {_allowed(name): schema for name, schema in question.schemas.items()}
            calls = [(_allowed(name), arguments) for name, arguments in question.calls]
            if not _askable(family, schemas, calls):
                left_out += 1
                continue
            taken += 1
            yield schemas, calls
    assert taken > 9 * left_out


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_read_as_they_were_meant(family: str) -> None:
    """Whole, character by character, by token and cut at random: equal events, true arguments."""
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    dice = random.Random(family)
    contents = ["", "Let me see.", "Two\nlines\n\nand <angles> {braces}."]
    for schemas, calls in _cases(family, every=1 if FULL else 37):
        content = "" if family == "llama3" else dice.choice(contents)
        text = render(family, calls, content=content)
        whole, raw = parse(make(family, schemas), [text])
        assert raw == text
        assert calls_of(whole) == list(calls)
        if family != "gpt-oss":  # whose content is the reasoning parser's to find
            assert text_of(whole) == content
        tokens = [tokenizer.id_to_bytes(i) for i in tokenizer.encode(text, False)]
        places = [len(b"".join(tokens[:i]).decode("utf-8", "ignore")) for i in range(len(tokens))]
        some = [dice.randrange(len(text) + 1) for _ in range(dice.randint(1, 12))]
        for pieces in (text, cut(text, places), cut(text, some)):
            assert parse(make(family, schemas), pieces) == (whole, text)


@pytest.mark.parametrize("family", FAMILIES)
def test_template_parser_template_is_the_identity(family: str) -> None:
    """An answer that was parsed and comes back in the history is the text that the model wrote."""
    dice = random.Random(family)
    for schemas, calls in _cases(family, every=5 if FULL else 31):
        content = "" if family == "llama3" else dice.choice(["", "Let me see."])
        reasoning = {}
        if family in ("hermes", "glm45", "minimax-m2", "gpt-oss") and dice.random() < 0.5:
            reasoning = {"reasoning_content": "First this,\nthen that."}
        text = render(family, calls, content=content, **reasoning)
        message = _message(family, schemas, text, thinks=bool(reasoning))
        entry = message.as_openai()
        again = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in entry["tool_calls"]
        ]
        assert message.reasoning == reasoning.get("reasoning_content", "")
        back = render(family, again, content=entry["content"] or "", **reasoning)
        assert back == text


_REASONING = {"hermes": "qwen3", "glm45": "glm45", "minimax-m2": "minimax", "gpt-oss": "gpt-oss"}


def _message(family: str, schemas: Schemas, text: str, *, thinks: bool) -> AnswerMessage:
    reasoning = None
    if family in _REASONING:
        prompt = "<think>\n" if thinks else "</think>\n\n"
        is_open = family == "minimax-m2"  # whose prompt begins or ends the reasoning
        reasoning = reasoning_families[_REASONING[family]].parser(prompt if is_open else "")
    tools = tool_parsers.get(family.split()[0])(schemas)
    parser = AnswerParser(reasoning, tools)
    message = AnswerMessage()
    message.extend(parser.push(text))
    message.extend(parser.finish())
    return message


# Values of every kind ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_every_kind(family: str) -> None:
    calls = [("get_weather", arguments) for arguments in ARGUMENTS]
    text = render(family, calls)
    for pieces in ([text], text, cut(text, range(0, len(text), 7))):
        events, raw = parse(make(family, WEATHER), pieces)
        assert calls_of(events) == calls
        assert (text_of(events), raw) == ("", text)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_is_cut_keeps_what_there_is(family: str) -> None:
    """Every beginning of an answer: nothing is lost, and the arguments are a beginning too."""
    text = render(family, [("get_weather", {"city": "Par</is", "days": 3})], content="")
    whole, _ = parse(make(family, WEATHER), [text])
    arguments = text_of(whole, "arguments")
    for end in range(len(text)):
        events, raw = parse(make(family, WEATHER), [text[:end]])
        assert raw == text[:end]
        assert arguments.startswith(text_of(events, "arguments"))
        if not any(kind == "call" for kind, _ in events):
            assert text_of(events) == text[:end]


# What is no call --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_call_stays_content(family: str) -> None:
    for text in PLAIN:
        for pieces in ([text], text):
            events, raw = parse(make(family, WEATHER), pieces)
            assert events == ([("content", text)] if text else []), text[:80]
            assert raw == text


def test_text_around_calls_stays_content() -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    text = f"Before.\n\n{call}\n\nBetween. {call} \n{call}\n"
    events, raw = parse(make("hermes", WEATHER), [text])
    assert text_of(events) == "Before.\n\n\nBetween. " and raw == text
    assert len(calls_of(events)) == 3


def test_a_call_that_breaks_ends_there() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call> and on'
    events, raw = parse(make("hermes", WEATHER), text)
    assert events[:2] == [("call", "f"), ("arguments", '{"a": [1')]
    assert raw == text and text_of(events).endswith(" and on")


def test_llama3_without_a_tag_calls_known_tools_only() -> None:
    for name, is_call in (("get_weather", True), ("other", False)):
        text = json.dumps({"name": name, "parameters": {"city": "x"}})
        events, _ = parse(make("llama3", WEATHER), text)
        assert (events[0][0] == "call") is is_call
        events, _ = parse(make("llama3", WEATHER), f"<|python_tag|>{text}")
        assert events[0][0] == "call"


def test_what_models_leave_out() -> None:
    """Forms that are met in answers though no template writes them."""
    no_tag = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
    events, _ = parse(make("qwen3_coder", WEATHER), no_tag)
    assert calls_of(events) == [("get_weather", {"city": "Paris"})]
    no_end = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}'
    events, _ = parse(make("hermes", WEATHER), f"{no_end}\n{no_end}")
    assert calls_of(events) == [("get_weather", {"city": "Paris"})] * 2
    typed = '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}'
    events, _ = parse(make("llama3", WEATHER), typed)
    assert calls_of(events) == [("get_weather", {"city": "Paris"})]
    spaced = '[TOOL_CALLS] [{"name": "get_weather", "arguments": {}}]'
    events, _ = parse(make("mistral", WEATHER), spaced)
    assert calls_of(events) == [("get_weather", {})]
    close = "<tool_call>get_weather<arg_key>days</arg_key><arg_value>True</arg_value></tool_call>"
    events, _ = parse(make("glm45", WEATHER), close)
    assert calls_of(events) == [("get_weather", {"days": True})]
    absent = '<tool_call>{"name": "get_weather"}</tool_call>'
    events, _ = parse(make("hermes", WEATHER), absent)
    assert calls_of(events) == [("get_weather", {})]


# Reasoning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "<|im_start|>assistant\n", "<think>\na\n\nb\n</think>\n\nHi", "a\n\nb", "Hi"),
        ("qwen3", "<|im_start|>assistant\n", "Hi <think> there", "", "Hi <think> there"),
        ("qwen3", "assistant\n<think>\n", "a\n</think>\n\nHi", "a", "Hi"),
        ("qwen3", "<think>\n\n</think>\n\n", "Hi </think>", "", "Hi </think>"),
        ("qwen3", "", "<think>\n\n</think>\n\nHi", "", "Hi"),
        ("qwen3", "", "<think>never closed", "never closed", ""),
        ("deepseek-r1", "<｜Assistant｜><think>\n", "a</think>Hi", "a", "Hi"),
        ("deepseek-r1", "<｜Assistant｜>", "<think>\na\n</think>\n\n\nHi", "a", "\nHi"),
        ("deepseek-r1", "<｜Assistant｜>", "a, no end", "a, no end", ""),
        ("deepseek-r1", "<｜Assistant｜></think>", "Hi", "", "Hi"),
        ("glm45", "<|assistant|>", "\n<think>a</think>\nHi", "a", "Hi"),
        ("glm45", "<|assistant|>\n<think></think>", "\nHi", "", "\nHi"),
        ("glm45", "<|assistant|>", " \n\n\n<think>a</think>Hi", "a", "Hi"),
        ("glm45", "<|assistant|>", "\n\n\n\n\n<think>a", "", "\n\n\n\n\n<think>a"),
        ("minimax", "]~b]ai\n<think>\n", "a </thinker>\n</think>\n\nHi", "a </thinker>", "Hi"),
        (
            "gpt-oss", "<|start|>assistant",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            "a", "Hi",
        ),
        ("gpt-oss", "<|start|>assistant", "Hi, no channel", "", "Hi, no channel"),
        (
            "gpt-oss", "<|start|>assistant",
            "<|channel|>commentary<|message|>I will.<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>Hi", "b", "I will.Hi",
        ),
    ],
)  # fmt: skip
def test_reasoning(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], text, cut(text, range(0, len(text), 5))):
        events, raw = parse(reasoning_families[name].parser(prompt), pieces)
        assert (text_of(events, "reasoning"), text_of(events)) == (reasoning, content)
        assert raw == text


def test_a_parser_tells_when_reasoning_ends() -> None:
    parser = AnswerParser(reasoning_families["qwen3"].parser(""), None)
    states = []
    for piece in ("<think>", "abc", "</think>", "\n\nHi", "!"):
        parser.push(piece)
        states.append((parser.in_reasoning, parser.behind_reasoning))
    assert states == [(False, None), (True, None), (False, 0), (False, 4), (False, 5)]
