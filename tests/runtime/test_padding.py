"""A padded step has the bits of the step without padding, and stores nothing more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from radix_runtime.step_plan import StepPlan
from radix_runtime.step_shape import StepShape
from tests.runtime.tiny_models import Driver, Sequence, random_ids, reference_model, save

MODELS = ["llama", "mistral_window", "qwen2_bias", "qwen3_tied_odd"]
DECODE = StepShape(tokens=8, entries=8, samples=8, has_chunks=False)
WITH_CHUNKS = StepShape(tokens=16, entries=8, samples=8, has_chunks=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = save(reference_model(name), tmp_path_factory.mktemp(name))
        return made[name]

    return make


def decoding(driver: Driver, chunk: int) -> StepPlan:
    """A step of three decode rows, and of a chunk if it is to have one, behind their prompts."""
    lengths = {5: 20, 0: 1, 3: 33}
    sequences = [
        Sequence(row, random_ids(driver.config, n + 1, seed=row)) for row, n in lengths.items()
    ]
    driver.step([(s, len(s.ids) - 1) for s in sequences])
    work = [(s, 1) for s in sequences]
    if chunk:
        work.append((Sequence(6, random_ids(driver.config, chunk, seed=9)), chunk))
    return driver.plan(work, from_device=tuple(sequences))


@torch.inference_mode()
def hidden_states(driver: Driver, plan: StepPlan, shape: StepShape | None) -> torch.Tensor:
    """Those of the tokens of the plan, in its order."""
    driver.batch.upload(plan, shape)
    driver.batch.fill(driver.next_token, driver.committed_len.clone())
    return driver.model(driver.batch)[: plan.num_tokens]


# The CPU's kernels want every token to belong to an entry: no padded chunks.
@pytest.mark.parametrize("backend, chunk", [(None, 0), ("torch_native", 0), ("torch_native", 9)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing(
    folder: Callable[[str], Path],
    name: str,
    dtype: torch.dtype,
    page_size: int,
    backend: str | None,
    chunk: int,
) -> None:
    driver = Driver(folder(name), dtype=dtype, page_size=page_size, backend=backend)
    plan = decoding(driver, chunk)
    caches = list(driver.pool.tensors())
    for cache in caches:  # the driver did so with the pages that nobody has
        cache[driver.pool.dummy_page].fill_(float("nan"))
    before = [cache.clone() for cache in caches]
    plain = hidden_states(driver, plan, None)
    stored = [cache.clone() for cache in caches]
    for cache, old in zip(caches, before, strict=True):
        cache.copy_(old)
    padded = hidden_states(driver, plan, WITH_CHUNKS if chunk else DECODE)
    assert not plain.isnan().any() and torch.equal(plain, padded)
    for cache, expected, old in zip(caches, stored, before, strict=True):
        assert torch.equal(cache.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert not torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))
