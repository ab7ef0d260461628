"""What a GPU merges, forced on the CPU: queries with latent values, the shared expert with the
others. Against transformers, with one and two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.gpu_runtime import radix_engine
from radix_runtime.layers import mla
from radix_runtime.layers.base import BuildContext
from radix_runtime.layers.cpu_decoder import CpuDecoder
from radix_runtime.layers.mla import LatentAttention
from radix_runtime.layers.moe import Experts, SparseMoe
from radix_runtime.layers.weight import weight_bytes
from radix_runtime.quantization.base import LinearMethod
from radix_runtime.quantization.config import LayerKind
from radix_runtime.quantization.dense import Int4Method, Int8Method
from radix_runtime.quantization.registry import quantizations
from radix_runtime.specs import Mla
from tests.runtime import quantized_models as q
from tests.runtime.family_models import Checkpoints
from tests.runtime.model_steps import ThreadCommunicator, run_ranks, worst_error
from tests.runtime.stacked_format import StackedAtLoad, StackedMethod
from tests.runtime.test_fp8_products import OF_A_MODEL, gpu_driver, references, relative
from tests.runtime.tiny_models import (
    Driver,
    Sequence,
    random_ids,
    reference_logits,
    relative_error,
)

torch.set_num_threads(1)
__all__ = ["references"]  # a fixture
TOLERANCE = 1e-4


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    merges = mla.merges_inputs

    def on_a_gpu(ctx: BuildContext, hidden_size: int, spec: Mla) -> bool:
        return merges(replace(ctx, device=torch.device("cuda")), hidden_size, spec)

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


@pytest.mark.usefixtures("as_on_a_gpu", "references")
@pytest.mark.parametrize("ranks", [1, 2])
def test_fp8_in_blocks(tmp_path: Path, ranks: int) -> None:
    """Codes and scales of the shared expert, and of both products behind one norm."""
    files = q.write(q.random_model("deepseek_v3"), tmp_path, q.fp8_odd_block, q.FP8_BLOCK)

    def work(comm: ThreadCommunicator) -> float:
        driver = gpu_driver(files.folder, comm)
        for module in driver.model.modules():
            if isinstance(module, LatentAttention):
                assert module.inputs is not None
                assert module.inputs.weight.dtype == torch.float8_e4m3fn
            if isinstance(module, SparseMoe):
                assert module.experts.num_shared == 1 and module.shared_expert is None
        return relative(driver, files.reference)

    assert 1e-3 < run_ranks(ranks, work)[0] < OF_A_MODEL


class SharedInCodes(StackedAtLoad):
    """As a checkpoint whose experts are widened, or left out, and whose shared one is not."""

    def method_of(self, name: str, kind: LayerKind) -> LinearMethod:
        if ".shared_expert" in name:
            return Int8Method(quantizes_x=False)
        return super().method_of(name, kind)


def test_a_shared_expert_of_another_format_stays_alone(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = checkpoint("deepseek_v3")
    monkeypatch.setitem(quantizations._items, "dense", SharedInCodes)
    driver = Driver(folder)
    mixtures = [module for module in driver.model.modules() if isinstance(module, SparseMoe)]
    assert mixtures
    for mixture in mixtures:
        assert mixture.experts.num_shared == 0
        assert mixture.shared_expert is not None
        assert mixture.shared_expert.down_proj.weight.kind == "int8"
    ids = random_ids(driver.config, 50, seed=2)
    logits = driver.step([(Sequence(0, ids), len(ids))])
    assert relative_error(logits, reference_logits(reference, ids)) < 0.05


class WidenedPlain(StackedMethod):
    widens = "some format"


def test_only_weights_that_can_be_cut_are_merged() -> None:
    assert StackedMethod().is_divisible
    assert not Int4Method().is_divisible
    assert not WidenedPlain().is_divisible


@pytest.mark.usefixtures("as_on_a_gpu")
def test_merged_weights_count_once(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoint("deepseek_v2")
    merged = weight_bytes(Driver(folder).model)
    monkeypatch.setattr(Experts, "_takes_shared", lambda *_: False)
    assert weight_bytes(Driver(folder).model) == merged


def test_shared_experts_are_not_counted_as_chosen() -> None:
    """By the bench of the experts that an engine's rows choose."""
    seen: list[np.ndarray] = []
    ids = torch.tensor([[3, 1, 64, 65], [0, 2, 64, 65]], dtype=torch.int32)
    gate = SimpleNamespace(top_k=2, route=lambda x: (torch.ones(2, 4), ids))
    weights, routed = radix_engine._noting(gate, seen)(torch.zeros(2, 8))
    assert routed is ids and weights.shape == (2, 4)
    assert seen[0].tolist() == [[3, 1], [0, 2]]
