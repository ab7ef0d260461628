"""Grammars of calls: they allow what a model of the family would write, and no other call."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from radix_runtime.constraint import Constraint
from radix_runtime.errors import RequestError
from radix_runtime.grammar.source import grammar_source
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.text.answer_grammar import AnswerGrammar
from radix_runtime.text.reasoning import reasoning_families
from radix_runtime.text.reasoning.think import Start
from radix_runtime.text.tool_grammar import ToolGrammar
from radix_runtime.text.tool_parsers import tool_parsers
from radix_runtime.text.tools import FunctionSpec, ToolSpec, ToolUse
from tests.runtime.bfcl import questions
from tests.runtime.parser_rig import FAMILIES, WEATHER, Calls, Schemas, make, parse, render
from tests.runtime.test_tool_parsers import _askable
from tests.runtime.tool_templates import TEMPLATES

SPECIAL = ("mistral", "kimi_k2", "deepseekv3", "deepseekv31", "gpt-oss", "llama3", "glm45")


@cache
def tokenizer(family: str) -> tokenizers.Tokenizer:
    """The demo model's, with the family's markers as special tokens where they are some."""
    found = tokenizers.Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    name = family.split()[0]
    if name in SPECIAL:
        found.add_special_tokens(list(tool_parsers.get(name).markers))
    return found


@cache
def guide(family: str) -> LLTokenizer:
    return LLTokenizer(tokenizer(family).to_str())


def grammar_of(
    family: str,
    use: ToolUse,
    kind: str = "required",
    *,
    reasoning: str = "",
    start: Start = "content",
    **options: Any,
) -> str:
    """`reasoning`: the family of what comes before, if anything does."""
    parser = tool_parsers.get(family.split()[0])
    form = parser.form_for(TEMPLATES[family])
    assert form is not None
    special = {t.content: i for i, t in tokenizer(family).get_added_tokens_decoder().items()}
    writer = ToolGrammar(form=form, markers=parser.markers, special_id=special.get)
    before = ""
    if reasoning:
        answer = AnswerGrammar(reasoning_families[reasoning].markers, special_id=special.get)
        before = answer.behind(reasoning_families[reasoning], start, final="")
    text = getattr(writer, kind)(use, **options)
    return grammar_source(Constraint("lark", text, before=before), set(special)).text


def follows(family: str, lark: str, text: str) -> bool:
    """Whether `text` is an answer that the grammar allows, from its beginning to its end."""
    matcher = LLMatcher(guide(family), lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer(family).encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def use_of(schemas: Schemas, **fields: Any) -> ToolUse:
    tools = [
        ToolSpec(type="function", function=FunctionSpec(name=name, parameters=schema))
        for name, schema in schemas.items()
    ]
    return ToolUse(tools=tools, **{"mode": "required", **fields})


def in_order(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Members in the order of the schema, in which a grammar has them."""
    return {key: arguments[key] for key in schema["properties"] if key in arguments}


def _cases(family: str) -> Iterator[tuple[Schemas, Calls]]:
    for category in ("simple_python", "multiple", "parallel"):
        for question in questions(category)[::40]:
            schemas = {name.replace(".", "_"): s for name, s in question.schemas.items()}
            calls = []
            for name, arguments in question.calls:
                name = name.replace(".", "_")
                calls.append((name, in_order(arguments, schemas[name])))
            has_all = all(
                set(schemas[name].get("required", [])) <= set(arguments)
                for name, arguments in calls
            )
            if has_all and _askable(family, schemas, calls):
                yield schemas, calls


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_model_would_write_is_allowed(family: str) -> None:
    count = 0
    for schemas, calls in _cases(family):
        count += 1
        text = written(family, calls)
        lark = grammar_of(family, use_of(schemas, is_parallel=len(calls) > 1))
        assert follows(family, lark, text), (text, lark)
        if family not in ("llama3", "gpt-oss"):
            free = grammar_of(family, use_of(schemas, mode="auto"), kind="strict")
            assert follows(family, free, "Let me see.\n" + text)
            assert follows(family, free, "No call.")
    assert count >= 10


def written(family: str, calls: Calls) -> str:
    """An answer of nothing but calls, without the ids that only a history has."""
    if family == "gpt-oss":
        return _harmony(calls)
    text = render(family, calls).removeprefix("\n")
    if family.startswith("mistral"):
        for i in range(len(calls)):
            text = text.replace(f', "id": "call{i:05}"', "").replace(f"[CALL_ID]call{i:05}", "")
    return text


def _harmony(calls: Calls) -> str:
    (name, arguments), *_ = calls
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return header + json.dumps(arguments, ensure_ascii=False)


def call(family: str, name: str = "get_weather", **arguments: Any) -> str:
    return written(family, [(name, arguments)])


STRICT = {
    "get_weather": {**WEATHER["get_weather"], "required": ["city"]},
    "get_time": {"type": "object", "properties": {}},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_right_call_is_not_allowed(family: str) -> None:
    lark = grammar_of(family, use_of(STRICT))
    good = call(family, city="Paris", days=3)
    assert follows(family, lark, good)
    assert follows(family, lark, call(family, "get_time"))
    for bad in (
        "",
        "Hello.",
        good[:-1],
        call(family, "other", city="Paris"),
        call(family, days=3),  # lacks the city
        call(family, city="Paris", days="many"),
        call(family, city="Paris", unknown=1),
        f"Hello. {good}",
    ):
        assert not follows(family, lark, bad), bad


@pytest.mark.parametrize("family", FAMILIES)
def test_one_tool_and_one_call(family: str) -> None:
    lark = grammar_of(family, use_of(STRICT, forced="get_time", is_parallel=False))
    assert follows(family, lark, call(family, "get_time"))
    assert not follows(family, lark, call(family, city="Paris"))
    if family != "gpt-oss":
        twice = written(family, [("get_time", {}), ("get_time", {})])
        assert not follows(family, lark, twice)
        assert follows(family, grammar_of(family, use_of(STRICT)), twice)


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_arguments_of_a_free_answer(family: str) -> None:
    lark = grammar_of(family, use_of(STRICT, mode="auto"), kind="strict")
    good = call(family, city="Paris")
    assert follows(family, lark, good)
    text = "<|channel|>final<|message|>Hello." if family == "gpt-oss" else "Hello."
    assert follows(family, lark, text)
    assert not follows(family, lark, call(family, "other", city="Paris"))
    assert not follows(family, lark, call(family, city="Paris", days="many"))


def test_calls_begin_behind_the_reasoning() -> None:
    good = call("hermes", city="Paris")
    for start, thought in (
        ("content", ""),
        ("reasoning", "Hm.\n</think>\n\n"),
        ("optional", "<think>\nHm.\n</think>\n\n"),
    ):
        reasoning = "" if start == "content" else "qwen3"
        lark = grammar_of("hermes", use_of(STRICT), reasoning=reasoning, start=start)
        assert follows("hermes", lark, thought + good)
        assert not follows("hermes", lark, f"{thought}Hello")
        if start == "optional":
            assert follows("hermes", lark, good)
        if start == "reasoning":
            assert not follows("hermes", lark, good)
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    lark = grammar_of("gpt-oss", use_of(STRICT), reasoning="gpt-oss", start="optional")
    assert follows("gpt-oss", lark, analysis + call("gpt-oss", city="Paris"))


def test_reasoning_is_no_free_text_before_a_call() -> None:
    """Where any text is allowed, too, calls are what their schemas say, and reasoning ends."""
    use = use_of(STRICT, mode="auto")
    lark = grammar_of("hermes", use, "strict", reasoning="qwen3", start="optional")
    wrong = call("hermes", "other", city="Paris")
    assert follows("hermes", lark, f"<think>\n{wrong}\n</think>\n\n" + call("hermes", city="Paris"))
    assert follows("hermes", lark, "Hello.")
    assert not follows("hermes", lark, f"<think>\n{wrong}")
    assert not follows("hermes", lark, f"<think>\nHm.\n</think>\n\n{wrong}")


def test_tools_or_a_schema() -> None:
    """With a response format the answer is either."""
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    lark = grammar_of("hermes", use_of(STRICT), schema=schema)
    assert follows("hermes", lark, '{"sum": 42}')
    assert follows("hermes", lark, call("hermes", city="Paris"))
    assert not follows("hermes", lark, '{"sum": "x"}')


def test_choices_between_tags_and_what_they_cannot_keep() -> None:
    kind = {"type": "string", "enum": ["C", "F"]}
    schemas: Schemas = {"f": {"type": "object", "properties": {"unit": kind}}}
    lark = grammar_of("glm45", use_of(schemas))
    assert follows("glm45", lark, call("glm45", "f", unit="C"))
    assert not follows("glm45", lark, call("glm45", "f", unit="K"))
    schemas["f"]["properties"]["unit"] = {"type": "string", "pattern": "^[A-Z]$"}
    with pytest.raises(RequestError) as caught:
        grammar_of("glm45", use_of(schemas))
    assert (caught.value.code, caught.value.param) == (
        "unsupported_schema",
        "/properties/unit/pattern",
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_any_walk_through_the_grammar_is_a_right_call(family: str) -> None:
    """Tokens drawn at random among those that are allowed make calls that are read back."""
    schema = {
        "type": "object",
        "properties": {
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "exact": {"type": "boolean"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["days", "unit"],
    }
    schemas: Schemas = {"get_weather": schema, "get_time": {"type": "object"}}
    lark = grammar_of(family, use_of(schemas, is_parallel=False))
    dice = random.Random(family)
    for _ in range(5):
        text = _walk(family, lark, dice)
        events, raw = parse(make(family, schemas), [text])
        assert raw == text
        assert [kind for kind, _ in events] == ["call", "arguments"]
        arguments = json.loads(events[1][1])
        if events[0][1] == "get_time":
            assert arguments == {}
        else:
            assert 0 <= arguments["days"] <= 99 and arguments["unit"] in ("C", "F")
            assert isinstance(arguments.get("exact", True), bool)


def _walk(family: str, lark: str, dice: random.Random) -> str:
    matcher = LLMatcher(guide(family), lark, log_level=0)
    ids: list[int] = []
    while not (matcher.is_accepting() and matcher.is_stopped()):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
        eos = guide(family).eos_token
        allowed = [i for i in allowed if i != eos]
        if not allowed:
            break
        ids.append(dice.choice(allowed))
        assert matcher.consume_token(ids[-1]) and len(ids) < 400
    return str(tokenizer(family).decode(ids, skip_special_tokens=False))
