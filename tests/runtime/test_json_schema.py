"""JSON Schemas: rewritten to what means the same, refused by name, and never kept too loosely."""

from __future__ import annotations

import json
import random
import re
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from radix_runtime.errors import RequestError
from radix_runtime.text import json_schema
from radix_runtime.text.json_schema import REFUSALS, normalise
from radix_runtime.text.schema_exclusion import are_disjoint
from radix_runtime.text.schema_negation import negation, pattern_of_others
from radix_runtime.text.schema_walk import find_keyword
from tests.runtime.grammar_texts import accepts, schema_matcher

SUITE = Path(sys.prefix) / "suites" / "jsonschema-4.26.0.tar.gz"
DRAFT = "jsonschema-4.26.0/json/tests/draft2020-12/"

VALUES = [None, True, False, 0, 1, -1, 2, 5, 1.5, -0.5, "", "a", "b", "ab", "abc", "ß", [], [1],
          ["a"], [1, "a"], {}, {"a": 1}, {"b": 1}, {"a": "x", "b": 2}, {"a": None}, {"c": []},
          {"a": {"b": 1}}, {"a": "a"}, {"ab": 1}, {"a": 1, "b": 1, "c": 1}]  # fmt: skip
TYPES = ["array", "boolean", "integer", "null", "number", "object", "string"]


def is_valid(schema: Any, value: Any) -> bool:
    return bool(Draft202012Validator(schema).is_valid(value))


class Schemas:
    """Random schemas of the keywords that are rewritten, and of those beside them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def schema(self, depth: int) -> Any:
        if depth == 0 or self.random.random() < 0.1:
            return self.random.choice([True, False, {}, self.plain(), self.plain()])
        made: dict[str, Any] = self.plain() if self.random.random() < 0.7 else {}
        for _ in range(self.random.choice([0, 1, 1, 2])):
            made.update(self.applied(depth - 1))
        return made

    def plain(self) -> dict[str, Any]:
        pick = self.random.choice
        number = self.random.randrange(3)
        return pick(
            [
                {"type": pick(TYPES)},
                {"type": self.random.sample(TYPES, 2)},
                {"const": pick(VALUES)},
                {"enum": self.random.sample(VALUES, 3)},
                {"enum": self.random.sample(["a", "b", "ab", "", 1, 2, None, True], 3)},
                {"required": self.random.sample(["a", "b", "c"], number)},
                {"type": "object", "required": [pick("abc")]},
                {pick(["minLength", "maxLength"]): number, "type": "string"},
                {pick(["minimum", "exclusiveMaximum", "maximum", "exclusiveMinimum"]): number},
                {pick(["minItems", "maxItems", "minProperties", "maxProperties"]): number},
                {"additionalProperties": False, "properties": {pick("abc"): True}},
                {"$ref": "#/$defs/one"},
            ]
        )

    def applied(self, depth: int) -> dict[str, Any]:
        keyword = self.random.choice(
            ["not", "if", "oneOf", "anyOf", "allOf", "properties", "dependentRequired",
             "dependentSchemas", "propertyNames", "items", "unevaluatedProperties"]
        )  # fmt: skip
        match keyword:
            case "if":
                made = {"if": self.schema(depth)}
                for part in self.random.sample(["then", "else"], self.random.randrange(3)):
                    made[part] = self.schema(depth)
                return made
            case "oneOf" | "anyOf" | "allOf":
                count = self.random.randrange(1, 4)
                return {keyword: [self.schema(depth) for _ in range(count)]}
            case "properties":
                return {keyword: {name: self.schema(depth) for name in self.names()}}
            case "dependentRequired":
                return {keyword: {name: self.names() for name in self.names()}}
            case "dependentSchemas":
                return {keyword: {name: self.schema(depth) for name in self.names()}}
            case "propertyNames":
                rules = [{"pattern": "^a"}, {"enum": ["a", "b"]}, {"maxLength": 1}, {"const": "a"}]
                return {keyword: self.random.choice(rules)}
            case "unevaluatedProperties":
                return {keyword: False}
            case _:
                return {keyword: self.schema(depth)}

    def names(self) -> list[str]:
        return self.random.sample(["a", "b", "c"], self.random.randrange(3))


@pytest.mark.parametrize("given", [None, 1], ids=["fresh", "1"])
def test_rewriting_keeps_the_meaning(given: int | None) -> None:
    seed = given or random.SystemRandom().randrange(1 << 30)
    schemas = Schemas(seed)
    served = 0
    for _ in range(2_000):
        schema = schemas.schema(3)
        if not isinstance(schema, dict):
            continue
        schema["$defs"] = {"one": schemas.plain()}
        if schema["$defs"]["one"].get("$ref"):
            continue
        try:
            normal = normalise(schema).schema
        except RequestError as error:
            assert error.code == "unsupported_schema", (seed, schema, error.message)
            continue
        served += 1
        for value in VALUES:
            same = is_valid(schema, value) == is_valid(normal, value)
            assert same, (seed, json.dumps(schema), json.dumps(normal), value)
        for gone in ("not", "if", "then", "oneOf", "dependentRequired", "unevaluatedProperties"):
            assert find_keyword(normal, gone) is None
    assert served > 800


@pytest.mark.parametrize("given", [None, 2], ids=["fresh", "2"])
def test_opposites_and_exclusion(given: int | None) -> None:
    seed = given or random.SystemRandom().randrange(1 << 30)
    schemas = Schemas(seed)
    found: Counter[str] = Counter()
    for _ in range(3_000):
        document = {"$defs": {"one": {"type": schemas.random.choice(TYPES)}}}
        first, second = schemas.schema(2), schemas.schema(2)
        of_first = [is_valid(_in(document, first), value) for value in VALUES]
        opposite = negation(first, document)
        if opposite is not None:
            found["opposite"] += 1
            against = [is_valid(_in(document, opposite), value) for value in VALUES]
            assert against == [not valid for valid in of_first], (seed, first, opposite)
        if are_disjoint(first, second, document):
            found["disjoint"] += 1
            of_second = [is_valid(_in(document, second), value) for value in VALUES]
            assert not any(a and b for a, b in zip(of_first, of_second, strict=True)), (
                seed, first, second,
            )  # fmt: skip
    assert found["opposite"] > 500 and found["disjoint"] > 300


def _in(document: dict[str, Any], schema: Any) -> dict[str, Any]:
    return {**document, "allOf": [schema]}


@pytest.mark.parametrize("texts", [["ab"], ["a", "ab", ""], ["-", "]", "^x", "a-z"], ["ß", "\\"]])
def test_the_pattern_of_others(texts: list[str]) -> None:
    pattern = pattern_of_others(texts)
    matcher = schema_matcher({"type": "string", "pattern": pattern})
    for text in [*texts, "a", "b", "abc", "", "-", "^", "ßß", "]]", "\\\\", "x\\"]:
        assert bool(re.search(pattern, text)) == (text not in texts)
        assert accepts(matcher, json.dumps(text, ensure_ascii=False)) == (text not in texts)


PATTERNS = ["^[^\\\\]*$", '^[^"]$', "^[^\\n]$", "^.$", "^[^a]$", "^[^/\\\\:]+$", "^[\\s\\S]$",
            "^[^\\\\\\n]*$", '^[^\\s"]+$', "^[\\n]$", "^[^!-\\]]$",
            "^a\\[b[^\\]]$", "^[]a]$"]  # fmt: skip
CHARACTERS = ["\\", '"', "\n", "\t", "\x01", "\x1f", "a", "/", "é", " ", "a[b", "a[b]", "a[b\\"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_keep_their_characters_in_json(pattern: str) -> None:
    matcher = schema_matcher({"type": "string", "pattern": pattern})
    wrong = []
    for text in CHARACTERS:
        spelled = {json.dumps(text), json.dumps(text, ensure_ascii=False)}
        if any(accepts(matcher, one) for one in spelled) and not re.search(pattern, text):
            wrong.append(text)
    assert wrong == []
    assert any(accepts(matcher, json.dumps(text)) for text in CHARACTERS)


# What is refused ------------------------------------------------------------------------------

REFUSED = [
    ({"not": {"pattern": "a"}}, "unsupported_schema", "/not"),
    ({"properties": {"a/b": {"not": {"items": {}}}}}, "unsupported_schema", "/properties/a~1b/not"),
    ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "unsupported_schema", "/oneOf"),
    ({"if": {"pattern": "a"}, "then": False}, "unsupported_schema", "/if"),
    ({"uniqueItems": True}, "unsupported_schema", "/uniqueItems"),
    ({"contains": {}}, "unsupported_schema", "/contains"),
    ({"propertyNames": {"format": "date"}}, "unsupported_schema", "/propertyNames"),
    ({"format": "regex"}, "unsupported_schema", "/format"),
    ({"$dynamicRef": "#a"}, "unsupported_schema", "/$dynamicRef"),
    ({"allOf": [{}], "unevaluatedProperties": False}, "unsupported_schema",
     "/unevaluatedProperties"),
    ({"allOf": [{}], "unevaluatedItems": False}, "unsupported_schema", "/unevaluatedItems"),
    ({"$ref": "http://a.b/c"}, "invalid_schema", "/$ref"),
    ({"$ref": "#/nothing"}, "invalid_schema", "/$ref"),
    ({"$ref": "#"}, "invalid_schema", "/$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
     "invalid_schema", None),
    ({"properties": {str(i): {} for i in range(1001)}}, "invalid_schema", ""),
    ({"enum": list(range(10_001))}, "invalid_schema", ""),
    ({"allOf": [{} for _ in range(2_000)]}, "invalid_schema", None),
    ([], "invalid_schema", None),
    (True, "invalid_schema", None),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "code", "pointer"), REFUSED)
def test_refusals_name_the_place(schema: Any, code: str, pointer: str | None) -> None:
    with pytest.raises(RequestError) as error:
        normalise(schema)
    assert (error.value.status, error.value.code) == (400, code)
    if pointer is not None:
        assert error.value.param == pointer


def test_depth() -> None:
    schema: dict[str, Any] = {}
    for _ in range(json_schema.MAX_DEPTH):
        schema = {"items": schema, "properties": {"a": schema}}
        if len(json.dumps(schema)) > 10_000:
            schema = {"items": schema["items"]}
    deep: dict[str, Any] = {}
    for _ in range(129):
        deep = {"items": deep}
    with pytest.raises(RequestError) as error:
        normalise(deep)
    assert error.value.code == "invalid_schema" and "levels" in error.value.message


def test_annotations_pass_with_a_warning() -> None:
    schema = {"properties": {"a": {"format": "mine", "contentEncoding": "base64"}}, "title": "t"}
    normal = normalise(schema)
    assert normal.schema == {"properties": {"a": {}}, "title": "t"}
    assert sorted(normal.warnings) == [
        "/properties/a/contentEncoding is not checked",
        "/properties/a/format: 'mine' is not checked",
    ]
    assert len(normalise({"allOf": [{"format": f"f{i}"} for i in range(50)]}).warnings) == 10


def test_the_backend_is_not_spoken_to() -> None:
    loose = {"x-guidance": {"lenient": True}, "type": "array", "unevaluatedItems": {"not": {}}}
    assert "x-guidance" not in normalise({"items": loose, **loose}).schema["items"]
    with pytest.raises(RequestError):
        schema_matcher({"x-guidance": {"lenient": True}, "uniqueItems": True})


# The official suite ---------------------------------------------------------------------------


def _suite() -> list[tuple[str, Any]]:
    cases = []
    with tarfile.open(SUITE) as archive:
        for member in archive:
            name = member.name.removeprefix(DRAFT)
            if not member.name.startswith(DRAFT):
                continue
            if "/" in name.removeprefix("optional/format/"):
                continue
            content = archive.extractfile(member)
            assert content is not None
            for case in json.load(content):
                cases.append((f"{name}: {case['description']}", case))
    return cases


def test_the_official_suite_accepts_nothing_wrongly() -> None:
    """Draft 2020-12: refused, or kept. Being stricter is allowed where the text has another form
    (numbers as 1.0, the order of properties, leap seconds), and counted."""
    found: Counter[str] = Counter()
    wrong = []
    for name, case in _suite():
        try:
            matcher = schema_matcher(case["schema"])
        except RequestError as error:
            assert error.status == 400
            found["refused"] += 1
            continue
        found["served"] += 1
        for test in case["tests"]:
            accepted = accepts(matcher, json.dumps(test["data"], ensure_ascii=False))
            if accepted and not test["valid"]:
                wrong.append(f"{name}: {test['description']}")
            found["right" if accepted == test["valid"] else "too strict"] += 1
    assert wrong == []
    assert found["served"] >= 248 and found["right"] >= 1_170 and found["too strict"] <= 50, found


def test_the_reasons_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "structured_output.md").read_text()
    for keyword, reason in REFUSALS.items():
        assert f"| `{keyword}` | {reason} |" in text
