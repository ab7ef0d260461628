"""INT8 as on a GPU: the wheel's products, here by their references, against float64 of the codes
and of x quantized by the definition; and whole models on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radix_runtime.engine.facts import weight_bytes
from radix_runtime.errors import ConfigError
from radix_runtime.layers.base import BuildContext
from radix_runtime.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from radix_runtime.layers.weight import WeightLayer
from radix_runtime.quantization.compressed_tensors import CompressedTensorsConfig
from radix_runtime.quantization.int8_products import Int8RowMethod
from radix_runtime.quantization.storage import WidenedMethod
from tests.runtime import quantized_models as q
from tests.runtime.model_steps import ThreadCommunicator, run_ranks
from tests.runtime.test_fp8_products import GPU, close, load, made, references, relative
from tests.runtime.test_layers import context
from tests.runtime.tiny_models import Driver

torch.set_num_threads(1)
__all__ = ["references"]  # a fixture of every test
OF_A_MODEL = 0.08  # x in INT8 is 1 % off in every product; a wrong scale is several times as much


def settings(
    *, strategy: str = "channel", group_size: int | None = None, **inputs: Any
) -> dict[str, Any]:
    """int-quantized, x dynamic by token but for what `inputs` changes."""
    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "group_size": group_size}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, **inputs}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def on_gpu(rank: int = 0, size: int = 1, **changes: Any) -> BuildContext:
    quantization = CompressedTensorsConfig.from_checkpoint(settings(**changes), GPU)
    return context(rank, size, quantization=quantization, dtype=torch.bfloat16)


def by_channel(weight: torch.Tensor) -> tuple[q.Tensors, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def by_tensor(weight: torch.Tensor) -> tuple[q.Tensors, torch.Tensor]:
    scale = weight.abs().max() / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale.reshape(1)}, codes.float() * scale


def by_token(x: torch.Tensor) -> torch.Tensor:
    """x as INT8, float64."""
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    return (x.double() / scale).round() * scale


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_merged_tensors_keep_their_scales(strategy: str) -> None:
    quantize = by_channel if strategy == "channel" else by_tensor
    sizes = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    tensors, weight = made(quantize, sizes, 272)
    tensors["k_proj"]["weight_scale"] *= 3
    weight[128:192] *= 3
    layer = QKVLinear(
        on_gpu(strategy=strategy), 272, head_dim=64, num_heads=2, num_kv_heads=1, bias=False
    )
    load(layer, tensors)
    assert isinstance(layer.method, Int8RowMethod)
    assert layer.weight.dtype == torch.int8 and layer.weight_scale.shape == (256,)
    x = torch.randn(4, 272).bfloat16()
    assert close(layer(x), by_token(x) @ weight.T)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_inputs_of_a_rank(rank: int) -> None:
    """With a bias, and a residual."""
    tensors, weight = made(by_channel, {None: 208}, 544)
    bias = torch.randn(208).bfloat16()
    tensors[None]["bias"] = bias
    layer = RowParallelLinear(on_gpu(rank, 2), in_features=544, out_features=208, bias=True)
    load(layer, tensors)
    assert isinstance(layer.method, Int8RowMethod)
    x = torch.randn(3, 272).bfloat16()
    residual = torch.randn(3, 208).bfloat16()
    expected = by_token(x) @ weight[:, 272 * rank : 272 * (rank + 1)].T
    if rank == 0:
        expected += bias.double() + residual.double()
    assert close(layer(x, residual.clone()), expected)


def test_a_token_of_zeros_is_zero() -> None:
    tensors, weight = made(by_channel, {"a": 64}, 128)
    layer = ColumnParallelLinear(on_gpu(), in_features=128, outputs={"a": 64})
    load(layer, tensors)
    x = torch.randn(3, 128).bfloat16()
    x[1] = 0
    found = layer(x)
    assert not found[1].any()
    assert close(found[::2], by_token(x[::2]) @ weight.T)


@pytest.mark.parametrize(("inputs", "outputs"), [(136, 64), (128, 72)])
def test_sizes_that_no_kernel_takes_are_widened(inputs: int, outputs: int) -> None:
    tensors, weight = made(by_channel, {"a": outputs}, inputs)
    layer = ColumnParallelLinear(on_gpu(), in_features=inputs, outputs={"a": outputs})
    load(layer, tensors)
    assert type(layer.method) is WidenedMethod
    assert layer.method.widens == "INT8"
    x = torch.randn(3, inputs).bfloat16()
    assert close(layer(x), x.double() @ weight.T)


def test_scales_that_are_not_finite_are_refused() -> None:
    tensors, _ = made(by_channel, {"a": 64}, 128)
    tensors["a"]["weight_scale"][7] = float("nan")
    layer = ColumnParallelLinear(on_gpu(), in_features=128, outputs={"a": 64})
    with pytest.raises((ConfigError, ValueError), match="not finite"):
        load(layer, tensors)


@pytest.mark.parametrize(
    "changes",
    [
        {"dynamic": False, "strategy": "tensor"},
        {"symmetric": False},
        {"num_bits": 4},
        {"type": "float"},
    ],
)
def test_other_activations_are_refused_by_name(changes: dict[str, Any]) -> None:
    raw = settings()
    raw["config_groups"]["group_0"]["input_activations"] |= changes
    with pytest.raises(ConfigError, match=r"group_0 \(int-quantized.*activations.*there are"):
        CompressedTensorsConfig.from_checkpoint(raw, GPU)


@pytest.mark.parametrize(
    ("model", "ranks"), [("llama", 1), ("llama", 2), ("qwen3_moe", 2), ("deepseek_v3", 1)]
)
def test_models(model: str, ranks: int, tmp_path: Path) -> None:
    """Experts are widened: no kernel of a GPU multiplies them."""
    quantize, config = q.compressed("W8A8")
    files = q.write(q.random_model(model), tmp_path / "model", quantize, config)

    def work(comm: ThreadCommunicator) -> float:
        driver = Driver(
            files.folder,
            dtype=torch.bfloat16,
            communicator=comm,  # type: ignore[arg-type]
            target=GPU,
        )
        layers = [layer for layer in driver.model.modules() if isinstance(layer, WeightLayer)]
        assert any(layer.weight.dtype == torch.int8 for layer in layers)
        for layer in layers:
            if isinstance(layer.method, Int8RowMethod):
                assert layer.held_bytes() == weight_bytes(layer)
        return relative(driver, files.reference)

    assert 1e-3 < run_ranks(ranks, work)[0] < OF_A_MODEL


def test_float32_is_widened(tmp_path: Path) -> None:
    """The comparison for a GPU's answers: the same codes, nothing rounded."""
    quantize, config = q.compressed("W8A8")
    files = q.write(q.random_model("llama"), tmp_path / "model", quantize, config)
    target = type(GPU)(device=torch.device("cuda"), dtype=torch.float32)
    assert relative(Driver(files.folder, target=target), files.reference) < 1e-5
