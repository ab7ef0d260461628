"""Bits of a prompt depend neither on how much of it was cached nor on how it was cut into chunks: a
single token would take another attention kernel."""

from __future__ import annotations

import random
from typing import Any

import pytest

from radix_runtime.offline import Engine
from tests.marks import needs_cpu_library

pytestmark = needs_cpu_library

# One token more than whole pages, whole pages, and their neighbours.
_RANDOM = random.Random(0)
PROMPTS = [[_RANDOM.randrange(3, 1500) for _ in range(n)] for n in (17, 33, 65, 49, 16, 34) * 6]


def answers(engine: Engine, prompt: list[int], n: int = 1) -> list[Any]:
    params = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True, "n": n}
    outputs = engine.generate(input_ids=[prompt], sampling_params=params, return_logprob=True)
    return [out["meta_info"]["output_token_logprobs"] for out in outputs]


def test_cold_cached_chunked_and_as_choices_prompts_have_the_same_bits() -> None:
    with Engine(max_total_tokens=2048) as engine:
        cold: list[Any] = []
        cached: list[Any] = []
        choices: list[Any] = []
        for prompt in PROMPTS:
            assert engine.flush_cache()
            cold += answers(engine, prompt)
            cached += answers(engine, prompt)
            assert engine.flush_cache()
            choices.append(answers(engine, prompt, n=3))
        assert engine.get_server_info()["internal_states"][0]["cached_tokens_total"] > 0
    assert cached == cold
    assert choices == [[one] * 3 for one in cold]


@pytest.mark.parametrize("size, page_size", [(16, 16), (3, 1)])
def test_a_chunked_prompt_has_the_bits_of_a_whole_one(size: int, page_size: int) -> None:
    with (
        Engine(max_total_tokens=2048, disable_radix_cache=True) as whole,
        Engine(max_total_tokens=2048, chunked_prefill_size=size, page_size=page_size) as chunked,
    ):
        for prompt in PROMPTS:
            assert answers(chunked, prompt) == answers(whole, prompt) == answers(chunked, prompt)
