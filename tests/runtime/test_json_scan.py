"""The shape of a body is known before anything parses it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_runtime.errors import RequestError
from radix_runtime.server import json_scan
from radix_runtime.server.decode import parse_json
from radix_runtime.server.json_scan import MAX_CONTAINERS, MAX_DEPTH, MAX_NUMBER, check_shape

# Legal but for its last string: 31,800 numbers below 900 arrays, which took a second to explain.
DEEP_AND_MALFORMED = b'{"a":' + b"[" * 900 + b"1," * 31_800 + b"1" + b"]" * 900 + b',"b":"\\ud800"}'


def refused(data: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        check_shape(data)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    return caught.value.message


def containers(value: Any) -> int:
    """How many arrays and objects a JSON value has."""
    if isinstance(value, dict):
        return 1 + sum(containers(child) for child in value.values())
    if isinstance(value, list):
        return 1 + sum(containers(child) for child in value)
    return 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\[]{}\n\u00e9', max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\[{'), inner),
    max_leaves=8,
)


@given(JSON)
@settings(max_examples=500, deadline=None)
def test_containers_outside_of_strings_are_counted(value: Any) -> None:
    assert check_shape(json.dumps(value).encode()).containers == containers(value)
    spaced = json.dumps(value, ensure_ascii=False, indent=1).encode()
    assert check_shape(spaced).containers == containers(value)


@given(st.lists(st.sampled_from(list(b'[]{}",1e.- \\\\a')), max_size=400), st.integers(1, 130))
@settings(max_examples=500, deadline=None)
def test_pieces_are_one_text(values: list[int], size: int) -> None:
    """Wherever a piece ends, also within a string or a number."""

    def outcome() -> object:
        try:
            return check_shape(data)
        except RequestError as error:
            return error.message

    data = bytes(values)
    expected = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_scan, "_CHUNK", size)
        assert outcome() == expected


@pytest.mark.parametrize("before", [0, 1, json_scan._CHUNK - 1, json_scan._CHUNK, 100_000])
def test_bounds_hold_across_pieces(before: int) -> None:
    start = b" " * (before - 1) + b"[" if before else b""
    deep = MAX_DEPTH - (1 if before else 0)
    assert check_shape(start + b"[" * deep).containers == MAX_DEPTH
    assert str(MAX_DEPTH) in refused(start + b"[" * (deep + 1))
    check_shape(start + b"9" * MAX_NUMBER)
    assert "number" in refused(start + b"9" * (MAX_NUMBER + 1))
    assert check_shape(start + b'"' + b"[" * 200_000 + b'"').commas == 0
    below = b"[1]," * 100_000
    assert str(MAX_CONTAINERS) in refused(start + below)


def test_limits() -> None:
    most = b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]"
    assert check_shape(most).containers == MAX_CONTAINERS
    assert str(MAX_CONTAINERS) in refused(b"[" + b"[]," * (MAX_CONTAINERS - 1) + b"[]]")
    check_shape(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert str(MAX_DEPTH) in refused(b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1))
    check_shape(b'{"n":' + b"9" * MAX_NUMBER + b"}")
    for number in (b"9" * 400, b"-1." + b"0" * 400, b"9" * (MAX_NUMBER + 1)):
        for data in (number, b'{"n":' + number + b"}", b"[1, " + number):
            assert "number" in refused(data)


def test_what_strings_contain_does_not_count() -> None:
    code = '\\"[' * 100_000 + "{[" * 100_000 + "\\" * 99 + "9" * 1000
    assert check_shape(json.dumps({"prompt": code}).encode()) == (1, 0)
    assert check_shape(b'{"an unterminated string": "[[[[' + b"[" * 100_000).containers == 1
    for empty in (b"", b" ", b'"', b"\\", b'"\\'):
        assert check_shape(empty) == (0, 0)


@pytest.mark.parametrize(
    "data",
    [
        DEEP_AND_MALFORMED,
        b'{"a":' + b"[" * 30 + b"1," * 8_000 + b"1" + b"]" * 30 + b',"b":"\\ud800"}',
        b'{"a":[' + b"{}," * 5_000 + b'NaN],"b":"\\ud800"}',
        b'{"a":[' + b"1.5," * 16_000 + b'1],"b":"\\ud800"}',
        b'{"a":[' + b'"",' * 21_000 + b'1],"b":"\\ud800"}',
        b'{"a":"' + b'\\"' * 32_000,
        b"[" * 65_000,
        b'{"a":' * 13_000,
        b"9" * 65_000,
    ],
    ids=["deep", "many leaves", "objects", "floats", "strings", "escapes", "[", "{", "9"],
)
def test_malformed_bodies_of_64_kib_are_refused_within_10_ms(data: bytes) -> None:
    times = []
    for _ in range(3):
        start = time.thread_time()
        with pytest.raises(RequestError) as caught:
            parse_json(data)
        times.append(time.thread_time() - start)
        assert caught.value.code == ("invalid_type" if b"NaN" in data else "invalid_json")
        assert len(caught.value.message) < 200
    assert min(times) < 0.010


def test_many_small_containers_are_refused_before_they_are_parsed() -> None:
    data = b'{"prompt":[' + b"[5]," * 2_000_000 + b"[5]]}"
    start = time.thread_time()
    with pytest.raises(RequestError):
        parse_json(data)
    assert time.thread_time() - start < 0.5  # 2 s when it was parsed
