"""The layers of a model in one call of the wheel: every family, with the bits of the modules."""

from __future__ import annotations

import pytest
import torch

from radix_runtime import ops
from radix_runtime.config import ServerArgs
from tests.kernel.packed_weights import HAS_TILES
from tests.runtime.family_models import FAMILY_MODELS, Checkpoints
from tests.runtime.model_steps import mixed_schedule
from tests.runtime.tiny_models import Driver, Sequence, random_ids

torch.set_num_threads(1)


def steps(driver: Driver, first_row: int) -> torch.Tensor:
    """Prompts of two rows, then two tokens of each."""
    ids = [random_ids(driver.config, length, seed=length) for length in (30, 11)]
    rows = [Sequence(first_row + row, x) for row, x in enumerate(ids)]
    found = [driver.step([(row, len(row.ids) - 2) for row in rows])]
    for _ in range(2):
        found.append(driver.step([(row, 1) for row in rows], from_device=tuple(rows)))
    logits = [each for each in found if each is not None]
    assert len(logits) == 3
    return torch.cat(logits)


def check(driver: Driver, *, keeps_x: bool = False) -> None:
    """One call gives the bits of the modules, and the steps that it takes are calls of it. keeps_x:
    prompts keep x, which modules quantize: then bits are test_decoder.py's."""
    decoder = driver.model.model._cpu_decoder
    calls = []
    program = decoder._decoder
    decoder._decoder = lambda *args, **options: calls.append(1) or program(*args, **options)
    found = steps(driver, 0)
    assert len(calls) == 3
    decoder._is_possible = False
    decoder._decoder = None
    expected = steps(driver, 2)
    assert found.isfinite().all()
    assert keeps_x or torch.equal(found, expected)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_families_are_one_call_of_the_wheel(checkpoint: Checkpoints, name: str) -> None:
    if ops.capabilities()["backend"] != "cpu":
        pytest.skip("no native CPU library")
    folder, _ = checkpoint(name)
    driver = Driver(folder)
    assert driver.model.model._cpu_decoder.applies_to(driver.pool)
    check(driver)


LENGTHS = [33, 7, 70, 19]
PROMPTS = [29, 1, 66, 19]


def mixed(driver: Driver, first_row: int, seed: int) -> torch.Tensor:
    """Chunks over what is cached and decode rows, in the same steps."""
    rows = [
        Sequence(first_row + i, random_ids(driver.config, length, seed + i))
        for i, length in enumerate(LENGTHS)
    ]
    found = []
    kinds = set()
    for work in mixed_schedule(LENGTHS, PROMPTS, seed):
        decoding = [rows[i] for i, _ in work if rows[i].computed >= PROMPTS[i]]
        kinds.add((len(decoding) > 0, len(decoding) < len(work)))
        found.append(driver.step([(rows[i], n) for i, n in work], from_device=tuple(decoding)))
    assert (True, True) in kinds
    return torch.cat([each for each in found if each is not None])


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_lite", "kimi_k2", "glm4_moe_lite"])
def test_mixed_steps_of_latent_attention(
    checkpoint: Checkpoints, name: str, dtype: torch.dtype, page_size: int
) -> None:
    if ops.capabilities()["backend"] != "cpu":
        pytest.skip("no native CPU library")
    folder, _ = checkpoint(name)
    driver = Driver(folder, page_size=page_size, dtype=dtype)
    decoder = driver.model.model._cpu_decoder
    assert decoder.applies_to(driver.pool)
    found = mixed(driver, 0, seed=page_size)
    decoder._is_possible = False
    decoder._decoder = None
    assert torch.equal(found, mixed(driver, 4, seed=page_size))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        "qwen3_moe_odd_width",
        "glm4_moe",
        "minimax_m2",
        "qwen2_moe",
        "gpt_oss",
        "gpt_oss_odd_width",
        "deepseek_v2",
        "deepseek_v2_lite",
        "deepseek_v3",
        "glm4_moe_lite",
    ],
)
def test_one_call_of_packed_experts(
    checkpoint: Checkpoints, name: str, quantization: str | None
) -> None:
    if ops.capabilities()["backend"] != "cpu":
        pytest.skip("no native CPU library")
    folder, _ = checkpoint(name)
    args = ServerArgs(model_path=str(folder), quantization=quantization)
    driver = Driver(folder, dtype=torch.bfloat16, args=args)
    assert driver.model.model._cpu_decoder.applies_to(driver.pool)
    check(driver, keeps_x=quantization == "int4" and HAS_TILES)
