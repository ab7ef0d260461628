"""From bytes to a request body."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_runtime.errors import RequestError
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.server.decode import decode_body, parse_json
from radix_runtime.server.json_scan import MAX_DEPTH
from radix_runtime.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    GenerateBody,
    TokenizeBody,
)
from radix_runtime.server.unbuilt import HARMLESS, UNBUILT, Unbuilt
from radix_runtime.text.conversation import template_messages

BODIES = [ChatBody, CompletionBody, GenerateBody, TokenizeBody]
USER = [{"role": "user", "content": "x"}]


def refusal(kind: type[Body], value: Any, *, lenient: bool = False) -> RequestError:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    with pytest.raises(RequestError) as caught:
        decode_body(kind, data, lenient, {})
    return caught.value


def all_fields(kind: type[Body]) -> list[str]:
    return [*kind.__struct_encode_fields__, *unbuilt(kind)]


def unbuilt(kind: type[Body]) -> dict[str, Unbuilt]:
    return {
        name: field for name, field in UNBUILT.items() if name not in kind.__struct_encode_fields__
    }


@pytest.mark.parametrize("kind", BODIES)
def test_no_field_is_of_two_kinds(kind: type[Body]) -> None:
    names = [*all_fields(kind), *HARMLESS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", BODIES)
def test_null_is_neutral_everywhere(kind: type[Body]) -> None:
    required = {"messages": USER, "prompt": "x", "text": "x"}
    body = dict.fromkeys(all_fields(kind))
    body |= {k: v for k, v in required.items() if k in kind.__struct_encode_fields__}
    body.pop("add_special_tokens", None)
    body.pop("add_generation_prompt", None)
    decode_body(kind, json.dumps(body).encode(), False, {})


@pytest.mark.parametrize("kind", BODIES)
def test_every_neutral_value_passes_and_others_do_not(kind: type[Body]) -> None:
    base = {"messages": USER} if kind is ChatBody else {"prompt": "x"}
    base = {"text": "x"} if kind is GenerateBody else base
    for name, field in unbuilt(kind).items():
        for value in field.neutral:
            decode_body(kind, json.dumps({**base, name: value}).encode(), False, {})
        error = refusal(kind, {**base, name: {"something": "else"}}, lenient=True)
        assert (error.code, error.param) == ("unsupported_parameter", name)
        assert error.message == f"{name} is not supported: {field.why}"


@pytest.mark.parametrize("kind", BODIES)
def test_an_unknown_field_that_is_null_passes(kind: type[Body]) -> None:
    """Clients that send whole objects fill what they do not use with nulls."""
    base = {"messages": USER} if kind is ChatBody else {"prompt": "x"}
    base = {"text": "x"} if kind is GenerateBody else base
    for lenient in (False, True):
        body = json.dumps({**base, "mm_processor_kwargs": None}).encode()
        _, warnings = decode_body(kind, body, lenient, {})
        assert warnings == []


def test_an_unknown_field_is_told_what_may_have_been_meant() -> None:
    for name, meant in (("temprature", "temperature"), ("max_token", "max_tokens")):
        error = refusal(ChatBody, {"messages": USER, name: 1})
        assert error.message == f"unknown parameter {name}; did you mean {meant}?"
    error = refusal(GenerateBody, {"text": "x", "sampling_params": {"topp": 1}})
    assert error.message == "unknown parameter sampling_params.topp; did you mean top_p?"
    error = refusal(ChatBody, {"messages": USER, "frobnicate": 1})
    assert error.message == (
        "unknown parameter frobnicate; a server with --allow-unknown-fields ignores it"
    )


def test_true_is_not_one() -> None:
    assert refusal(CompletionBody, {"prompt": "x", "best_of": True}).param == "best_of"
    assert refusal(ChatBody, {"messages": USER, "continue_final_message": 0}).param


@pytest.mark.parametrize("name", ["n", "max_tokens", "top_k", "seed", "min_tokens"])
@pytest.mark.parametrize("value", [True, 1.0, "1", [1], {}, 1.5])
def test_integers_are_integers(name: str, value: Any) -> None:
    error = refusal(ChatBody, {"messages": USER, name: value})
    assert (error.code, error.param) == ("invalid_type", name)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty"])
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "true", '"1"', "[]"])
def test_floats_are_finite_numbers(name: str, text: str) -> None:
    data = f'{{"messages":{json.dumps(USER)},"{name}":{text}}}'.encode()
    error = refusal(ChatBody, data)
    assert (error.code, error.param) == ("invalid_type", name)


def test_paths() -> None:
    nested = {"messages": [*USER, {"role": "user", "content": 5}]}
    assert refusal(ChatBody, nested).param == "messages[1].content"
    assert refusal(GenerateBody, {"sampling_params": [{}, {"n": "x"}]}).param == (
        "sampling_params[1].n"
    )
    assert (
        refusal(GenerateBody, {"sampling_params": [{"zzz": 1}]}).param == "sampling_params[0].zzz"
    )
    deep = b'{"a":{"b":[1,{"c":NaN}]}}'
    assert refusal(ChatBody, deep).param == "a.b[1].c"


def test_parts_of_a_message() -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "annotations": []}
    error = refusal(
        ChatBody, {"messages": [{"role": "user", "content": [part, {**part, "foo": 1}]}]}
    )
    assert (error.code, error.param) == ("unknown_parameter", "messages[0].content[1].foo")
    answers = [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant"}]
    body = {"messages": [{"role": "user", "content": [part]}, *answers]}
    decoded, _ = decode_body(ChatBody, json.dumps(body).encode(), False, {})
    assert [message["content"] for message in template_messages(decoded.messages)] == ["x", "", ""]


def test_depth() -> None:
    def nested(depth: int) -> bytes:
        return b"[" * depth + b"]" * depth

    parse_json(nested(MAX_DEPTH))
    parse_json(b"[" + b",".join([b"[]"] * 1000) + b"]")
    for depth in (MAX_DEPTH + 1, 500, 100_000):
        with pytest.raises(RequestError) as caught:
            parse_json(nested(depth))
        assert caught.value.code == "invalid_json"
    with pytest.raises(RequestError):
        parse_json(b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1))


def test_nothing_long_comes_back() -> None:
    long = "x" * 100_000
    for value in (
        {long: 1},
        {"messages": USER, long: 1},
        {"messages": [{"role": "user", long: 1}]},
    ):
        error = refusal(ChatBody, value)
        assert len(error.message) + len(error.param or "") < 400
    assert len(refusal(ChatBody, ('{"' + long + '": NaN}').encode()).message) < 300


def test_lenient_reaches_nested_bodies() -> None:
    body = {"messages": [{**USER[0], "colour": 1}], "x": 2}
    decoded, warnings = decode_body(ChatBody, json.dumps(body).encode(), True, {})
    assert decoded.messages[0].content == "x"
    assert warnings == [
        "unknown parameter messages[0].colour was ignored", "unknown parameter x was ignored",
    ]  # fmt: skip


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_a_body_or_a_request_error(data: bytes) -> None:
    for kind in BODIES:
        try:
            decode_body(kind, data, False, {})
        except RequestError as error:
            assert error.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.sampled_from(BODIES), st.data())
@settings(max_examples=400, deadline=None)
def test_any_json_in_any_field(kind: type[Body], data: st.DataObject) -> None:
    names = st.sampled_from(all_fields(kind))
    body = data.draw(st.dictionaries(names, JSON, max_size=4))
    for lenient in (False, True):
        try:
            decode_body(kind, json.dumps(body).encode(), lenient, {})
        except RequestError as error:
            assert error.status == 400 and error.code in {
                "invalid_json", "invalid_type", "missing_field", "unsupported_parameter",
                "unknown_parameter", "invalid_value", "invalid_combination", "empty_input",
            }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b'{"' + b"k" * 2_000_000 + b'":[' + b"[]," * 33 + b",".join([b"1"] * 800_000) + b"]}",
        b'{"' + b"k" * 30_000 + b'":[' + b"[]," * 33 + b",".join([b"1"] * 16_000) + b",NaN]}",
    ],
    ids=["a long key", "a long key and a bad number"],
)
def test_no_body_holds_up_the_event_loop(body: bytes) -> None:
    """The first took half a minute when each part of it got its path."""
    start = time.process_time()
    with pytest.raises(RequestError):
        decode_body(ChatBody, body, False, {})
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ("u" * 1000, True),
        ({"session": "x", "tags": ["a"] * 100}, True),
        (None, True),
        (7, True),
        ("u" * 70_000, False),
        ({"a": {"b": "u" * 70_000}}, False),
        ([0] * 2000, False),
        ({str(i): i for i in range(2000)}, False),
    ],
)
def test_fields_that_do_nothing_have_a_size(value: Any, fits: bool) -> None:
    for name in ("user", "metadata", "safety_identifier"):
        data = json.dumps({"prompt": "x", name: value}).encode()
        if fits:
            decode_body(CompletionBody, data, lenient=False, defaults={})
            continue
        with pytest.raises(RequestError) as caught:
            decode_body(CompletionBody, data, lenient=False, defaults={})
        assert (caught.value.code, caught.value.param) == ("invalid_value", name)


def test_messages_repeat_at_most_128_characters_of_a_value() -> None:
    for field in ("seed", "n", "top_k"):
        given = SamplingParams(**{field: -(10**400)})
        for _, message in given.violations(vocab_size=10, max_n=4):
            assert len(message) < 250
