"""Models of several ranks whose communicator sums, adds the residual and norms in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radix_runtime.layers.attention import Attention
from radix_runtime.models import decoder
from radix_runtime.specs import Gqa
from tests.runtime.family_models import Checkpoints, spec_of
from tests.runtime.model_steps import FusingCommunicator, run_ranks, worst_error
from tests.runtime.tiny_models import Driver

torch.set_num_threads(1)
TOLERANCE = 1e-4


def run(folder: Path, reference: Any, ranks: int) -> list[tuple[float, int, int]]:
    """Of each rank: the largest error of a logit, fused calls and sums alone."""

    def work(comm: FusingCommunicator) -> tuple[float, int, int]:
        driver = Driver(folder, communicator=comm)
        error = worst_error(driver, reference, seed=5)
        return error, comm.fused, comm.reduced

    return run_ranks(ranks, work, FusingCommunicator)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama", 2),  # with biases, which one rank adds
        ("llama", 4),
        ("qwen3", 2),
        ("qwen3_moe", 2),
        ("qwen3_moe_odd_width", 2),  # ranks hold whole experts
        ("qwen2_moe", 2),  # a shared expert
        ("deepseek_v2_lite", 2),  # latent attention; a dense layer first
        ("deepseek_v3", 2),
    ],
)
def test_every_sum_of_a_layer_is_in_one_call_with_its_norm(
    name: str, ranks: int, checkpoint: Checkpoints
) -> None:
    found = run(*checkpoint(name), ranks=ranks)
    assert 0 < found[0][0] < TOLERANCE
    for _, fused, reduced in found:
        # The embedding is summed once a step; a layer has two sums.
        assert fused == 2 * spec_of(name).num_layers * reduced > 0


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "granite"])
def test_layers_of_another_order_sum_alone(name: str, checkpoint: Checkpoints) -> None:
    """What is normed or multiplied before it is added cannot be added in that call."""
    found = run(*checkpoint(name), ranks=2)
    assert 0 < found[0][0] < TOLERANCE
    assert all(fused == 0 for _, fused, _ in found)


def test_a_module_with_a_forward_of_its_own_is_called(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Attention):
        calls = 0

        def forward(self, *args: Any) -> torch.Tensor:  # type: ignore[override]
            Own.calls += 1
            return super().forward(*args)

    monkeypatch.setitem(decoder.MIXERS, Gqa, Own)
    found = run(*checkpoint("qwen3"), ranks=2)
    assert 0 < found[0][0] < TOLERANCE
    assert Own.calls > 0 and all(fused == 0 for _, fused, _ in found)
