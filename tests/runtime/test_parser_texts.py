"""Parsers take any text: nothing is lost, the stream is the whole, time is linear."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from radix_runtime.text.json_value import JsonValue
from radix_runtime.text.machine import Parser
from radix_runtime.text.reasoning import reasoning_families
from tests.runtime.parser_rig import (
    ARGUMENTS,
    FAMILIES,
    FULL,
    PLAIN,
    WEATHER,
    cut,
    make,
    parse,
    render,
)


def _parsers(family: str) -> Callable[[], Parser]:
    if family in reasoning_families:
        return lambda: reasoning_families[family].parser("")
    return lambda: make(family.removeprefix("tools "), WEATHER)


def _seeds() -> list[str]:
    calls = [("get_weather", arguments) for arguments in ARGUMENTS[2:4]]
    answers = [render(family, calls, content="Hi") for family in FAMILIES]
    return [*answers, *PLAIN[:20], "<think>\na\n</think>\n\nb", render("gpt-oss", calls)]


@pytest.mark.parametrize("family", [*(f"tools {f}" for f in FAMILIES), *reasoning_families])
def test_any_text_is_taken_and_none_of_it_is_lost(family: str) -> None:
    """Mutations of real answers, cut anywhere: no error, no byte lost, the stream is the whole."""
    dice = random.Random(family)
    new = _parsers(family)
    seeds = _seeds()
    own = (
        [render(family.removeprefix("tools "), [("get_weather", ARGUMENTS[2])])]
        if (family.startswith("tools "))
        else [seeds[-2]]
    )
    for _ in range(6500 if FULL else 150):
        text = _mutated(dice, dice.choice(own * 20 + seeds), seeds)
        whole, raw = parse(new(), [text])
        assert raw == text
        some = [dice.randrange(len(text) + 1) for _ in range(dice.randint(1, 20))]
        assert parse(new(), cut(text, some)) == (whole, text)
        assert parse(new(), text) == (whole, text)


def _mutated(dice: random.Random, text: str, seeds: Sequence[str]) -> str:
    for _ in range(dice.randint(0, 6)):
        start = dice.randrange(len(text) + 1)
        end = min(len(text), start + dice.randint(0, 12))
        other = dice.choice(seeds)
        from_ = dice.randrange(len(other) + 1)
        new = dice.choice(
            ["", '"', "\\", "{", "}", "]", "<", "\n", " ", ">", ",", text[start:end] * 2,
             other[from_ : from_ + dice.randint(0, 60)], chr(dice.randrange(32, 0x300))]
        )  # fmt: skip
        text = text[:start] + new + text[end:]
    return text


LONG = {
    "plain": "Once upon a time. ",
    "openings": "<tool_call>",
    "newlines": "\n",
    "braces": '{"name": "get_weather", ',
    "calls": '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>\n',
    "heads": '<tool_call>{"name": "f", "type": "a", ',
    "parameters": "<function=get_weather><parameter=city>x</parameter></function>",
    "sections": "[TOOL_CALLS]get_weather{}",
    "think": "<think>",
    "channels": "<|channel|>analysis<|message|><|end|><|start|>assistant",
}
_OPENED = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": "',
    "qwen3_coder": "<function=get_weather>\n<parameter=more>\n",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>",
}


@pytest.mark.skipif(not FULL, reason="timed: under make test-full")
@pytest.mark.parametrize("family", [*(f"tools {f}" for f in FAMILIES), *reasoning_families])
def test_time_is_linear(family: str) -> None:
    """Of hostile texts of up to a megabyte, in one piece or in small ones, four times as much takes
    four times as long; twelve times would be quadratic growth."""
    new = _parsers(family)
    size = 1 << 20
    before = _OPENED.get(family.removeprefix("tools "), "")
    texts = [*LONG.values(), *(before + filler for filler in ("\\", '\\"', "<", "[", "\n"))]
    for filler in texts:
        start = before if filler.startswith(before) and before else ""
        unit = filler.removeprefix(start)
        for piece in (size, 16):
            short = _seconds(new, start + unit * (size // 4 // len(unit)), piece)
            long = _seconds(new, start + unit * (size // len(unit)), piece)
            assert long < 12 * short + 0.02, (filler, piece, short, long)


def _seconds(new: Callable[[], Parser], text: str, piece: int) -> float:
    """The least of three runs, in CPU time of this thread."""
    best = 1e9
    for _ in range(3):
        parser = new()
        began = time.thread_time()
        for start in range(0, len(text), piece):
            parser.push(text[start : start + piece])
        parser.finish()
        best = min(best, time.thread_time() - began)
    return best


def test_the_end_of_a_json_value() -> None:
    dice = random.Random(5)
    values: list[Any] = [
        {}, [], {"a": "}"}, [1, -2.5e3, True, None, "\\\"]"], {"a": {"b": [{}, "\u2028"]}},
    ]  # fmt: skip
    for value in values:
        text = json.dumps(value) + ' tail "}'
        for _ in range(20):
            scanner = JsonValue()
            end = 0
            pieces = cut(text, [dice.randrange(len(text)) for _ in range(dice.randint(0, 9))])
            for piece in pieces:
                end += scanner.follow(piece, 0)
                if scanner.is_closed:
                    break
            assert json.loads(text[:end]) == value
