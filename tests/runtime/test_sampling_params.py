"""Sampling parameters out of range: every field has its sentence, in the names of the route."""

from __future__ import annotations

import math
from typing import Any

import pytest

from radix_runtime.errors import RequestError
from radix_runtime.sampling_params import Limits, SamplingParams

NAMES = {
    "n": "num_choices",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "body.min_tokens",
    "stop": "body.stop_strings",
}


def violations(names: dict[str, str] | None = None, **fields: Any) -> list[tuple[str, str]]:
    params = SamplingParams(**fields)
    return list(params.violations(vocab_size=10, max_n=4, names=names or {}))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("temperature", -1.0, "temperature must be in [0, 1e+06], got -1.0"),
        ("temperature", math.nan, "temperature must be in [0, 1e+06], got nan"),
        ("top_p", 0.0, "top_p must be in (0, 1], got 0.0"),
        ("min_p", 2.0, "min_p must be in [0, 1], got 2.0"),
        ("frequency_penalty", -2.5, "frequency_penalty must be in [-2, 2], got -2.5"),
        ("presence_penalty", 2.5, "presence_penalty must be in [-2, 2], got 2.5"),
        ("repetition_penalty", 0.0, "repetition_penalty must be in [0.01, 2], got 0.0"),
        ("n", 5, "n must be in [1, 4], got 5"),
        ("max_new_tokens", -1, "max_new_tokens must not be negative, got -1"),
        ("min_new_tokens", 129, "min_new_tokens must be in [0, max_new_tokens], got 129"),
        ("top_k", -2, "top_k must be -1 or 0 (off), or at least 1, got -2"),
        ("seed", 2**63, f"seed must be a signed 64-bit integer, got {2**63}"),
        ("stop", ["x"] * 33, "stop may have at most 32 entries, got 33"),
        ("stop", [""], "a stop string must have 1 to 256 characters"),
        ("stop_token_ids", [10], "stop token ids must be in [0, 10)"),
        ("logit_bias", {10: 1.0}, "token id 10 is outside [0, 10)"),
        ("logit_bias", {9: 101.0}, "bias of token 9 must be in [-100, 100], got 101.0"),
    ],
)
def test_every_field_out_of_range_is_told(field: str, value: Any, sentence: str) -> None:
    assert (field, sentence) in violations(**{field: value})


def test_the_edges_fit() -> None:
    edges = [
        {"temperature": 0.0, "top_p": 1.0, "min_p": 1.0, "top_k": 1, "seed": -(2**63)},
        {"n": 4, "max_new_tokens": None, "min_new_tokens": 10**9, "top_k": -1},
        {"top_k": 0},
        {"max_new_tokens": 0, "min_new_tokens": 0, "stop": ["x" * 256] * 32},
        {"stop_token_ids": [0, 9], "logit_bias": {0: -100.0, 9: 100.0}},
    ]
    assert [violations(**fields) for fields in edges] == [[], [], [], [], []]


def test_sentences_use_the_names_of_the_route() -> None:
    """Only names are translated: other words of a sentence may contain them, as `n` is in `in`."""
    [(field, sentence)] = violations(NAMES, n=0)
    assert (field, sentence) == ("n", "num_choices must be in [1, 4], got 0")
    limits = Limits(context_length=100, vocab_size=10)
    params = SamplingParams(max_new_tokens=3, min_new_tokens=4)
    with pytest.raises(RequestError) as caught:
        limits.admit([1], params, "prompt", NAMES, clip=False)
    assert caught.value.param == "body.min_tokens"
    assert caught.value.message == "min_tokens must be in [0, max_tokens], got 4"
    with pytest.raises(RequestError) as caught:
        limits.admit([1], SamplingParams(stop=[""]), "prompt", NAMES, clip=False)
    assert caught.value.param == "body.stop_strings"
    assert caught.value.message == "a stop string must have 1 to 256 characters"


def too_long(limits: Limits, prompt: int, new: int | None) -> RequestError:
    params = SamplingParams(max_new_tokens=new)
    with pytest.raises(RequestError) as caught:
        limits.admit([1] * prompt, params, "messages", NAMES, clip=False)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "new", "param"),
    [(9, 100, "max_tokens"), (99, 2, "max_tokens"), (100, 1, "messages"), (120, None, "messages")],
)
def test_a_long_request_is_told_in_the_words_that_clients_look_for(
    prompt: int, new: int | None, param: str
) -> None:
    error = too_long(Limits(context_length=100, vocab_size=10), prompt, new)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", param)
    total = prompt + (new or 1)
    assert f"However, you requested {total} tokens ({prompt} in the prompt" in error.message
    # What litellm and langchain-openai search the message for; the first takes it in lower case.
    assert "this model's maximum context length is 100 tokens." in error.message.lower()
    assert "context_length_exceeded" in error.message


def test_a_kv_cache_smaller_than_the_context_bounds_it() -> None:
    limits = Limits(context_length=100, vocab_size=10, max_total_tokens=50)
    for prompt, new, param in ((9, 60, "max_tokens"), (50, 1, "messages")):
        error = too_long(limits, prompt, new)
        assert (error.code, error.param) == ("kv_capacity_exceeded", param)
        assert "this model's maximum context length is 50 tokens" in error.message.lower()


def test_a_top_k_of_0_is_off() -> None:
    limits = Limits(context_length=100, vocab_size=10)
    assert limits.admit([1], SamplingParams(top_k=0), "prompt", {}, clip=True).top_k == -1
