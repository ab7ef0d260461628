"""KV caches in INT8: how near the logits are, in one call of the wheel and layer by layer."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

from radix_runtime import Engine, ops
from radix_runtime.config import ServerArgs
from radix_runtime.engine.facts import resolved_settings
from radix_runtime.errors import ConfigError
from radix_runtime.model_config import ModelConfig
from tests.runtime.family_models import Checkpoints
from tests.runtime.model_steps import ThreadCommunicator, mixed_schedule, run_ranks
from tests.runtime.tiny_models import (
    Driver,
    Sequence,
    random_ids,
    reference_logits,
    relative_error,
)

# Of the median step: values are within 1/254 of their head's largest, all else is float32. Near
# ties of a router choose other experts.
BOUND = 0.02
FAMILIES = ["llama", "qwen3", "gemma2", "gpt_oss", "qwen3_moe"]


def errors(driver: Driver, reference: torch.nn.Module, seed: int) -> list[float]:
    """Of every step of two sequences, in chunks and decoded."""
    ids = [random_ids(driver.config, n, seed + n) for n in (60, 33)]
    expected = [reference_logits(reference, x) for x in ids]
    sequences = [Sequence(row, x) for row, x in zip([3, 5], ids, strict=True)]
    found = []
    for work in mixed_schedule([60, 33], [40, 25], seed=seed):
        spans = [(i, sequences[i].computed, count) for i, count in work]
        decoding = tuple(sequences[i] for i, at, _ in spans if at >= [40, 25][i])
        logits = driver.step([(sequences[i], n) for i, n in work], from_device=decoding)
        if logits is not None:
            wanted = torch.cat([expected[i][at : at + n] for i, at, n in spans])
            found.append(relative_error(logits, wanted))
    return found


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(checkpoint: Checkpoints, name: str, page_size: int) -> None:
    folder, reference = checkpoint(name)
    found = errors(Driver(folder, page_size=page_size, kv_dtype=torch.int8), reference, seed=1)
    assert 1e-5 < statistics.median(found) < BOUND


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_backends_agree(checkpoint: Checkpoints, name: str) -> None:
    """The same codes are read by another backend, in float32."""
    folder, _ = checkpoint(name)
    ids = random_ids(Driver(folder).config, 50, seed=3)
    logits = []
    for backend in ("paged", "torch_native"):
        driver = Driver(folder, kv_dtype=torch.int8, backend=backend)
        logits.append(driver.step([(Sequence(0, ids), 50)]))
    assert relative_error(logits[0], logits[1]) < 1e-3  # a code may fall on another side


def test_two_ranks(checkpoint: Checkpoints) -> None:
    folder, reference = checkpoint("qwen3")

    def work(comm: ThreadCommunicator) -> float:
        driver = Driver(folder, kv_dtype=torch.int8, communicator=comm)
        found = errors(driver, reference, seed=2)
        return statistics.median(found) if found else 0.0

    assert 1e-5 < run_ranks(2, work)[0] < BOUND


def test_one_call_of_the_wheel_has_the_bits_of_the_layers(checkpoint: Checkpoints) -> None:
    if ops.capabilities()["backend"] != "cpu":
        pytest.skip("no native CPU library")
    folder, _ = checkpoint("qwen3")
    driver = Driver(folder, kv_dtype=torch.int8)
    decoder = driver.model.model._cpu_decoder
    assert decoder.applies_to(driver.pool)
    ids = random_ids(driver.config, 30, seed=4)
    expected = driver.step([(Sequence(0, ids), 30)])
    decoder._is_possible = False
    decoder._decoder = None
    assert torch.equal(driver.step([(Sequence(1, ids), 30)]), expected)


def test_the_engine(checkpoint: Checkpoints) -> None:
    """A second pass, over cached prefixes, has the tokens of the first."""
    folder, _ = checkpoint("llama")
    config = ModelConfig.from_dir(folder)
    prompts = [random_ids(config, n, seed=n) for n in (40, 17, 33)]
    sizes = {"max_total_tokens": 512, "chunked_prefill_size": 24, "num_threads": 1}
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    with Engine(model_path=str(folder), kv_cache_dtype="int8", **sizes) as engine:
        first = engine.generate(input_ids=prompts, sampling_params=params)
        second = engine.generate(input_ids=prompts, sampling_params=params)
    assert [x["output_ids"] for x in first] == [x["output_ids"] for x in second]
    assert second[0]["meta_info"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("llama", "fp8_e4m3", "does not support LlamaForCausalLM with torch.float8_e4m3fn KV"),
        ("deepseek_v3", "int8", "latent values have no INT8 form"),
        ("deepseek_v3", "fp8", "does not support DeepseekV3ForCausalLM with torch.float8_e4m3fn"),
    ],
)
def test_what_a_cpu_refuses(checkpoint: Checkpoints, name: str, kind: str, text: str) -> None:
    folder: Path
    folder, _ = checkpoint(name)
    args = ServerArgs(model_path=str(folder), device="cpu", kv_cache_dtype=kind)
    with pytest.raises(ConfigError, match=text):
        resolved_settings(args, ModelConfig.from_dir(folder))
