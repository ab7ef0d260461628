"""The layers of a model in one call of the wheel: which families, and the bits of the modules."""

from __future__ import annotations

import pytest
import torch

from radix_runtime import ops
from radix_runtime.config import ServerArgs
from tests.runtime.family_models import FAMILY_MODELS, ONE_CALL, Checkpoints
from tests.runtime.tiny_models import Driver, Sequence, random_ids

torch.set_num_threads(1)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_which_families_are_one_call_of_the_wheel(checkpoint: Checkpoints, name: str) -> None:
    """And that it gives the bits of the modules."""
    if ops.capabilities()["backend"] != "cpu":
        pytest.skip("no native CPU library")
    folder, _ = checkpoint(name)
    driver = Driver(folder)
    decoder = driver.model.model._cpu_decoder
    assert decoder.applies_to(driver.pool) == (name in ONE_CALL)
    ids = random_ids(driver.config, 30, seed=4)
    expected = driver.step([(Sequence(0, ids), 30)])
    decoder._is_possible = False
    decoder._decoder = None
    assert torch.equal(driver.step([(Sequence(1, ids), 30)]), expected)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_odd_width", "glm4_moe", "minimax_m2"])
def test_one_call_of_packed_experts(
    checkpoint: Checkpoints, name: str, quantization: str | None
) -> None:
    """Prompts of two rows, then a token of each: the bits of the modules."""
    if ops.capabilities()["backend"] != "cpu":
        pytest.skip("no native CPU library")
    folder, _ = checkpoint(name)
    args = ServerArgs(model_path=str(folder), quantization=quantization)
    driver = Driver(folder, dtype=torch.bfloat16, args=args)
    decoder = driver.model.model._cpu_decoder
    ids = [random_ids(driver.config, 10, seed) for seed in range(2)]

    def steps(first_row: int) -> torch.Tensor:
        rows = [Sequence(first_row + row, x) for row, x in enumerate(ids)]
        prompts = driver.step([(rows[0], 9), (rows[1], 9)])
        decode = driver.step([(x, 1) for x in rows], from_device=tuple(rows))
        assert prompts is not None
        assert decode is not None
        return torch.cat([prompts, decode])

    assert decoder.applies_to(driver.pool)
    expected = steps(0)
    decoder._is_possible = False
    decoder._decoder = None
    assert torch.equal(steps(2), expected)
