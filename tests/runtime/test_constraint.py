"""The fields by which clients constrain an answer, and what becomes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radix_runtime.config import ServerArgs
from radix_runtime.constraint import Constraint
from radix_runtime.errors import ConfigError, RequestError
from radix_runtime.prepare import prepare_model
from radix_runtime.server.decode import decode_body
from radix_runtime.server.protocol import ChatBody, CompletionBody, GenerateBody

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
NEW_TAG = {"format": {"type": "any_text"}}


def chat(**fields: Any) -> Constraint | None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return decode_body(ChatBody, json.dumps(body).encode(), False, {})[0].constraint()


def completion(**fields: Any) -> Constraint | None:
    data = json.dumps({"prompt": "x", **fields}).encode()
    return decode_body(CompletionBody, data, False, {})[0].constraint()


def generate(**fields: Any) -> Constraint | None:
    data = json.dumps({"text": "x", "sampling_params": fields}).encode()
    return decode_body(GenerateBody, data, False, {})[0].sampling_params.constraint()


SAME_EVERYWHERE = [
    ({"json_schema": SCHEMA_TEXT}, "json_schema", SCHEMA_TEXT),
    ({"json_schema": SCHEMA}, "json_schema", SCHEMA_TEXT),
    ({"regex": "a+"}, "regex", "a+"),
    ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ({"structural_tag": json.dumps(NEW_TAG)}, "structural_tag", json.dumps(NEW_TAG)),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA_TEXT),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["a", "ü"]}}, "choice", '["a","ü"]'),
    ({"structured_outputs": {"grammar": "start: /a/"}}, "ebnf", "start: /a/"),
    ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag", "{}"),
]


@pytest.mark.parametrize("route", [chat, completion, generate])
@pytest.mark.parametrize(("fields", "kind", "text"), SAME_EVERYWHERE)
def test_every_spelling_is_one_constraint(
    route: Any, fields: dict[str, Any], kind: str, text: str
) -> None:
    constraint = route(**fields)
    assert (constraint.kind, constraint.text, constraint.whitespace) == (kind, text, None)


@pytest.mark.parametrize("route", [chat, completion])
def test_response_format(route: Any) -> None:
    assert route(response_format={"type": "text"}) is None
    assert route(response_format={"type": "json_object"}).kind == "json_object"
    schema = {"name": "n", "schema": SCHEMA, "strict": None}
    found = route(response_format={"type": "json_schema", "json_schema": schema})
    assert (found.kind, found.text) == ("json_schema", SCHEMA_TEXT)
    for tag in (TAG, NEW_TAG):
        found = route(response_format={"type": "structural_tag", **tag})
        assert (found.kind, json.loads(found.text)) == ("structural_tag", tag)


@pytest.mark.parametrize("route", [chat, completion, generate])
def test_whitespace_of_a_request(route: Any) -> None:
    fields: dict[str, Any] = {"json": {}, "whitespace_pattern": " ?"}
    assert route(structured_outputs=fields).whitespace == " ?"
    fields = {"json": {}, "disable_any_whitespace": True}
    assert route(structured_outputs=fields).whitespace == ""


@pytest.mark.parametrize("route", [chat, completion, generate])
def test_without_a_constraint(route: Any) -> None:
    assert route() is None
    assert route(regex=None, json_schema=None, structured_outputs=None) is None


REFUSED = [
    ({"regex": "a", "ebnf": "b"}, "invalid_combination", "ebnf"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_combination",
     "structured_outputs.choice"),
    ({"regex": "a", "structured_outputs": {"json": {}}}, "invalid_combination",
     "structured_outputs.json"),
    ({"regex": "a", "ignore_eos": True}, "invalid_combination", "ignore_eos"),
    ({"structured_outputs": {}}, "missing_field", "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "missing_field", "structured_outputs"),
    ({"structured_outputs": {"jsn": {}}}, "unknown_parameter", "structured_outputs.jsn"),
    ({"structured_outputs": {"choice": "a"}}, "invalid_type", "structured_outputs.choice"),
    ({"regex": 5}, "invalid_type", "regex"),
    ({"guided_json": {}}, "unsupported_parameter", "guided_json"),
    ({"guided_regex": "a"}, "unsupported_parameter", "guided_regex"),
    ({"guided_choice": ["a"]}, "unsupported_parameter", "guided_choice"),
    ({"guided_grammar": "a"}, "unsupported_parameter", "guided_grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "path"), [(chat, ""), (generate, "sampling_params.")])
@pytest.mark.parametrize(("fields", "code", "param"), REFUSED)
def test_refused(route: Any, path: str, fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as error:
        route(**fields)
    assert (error.value.status, error.value.code) == (400, code)
    assert error.value.param == path + param


def test_what_is_gone_names_what_replaces_it() -> None:
    for old, new in [("json", "json"), ("choice", "choice"), ("grammar", "grammar")]:
        with pytest.raises(RequestError) as error:
            chat(**{f"guided_{old}": "x"})
        assert f"structured_outputs.{new}" in error.value.message


@pytest.mark.parametrize(
    ("response_format", "code", "param"),
    [
        ({"type": "json_schema"}, "missing_field", "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "n"}},
            "missing_field",
            "response_format.json_schema.schema",
        ),
        ({"type": "yaml"}, "invalid_value", "response_format.type"),
        ({"type": "json_object", "x": 1}, "unknown_parameter", "response_format.x"),
    ],
)
def test_a_bad_response_format(response_format: Any, code: str, param: str) -> None:
    with pytest.raises(RequestError) as error:
        chat(response_format=response_format)
    assert (error.value.code, error.value.param) == (code, param)


def test_the_key_is_what_the_answer_may_be() -> None:
    one = Constraint("regex", "a", param="regex")
    assert one.key == Constraint("regex", "a", param="structured_outputs.regex").key
    others = [
        Constraint("ebnf", "a"),
        Constraint("regex", "b"),
        Constraint("regex", "a", whitespace=""),
        Constraint("regex", "a", before='start: "</think>" @body'),
    ]
    assert len({one.key, *(other.key for other in others)}) == 5


@pytest.mark.parametrize("name", ["xgrammar", "outlines"])
def test_other_backends_name_ours(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--grammar-backend {name}: .*llguidance"):
        ServerArgs(grammar_backend=name).validate()


def test_flags_of_whitespace_exclude_each_other() -> None:
    args = ServerArgs(
        constrained_json_whitespace_pattern=" ?", constrained_json_disable_any_whitespace=True
    )
    with pytest.raises(ConfigError, match="exclude each other"):
        args.validate()


def test_an_unknown_backend_is_one_line() -> None:
    with pytest.raises(ConfigError, match="grammar backend 'mine' is unknown; there are: llguid"):
        prepare_model(ServerArgs(grammar_backend="mine"))
