"""Float32, greedy: the engine's tokens are transformers' tokens, whatever the settings."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import transformers

from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.text.tokenizer import load_tokenizer
from tests.runtime.parity import GAP, GREEDY, NEW_TOKENS, case, engine, ids_of

torch.set_num_threads(1)

# (disable_radix_cache, chunked_prefill_size, disable_overlap_schedule, page_size)
PRODUCT = list(itertools.product((False, True), (32, -1), (False, True), (1, 16, 64)))
# Every pair of values of two settings occurs.
PAIRWISE = [
    (False, 32, False, 1),
    (True, -1, True, 1),
    (False, -1, False, 16),
    (True, 32, True, 16),
    (False, -1, True, 64),
    (True, 32, False, 64),
]
PAIRWISE_MODELS = [
    "llama_llama3", "llama_yarn", "mistral_window", "qwen2_bias", "qwen3_tied", "qwen3_untied_odd",
]  # fmt: skip


def settings(no_radix, chunk, no_overlap, page):
    return {
        "disable_radix_cache": no_radix,
        "chunked_prefill_size": chunk,
        "disable_overlap_schedule": no_overlap,
        "page_size": page,
    }


def check(name, **changes):
    """All prompts at once, then again: the second time the prefixes are cached."""
    c = case(name)
    assert c.gap > GAP
    with engine(c.folder, **changes) as e:
        first = e.generate(input_ids=c.prompts, sampling_params=GREEDY)
        assert ids_of(first) == c.answers
        again = e.generate(input_ids=c.prompts[::-1], sampling_params=GREEDY)
        assert ids_of(again) == c.answers[::-1]
        cached = sum(o["meta_info"]["cached_tokens"] for o in again)
        assert (cached == 0) == bool(changes.get("disable_radix_cache"))
        for output in again:
            assert output["meta_info"]["finish_reason"] == {"type": "length", "length": NEW_TOKENS}


def test_the_pairwise_cover_is_one():
    for i, j in itertools.combinations(range(4), 2):
        assert {(p[i], p[j]) for p in PRODUCT} == {(p[i], p[j]) for p in PAIRWISE}


@pytest.mark.parametrize("combination", PRODUCT, ids=str)
def test_all_settings_on_qwen3(combination):
    check("qwen3_tied_odd", **settings(*combination))


@pytest.mark.parametrize("combination", PAIRWISE, ids=str)
@pytest.mark.parametrize("name", PAIRWISE_MODELS)
def test_every_model_on_a_pairwise_cover(name, combination):
    check(name, **settings(*combination))


@pytest.mark.parametrize("name", ["qwen3_tied_odd", "qwen2_bias", "llama_yarn"])
def test_two_ranks(name):
    """qwen2_bias has one KV head, which both ranks hold; the odd vocabulary is padded."""
    check(name, tp_size=2, num_threads=2, chunked_prefill_size=32)


@pytest.mark.parametrize("backend", ["torch_native"])
def test_other_attention_backends(backend):
    check("mistral_window", attention_backend=backend, chunked_prefill_size=32)


def demo_prompts(tokenizer, count):
    rng = random.Random(4)
    places = ["France", "Japan", "Peru", "Kenya", "Norway"]
    words = ["stone", "river", "cloud", "lamp", "garden"]
    questions = []
    while len(questions) < count:
        a = rng.randrange(1000)
        b = rng.randrange(1000)
        word = rng.choice(words)
        kind = len(questions) % 5
        questions.append(
            [
                f"What is {a} + {b}?",
                f"What is the capital of {rng.choice(places)}, question {a}{b}?",
                f"Spell the word {word}{a}.",
                f"Sort these numbers: {a}, {b}, {a % 13}",
                f"Tell me a short story about a {word} and {rng.choice(words)} number {a}.",
            ][kind]
        )
    chats = [[{"role": "user", "content": q}] for q in questions]
    return [tokenizer.apply_chat_template(chat) for chat in chats]


def test_the_demo_model_on_200_prompts():
    """Each token must be transformers' best one after the same prefix, so the whole output is its
    greedy output. No near tie is excused: the two best logits of these weights are at least 2e-4
    apart on all 200, and float32 runs move that by less than 1e-4."""
    prompts = demo_prompts(load_tokenizer(DEMO_MODEL_DIR), 200)
    assert len({tuple(p) for p in prompts}) == 200
    with engine(None, max_total_tokens=64 * 128, max_running_requests=64) as e:
        outputs = ids_of(e.generate(input_ids=prompts, sampling_params=GREEDY))
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32)
    model.eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NEW_TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == output
