"""Norms in one call with what stands around them: on several ranks the sum over them and the
residual, on one the residual and the codes that the next product takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import radix_kernels
from radix_runtime import ops
from radix_runtime.config import ServerArgs
from radix_runtime.layers import attention, mlp
from radix_runtime.layers.attention import Attention
from radix_runtime.layers.fused_norms import FusedNorms
from radix_runtime.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from radix_runtime.models import decoder
from radix_runtime.specs import Gqa
from tests.runtime import quantized_models as q
from tests.runtime.family_models import Checkpoints, spec_of
from tests.runtime.model_steps import FusingCommunicator, run_ranks, worst_error
from tests.runtime.test_fp8_products import GPU
from tests.runtime.test_int8_products import by_channel, settings
from tests.runtime.test_layers import context
from tests.runtime.tiny_models import Driver, Sequence, random_ids, reference_logits

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


NORMS = ("rmsnorm", "fused_add_rmsnorm")
CODES = ("per_token_quant_fp8", "per_token_group_quant", "per_token_quant_int8")
BOTH = ("rmsnorm_quant_fp8", "rmsnorm_quant_int8")
GATED = ("silu_and_mul_quant_fp8", "silu_and_mul_quant_int8")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each op was called from now on; references run silently."""
    monkeypatch.setattr(ops, "use_native", lambda *_args, **_options: None)
    before = radix_kernels.get_fallback()
    radix_kernels.set_fallback("reference")
    seen: Counter[str] = Counter()

    def counted(name: str, op: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen[name] += 1
            return op(*args, **options)

        return call

    for name in (*NORMS, *CODES, *BOTH, *GATED):
        monkeypatch.setattr(ops, name, counted(name, getattr(ops, name)))
    yield seen
    radix_kernels.set_fallback(before)


def number(calls: Counter[str], names: tuple[str, ...]) -> int:
    return sum(calls[name] for name in names)


def take_gpu(driver: Driver) -> None:
    """The decoder's choice is that of a GPU."""
    decoder = driver.model.model
    ctx = replace(context(), device=torch.device("cuda"), dtype=torch.bfloat16)
    decoder._fused_norms = FusedNorms(ctx, layers=decoder.layers, norm=decoder.norm)


def errors(driver: Driver, reference: Any, calls: Counter[str]) -> tuple[float, float]:
    """How far a step's logits are from the reference's, as a share: by the modules' own `forward`,
    and with norms fused, whose calls are counted."""
    fused = driver.model.model._fused_norms
    assert fused.applies
    ids = random_ids(driver.config, 40, seed=4)
    expected = reference_logits(reference, ids)
    found = []
    for applies in (False, True):
        fused.applies = applies
        calls.clear()
        logits = driver.step([(Sequence(int(applies), ids), len(ids))])
        assert logits is not None
        found.append(float((logits - expected).norm() / expected.norm()))
    return found[0], found[1]


@pytest.mark.parametrize("form", ["fp8_block", "FP8_DYNAMIC", "FP8", "at load", "int8"])
def test_one_rank_norms_and_quantizes_in_one_call(
    form: str, tmp_path: Path, calls: Counter[str]
) -> None:
    """Codes of x are made by themselves for the product behind attention alone, but where a scale
    is the checkpoint's, as in FP8."""
    model: Any = q.random_model("llama")
    args = None
    if form == "at load":
        q.save(model, tmp_path)
        args = ServerArgs(model_path=str(tmp_path), quantization="fp8")
    else:
        written = {"int8": (by_channel, settings()), "fp8_block": (q.fp8_block, q.FP8_BLOCK)}
        model = q.write(model, tmp_path, *(written.get(form) or q.compressed(form))).reference
    driver = Driver(tmp_path, dtype=torch.bfloat16, args=args, target=GPU)
    take_gpu(driver)
    layers = len(driver.model.model.layers)
    before, after = errors(driver, model, calls)
    assert 0 < after < 1.3 * before
    if form == "FP8":  # every norm but the first adds the residual
        assert calls["rmsnorm"] == 1 and calls["fused_add_rmsnorm"] == 2 * layers
        return
    assert calls["rmsnorm"] == 0 and calls["fused_add_rmsnorm"] == 1  # the last one
    assert number(calls, BOTH) == 2 * layers
    assert number(calls, GATED) == number(calls, CODES) == layers


def test_one_rank_leaves_the_sum_of_experts_to_the_norm(
    checkpoint: Checkpoints, calls: Counter[str]
) -> None:
    """In the compute type attention's last product adds the residual, experts do not."""
    folder, reference = checkpoint("qwen3_moe")
    driver = Driver(folder)
    driver.model.model._cpu_decoder.applies_to = lambda pool: False
    take_gpu(driver)
    assert max(errors(driver, reference, calls)) < 1e-5
    layers = len(driver.model.model.layers)
    assert calls["rmsnorm"] == layers + 1 and calls["fused_add_rmsnorm"] == layers
    assert worst_error(driver, reference, seed=5) < TOLERANCE


def test_a_dense_model_in_the_compute_type_stays_as_it_is(checkpoint: Checkpoints) -> None:
    """Its products add the residual before they round."""
    folder, _ = checkpoint("llama")
    driver = Driver(folder)
    take_gpu(driver)
    assert not driver.model.model._fused_norms.applies


def test_a_cpu_keeps_the_bits_of_its_one_call(checkpoint: Checkpoints) -> None:
    folder, _ = checkpoint("qwen3_moe")
    assert not Driver(folder).model.model._fused_norms.applies


class OwnQKV(QKVLinear):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x) + x.new_zeros(1)


class OwnColumns(ColumnParallelLinear):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x) + x.new_zeros(1)


class OwnRows(RowParallelLinear):
    def part(self, x: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
        return super().part(x, residual) + x.new_zeros(1)

    def forward(self, x: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.part(x, residual)


@pytest.mark.parametrize(
    ("module", "name", "own"),
    [
        (attention, "QKVLinear", OwnQKV),
        (mlp, "ColumnParallelLinear", OwnColumns),
        (mlp, "RowParallelLinear", OwnRows),
        (attention, "RowParallelLinear", OwnRows),
    ],
)
def test_a_linear_layer_with_a_forward_of_its_own_sees_x(
    module: Any,
    name: str,
    own: Any,
    tmp_path: Path,
    calls: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = q.random_model("llama")
    q.save(model, tmp_path)
    monkeypatch.setattr(module, name, own)
    args = ServerArgs(model_path=str(tmp_path), quantization="fp8")
    driver = Driver(tmp_path, dtype=torch.bfloat16, args=args, target=GPU)
    take_gpu(driver)
    ids = random_ids(driver.config, 20, seed=4)
    logits = driver.step([(Sequence(0, ids), len(ids))])
    assert logits is not None
    expected = reference_logits(model, ids)
    assert 0 < float((logits - expected).norm() / expected.norm()) < 0.3
