"""SmolLM2-135M, real weights in a real GGUF file (Q4_1, Q8_0, F32), against transformers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from bench.real_model import conversations, first_human_turns, has_packages, smollm2
from radix_runtime import Engine
from radix_runtime.text.tokenizer import load_tokenizer
from tests.runtime.tiny_models import Driver, Sequence

pytestmark = pytest.mark.skipif(not has_packages(), reason="run `make real-model` first")

FULL = os.environ.get("RADIX_TEST_FULL") == "1"
PROMPTS = 100 if FULL else 8
NEW_TOKENS = 32 if FULL else 12
LONGEST = 200  # tokens of a prompt
GAP = 2e-3  # of the two best logits, below which float32 runs may differ
CONTEXT = 512


@pytest.fixture(scope="module")
def path() -> Path:
    found = smollm2()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    """transformers' model in float32, read by it from the same file."""
    keys = load_gguf_checkpoint(path)["config"]
    model = LlamaForCausalLM(LlamaConfig(**keys))
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied
    return model.float().eval()


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same as a directory in the layout of the hub."""
    folder = tmp_path_factory.mktemp("smollm2")
    reference.save_pretrained(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def prompts(path: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(path)
    turns = first_human_turns(PROMPTS)
    messages = [[{"role": "user", "content": turn[:600]}] for turn in turns]
    return [tokenizer.apply_chat_template(message)[-LONGEST:] for message in messages]


def engine(model: Path, **settings: Any) -> Engine:
    given = {"dtype": "float32", "max_total_tokens": 8192, "context_length": CONTEXT, **settings}
    return Engine(model, device="cpu", **given)


@torch.no_grad()
def logits_of(reference: Any, ids: list[int]) -> torch.Tensor:
    return reference(torch.tensor([ids])).logits[0]


def check_greedy(reference: Any, prompts: list[list[int]], outputs: list[Any]) -> None:
    """Every token is transformers' own choice after those before it, up to a near tie."""
    compared = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output["output_ids"]
        logits = logits_of(reference, prompt + answer)[len(prompt) - 1 : -1]
        best = logits.topk(2)
        for place, token in enumerate(answer):
            if best.values[place, 0] - best.values[place, 1] < GAP:
                break
            assert token == int(best.indices[place, 0]), (prompt, place)
            compared += 1
    print(f"{compared} tokens of {len(prompts)} prompts")
    assert compared > 0.9 * sum(len(output["output_ids"]) for output in outputs)


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_greedy_tokens(
    form: str, path: Path, folder: Path, reference: Any, prompts: list[list[int]]
) -> None:
    with engine(path if form == "gguf" else folder) as radix:
        outputs = radix.generate(
            input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS}
        )
    check_greedy(reference, prompts, outputs)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_logits(
    dtype: torch.dtype, bound: float, path: Path, reference: Any, prompts: list[list[int]]
) -> None:
    """In float32 the codes' values: what is left is the order of sums. In bfloat16 activations are
    in 8 bits."""
    driver = Driver(path, dtype=dtype, num_pages=2 * LONGEST // 16)
    ids = max(prompts, key=len)
    logits = driver.step([(Sequence(0, ids), len(ids))])
    expected = logits_of(reference, ids)
    error = float((logits - expected).norm() / expected.norm())
    print(f"{dtype}: {error:.1e}")
    assert error < bound


def test_the_chat_works(path: Path) -> None:
    with engine(path, dtype="auto") as radix:
        assert radix.tokenizer is not None
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = radix.tokenizer.render_chat(messages)
        assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        ids = radix.tokenizer.encode(prompt)
        settings = {"temperature": 0, "max_new_tokens": 20}
        answer = radix.chat(messages, settings)
        assert (
            answer["text"]
            and answer["output_ids"]
            == (radix.generate(input_ids=ids, sampling_params=settings)["output_ids"])
        )


def test_tokens_are_those_of_the_model(path: Path) -> None:
    """The model's own tokenizer.json lets every digit stand alone, which transformers does not know
    of a GGUF file: texts without digits are equal there. The others are of that tokenizer."""
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = load_tokenizer(path)
    assert ours.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    compared = 0
    for turns in islice(conversations(), 400):
        for turn in turns[:3]:
            text = turn["value"][:1500]
            if any(char.isnumeric() for char in text):
                continue
            ids = ours.encode(text)
            assert ids == oracle.encode(text)
            assert ours.decode(ids) == oracle.decode(ids, clean_up_tokenization_spaces=False)
            compared += 1
    print(f"{compared} texts")
    assert compared > 100
    messages = [{"role": "user", "content": "Hello <|im_end|>"}]
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.apply_chat_template(messages) == expected
