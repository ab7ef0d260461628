"""What a GPU merges, forced on the CPU: queries with latent values, the shared expert with the
others. Against transformers, with one and two ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from radix_runtime.layers import mla
from radix_runtime.layers.base import BuildContext
from radix_runtime.layers.cpu_decoder import CpuDecoder
from radix_runtime.layers.mla import LatentAttention
from radix_runtime.layers.moe import SparseMoe
from radix_runtime.quantization.at_load import AtLoad
from radix_runtime.quantization.base import LinearMethod
from radix_runtime.quantization.dense import Int4Method, PlainMethod
from radix_runtime.quantization.registry import quantizations
from radix_runtime.specs import Mla
from tests.runtime.family_models import Checkpoints
from tests.runtime.model_steps import ThreadCommunicator, run_ranks, worst_error
from tests.runtime.tiny_models import Driver

torch.set_num_threads(1)
TOLERANCE = 1e-4


class StackedMethod(PlainMethod):
    """As a GPU holds experts."""

    stacks_experts = True


class StackedAtLoad(AtLoad):
    def linear(self) -> LinearMethod:
        return StackedMethod()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    merges = mla.merges_inputs

    def on_a_gpu(ctx: BuildContext, spec: Mla) -> bool:
        return merges(replace(ctx, device=torch.device("cuda")), spec)

    monkeypatch.setattr(mla, "merges_inputs", on_a_gpu)
    monkeypatch.setattr(CpuDecoder, "applies_to", lambda *_: False)
    monkeypatch.setitem(quantizations._items, "dense", StackedAtLoad)


# By family: whether its queries and latent values are merged (deepseek_v2_lite has a bias for the
# latter alone), and how many experts its shared one becomes.
FAMILIES = {
    "deepseek_v2": (True, 2),
    "deepseek_v2_lite": (False, 2),
    "deepseek_v3": (True, 1),
    "kimi_k2": (True, 1),
    "glm4_moe": (None, 1),
    "qwen2_moe": (None, 0),  # its shared expert is weighed
    "qwen3_moe": (None, 0),
}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(checkpoint: Checkpoints, name: str, ranks: int) -> None:
    folder, reference = checkpoint(name)
    merges, num_shared = FAMILIES[name]

    def work(comm: ThreadCommunicator) -> float:
        driver = Driver(folder, communicator=comm)
        for module in driver.model.modules():
            if isinstance(module, LatentAttention):
                assert (module.inputs is not None) == merges
            if isinstance(module, SparseMoe):
                assert module.experts.num_shared == num_shared
                assert (module.shared_expert is None) == (num_shared > 0 or name == "qwen3_moe")
                stack = module.experts._stacks[0].tensors["weight"]
                assert len(stack) == len(module.experts) + num_shared
        return worst_error(driver, reference, seed=5)

    assert 0 < run_ranks(ranks, work)[0] < TOLERANCE


def test_only_plain_weights_are_merged() -> None:
    assert StackedMethod().is_plain
    assert not Int4Method().is_plain
