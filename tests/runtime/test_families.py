"""Every family against transformers: float32 logits over mixed steps, pages and ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.family_models import FAMILY_MODELS, random_model
from tests.runtime.model_steps import ThreadCommunicator, mixed_schedule, run_ranks
from tests.runtime.tiny_models import (
    Driver,
    Sequence,
    random_ids,
    reference_logits,
    relative_error,
    save,
)

torch.set_num_threads(1)
TOLERANCE = 1e-4
LENGTHS = [37, 21, 66]
PROMPTS = [30, 1, 40]
Checkpoints = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """name -> (directory, transformers model), made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            model = random_model(name)
            made[name] = save(model, tmp_path_factory.mktemp(name)), model
        return made[name]

    return make


def worst_error(driver: Driver, reference: Any, seed: int) -> float:
    """The largest relative error of a step's logits; greedy tokens must be equal. 0 on the ranks
    that have no logits."""
    ids = [random_ids(driver.config, n, seed + i) for i, n in enumerate(LENGTHS)]
    expected = [reference_logits(reference, x) for x in ids]
    sequences = [Sequence(row, x) for row, x in zip([4, 0, 7], ids, strict=True)]
    worst = 0.0
    for work in mixed_schedule(LENGTHS, PROMPTS, seed=seed):
        spans = [(i, sequences[i].computed, count) for i, count in work]
        decoding = tuple(sequences[i] for i, at, count in spans if at >= PROMPTS[i])
        logits = driver.step([(sequences[i], n) for i, n in work], from_device=decoding)
        if logits is None:
            continue
        wanted = torch.cat([expected[i][at : at + count] for i, at, count in spans])
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
        worst = max(worst, relative_error(logits, wanted))
    return worst


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_logits(checkpoint: Checkpoints, name: str, page_size: int) -> None:
    folder, reference = checkpoint(name)
    driver = Driver(folder, page_size=page_size)
    assert driver.config.unknown_keys == ()
    error = worst_error(driver, reference, seed=page_size)
    print(f"{name} page {page_size}: {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_two_ranks(checkpoint: Checkpoints, name: str, page_size: int) -> None:
    folder, reference = checkpoint(name)

    def work(comm: ThreadCommunicator) -> float:
        driver = Driver(folder, page_size=page_size, communicator=comm)  # type: ignore[arg-type]
        return worst_error(driver, reference, seed=3 + page_size)

    assert 0 < run_ranks(2, work)[0] < TOLERANCE


def test_experts_as_on_the_hub(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Qwen3-VL's files of transformers 4 hold the experts with inputs first."""
    folder, reference = checkpoint("qwen3_vl_moe")
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        if ".experts." in key:
            tensors[key] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert worst_error(Driver(tmp_path), reference, seed=1) < TOLERANCE
