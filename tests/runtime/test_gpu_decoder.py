"""What the kernel for a whole decode step is given, and when, on a stand-in of it. Its own tests
are in tests/kernel/test_persistent_decoder.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radix_runtime.config import ServerArgs
from radix_runtime.layers import gpu_decoder
from radix_runtime.layers.gpu_decoder import GpuDecoder, lower
from radix_runtime.layers.moe import Experts
from radix_runtime.layers.router import SoftmaxGate
from radix_runtime.layers.weight import WeightStack
from radix_runtime.quantization.dense import DenseMethod
from radix_runtime.quantization.fp8_products import Fp8ExpertsAtLoad
from radix_runtime.step_shape import StepShape
from tests.runtime.family_models import FAMILY_MODELS, Checkpoints
from tests.runtime.tiny_models import Driver

torch.set_num_threads(1)

# The others have what the kernel does not know: these Llamas biases, these Mistrals windows.
LOWERED = {"qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_vl", "seed_oss"}
# With experts.
MIXTURES = {"qwen3_moe", "qwen3_moe_odd_width", "qwen3_vl_moe"}

ORIGINAL_STACKED = Experts.stacked


class StandIn:
    """Keeps what it is made of."""

    max_tokens = 3
    HEAD_DIM = 0  # as the model at hand has it: those of tests are small

    def __init__(self, **parts: Any) -> None:
        self.parts = parts


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights as a GPU has them, rows of the compute type."""

    def plain_weight(self: DenseMethod, layer: Any) -> torch.Tensor | None:
        shape = layer.shape
        return torch.zeros(shape.out_features, shape.in_features) if self.kind is None else None

    def stacked(self: Experts) -> tuple[dict[str, torch.Tensor], ...] | None:
        if self._has_terms:
            return None
        shapes = (self["0"].gate_up_proj.shape, self["0"].down_proj.shape)
        return tuple(
            {"weight": torch.zeros(len(self), shape.out_features, shape.in_features)}
            for shape in shapes
        )

    monkeypatch.setattr(DenseMethod, "plain_weight", plain_weight)
    monkeypatch.setattr(Experts, "stacked", stacked)
    monkeypatch.setattr(gpu_decoder.ops, "PersistentDecoder", StandIn)
    yield


def lowered(driver: Driver) -> Any:
    model = driver.model.model
    take_head_size(driver)
    return lower(list(model.layers), model.norm, driver.pool)


def take_head_size(driver: Driver) -> None:
    """The stand-in serves the heads of this model."""
    spec = getattr(driver.model.model.layers[0].self_attn, "spec", None)
    StandIn.HEAD_DIM = getattr(spec, "head_dim", 0)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_which_families_are_lowered(checkpoint: Checkpoints, name: str) -> None:
    folder, _ = checkpoint(name)
    driver = Driver(folder, dtype=torch.bfloat16)
    if name not in LOWERED | MIXTURES:
        with pytest.raises(NotImplementedError):
            lowered(driver)
        return
    parts = lowered(driver).parts
    spec = driver.config.spec
    assert len(parts["layers"]) == spec.num_layers
    for index, (layer, module) in enumerate(
        zip(parts["layers"], driver.model.model.layers, strict=True)
    ):
        attention = module.self_attn
        width = attention.o_proj.shape.in_features
        assert layer.qkv.shape == (sum(attention.qkv_proj.sizes), spec.hidden_size)
        assert layer.o.shape == (spec.hidden_size, width)
        assert layer.gate_up.shape[-2] == 2 * layer.down.shape[-1]
        assert (layer.router is not None) == (name in MIXTURES)
        assert layer.qkv_bias is attention.qkv_proj.bias
        assert layer.input_norm is module.input_layernorm.weight
        assert layer.post_norm is module.post_attention_layernorm.weight
        assert layer.k_cache is driver.pool.k[index]
        assert layer.v_cache is driver.pool.v[index]
        assert (layer.q_norm is None) == (attention.q_norm is None)
    assert parts["final_norm"] is driver.model.model.norm.weight
    assert parts["softmax_scale"] == driver.model.model.layers[0].self_attn.spec.scale


def test_what_a_mixture_gives(checkpoint: Checkpoints) -> None:
    folder, _ = checkpoint("qwen3_moe")
    driver = Driver(folder, dtype=torch.bfloat16)
    parts = lowered(driver).parts
    assert (parts["top_k"], parts["renormalize"]) == (2, True)
    hidden = driver.config.spec.hidden_size
    for layer in parts["layers"]:
        assert layer.router.shape == (6, hidden)
        assert layer.gate_up.shape == (6, 64, hidden)
        assert layer.down.shape == (6, hidden, 32)


def test_experts_as_the_runtime_holds_them_on_a_gpu(checkpoint: Checkpoints) -> None:
    """Stacked, they are the memory that `fused_experts` reads."""
    folder, _ = checkpoint("qwen3_moe")
    experts = Driver(folder, dtype=torch.bfloat16).model.model.layers[0].mlp.experts
    assert ORIGINAL_STACKED(experts) is None, "packed on a CPU"
    stacks = (WeightStack(6), WeightStack(6))
    for index in range(6):
        for stack, name in zip(stacks, ("gate_up_proj", "down_proj"), strict=True):
            weight = torch.randn(getattr(experts[str(index)], name).weight.shape)
            stack.put("weight", index, weight)
    experts._stacks = stacks
    gate_up, down = ORIGINAL_STACKED(experts)
    assert gate_up["weight"] is stacks[0].tensors["weight"]
    assert down["weight"] is stacks[1].tensors["weight"]
    experts._expert_map = torch.zeros(6)
    assert ORIGINAL_STACKED(experts) is None, "a part of them is elsewhere"


def test_what_is_not_lowered(checkpoint: Checkpoints) -> None:
    folder, _ = checkpoint("qwen3")
    with pytest.raises(NotImplementedError, match="of another type"):
        lowered(Driver(folder, dtype=torch.float32))
    args = ServerArgs(model_path=str(folder), quantization="int8")
    with pytest.raises(NotImplementedError, match="is quantized"):
        lowered(Driver(folder, dtype=torch.bfloat16, args=args))
    changed = Driver(folder, dtype=torch.bfloat16)
    changed.model.model.layers[1].mlp.activation = "gelu"
    with pytest.raises(NotImplementedError, match="the activation is gelu"):
        lowered(changed)
    changed = Driver(folder, dtype=torch.bfloat16)
    down = changed.model.model.layers[1].mlp.down_proj
    down.shape = replace(down.shape, inputs=replace(down.shape.inputs, size=8))
    with pytest.raises(NotImplementedError, match="layers differ"):
        lowered(changed)
    changed = Driver(folder, dtype=torch.bfloat16)
    changed.model.model.layers[1].input_layernorm.eps = 0.5
    with pytest.raises(NotImplementedError, match="eps"):
        lowered(changed)


def test_weights_in_blocks_come_with_their_scales(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU has an FP8 checkpoint's; the router's stay as they are."""
    folder, _ = checkpoint("qwen3_moe")
    driver = Driver(folder, dtype=torch.bfloat16)
    layers = driver.model.model.layers
    gates = [layer.mlp.gate for layer in layers]
    plain = DenseMethod.plain_weight
    blocks = Fp8ExpertsAtLoad()

    def plain_router(self: DenseMethod, layer: Any) -> torch.Tensor | None:
        return plain(self, layer) if any(layer is gate for gate in gates) else None

    def of_blocks(self: DenseMethod, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        rows = layer.shape.out_features
        held = SimpleNamespace(
            shape=layer.shape,
            weight=torch.zeros(rows + 3, layer.shape.in_features, dtype=torch.float8_e4m3fn),
            weight_scale=torch.ones(2, 3),
        )
        return blocks.block_weight(held)

    scales = {"weight_scale": torch.ones(6, 2, 3)}
    monkeypatch.setattr(DenseMethod, "plain_weight", plain_router)
    monkeypatch.setattr(DenseMethod, "block_weight", of_blocks)
    stacked = Experts.stacked
    monkeypatch.setattr(
        Experts, "stacked", lambda self: tuple(each | scales for each in stacked(self))
    )
    monkeypatch.setattr(Experts, "method", blocks)
    for layer in lowered(driver).parts["layers"]:
        assert layer.router.dtype == torch.float32, "the stand-in's plain weights"
        assert layer.qkv.dtype == layer.o.dtype == torch.float8_e4m3fn
        assert layer.o.shape == (64, 128), "without rows that fill up the last block"
        assert layer.qkv_scale.shape == layer.o_scale.shape == (2, 3)
        assert layer.gate_up_scale is layer.down_scale is scales["weight_scale"]
    monkeypatch.setattr(DenseMethod, "plain_weight", lambda self, layer: None)
    with pytest.raises(NotImplementedError, match="the router is quantized"):
        lowered(driver)


class OwnGate(SoftmaxGate):
    """It chooses by itself."""

    def route(self, x: torch.Tensor) -> Any:
        return super().route(-x)


def test_which_mixtures_are_not_lowered(checkpoint: Checkpoints) -> None:
    folder, _ = checkpoint("qwen3_moe_mixed")
    with pytest.raises(NotImplementedError, match="layers differ"):
        lowered(Driver(folder, dtype=torch.bfloat16))
    folder, _ = checkpoint("qwen3_moe")
    args = ServerArgs(model_path=str(folder), quantization="int8")
    with pytest.raises(NotImplementedError, match="is quantized"):
        lowered(Driver(folder, dtype=torch.bfloat16, args=args))
    changed = Driver(folder, dtype=torch.bfloat16)
    changed.model.model.layers[1].mlp.gate.num_shared = 1
    with pytest.raises(NotImplementedError, match="share an expert"):
        lowered(changed)
    changed = Driver(folder, dtype=torch.bfloat16)
    changed.model.model.layers[1].mlp.gate.__class__ = OwnGate
    with pytest.raises(NotImplementedError, match="chosen in another way"):
        lowered(changed)
    changed = Driver(folder, dtype=torch.bfloat16)
    gate = changed.model.model.layers[1].mlp.gate
    gate.router = replace(gate.router, renormalize=False)
    with pytest.raises(NotImplementedError, match="layers differ"):
        lowered(changed)


def test_only_what_a_row_reads_counts(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of six experts."""
    folder, _ = checkpoint("qwen3_moe")
    driver = Driver(folder, dtype=torch.bfloat16)
    layer = lowered(driver).parts["layers"][0]
    outside = sum(each.nbytes for each in (layer.qkv, layer.o, layer.router))
    size = outside + (layer.gate_up.nbytes + layer.down.nbytes) // 3
    monkeypatch.setattr(gpu_decoder, "_MOST_LAYER_BYTES", 0)
    monkeypatch.setattr(gpu_decoder, "_MOST_MIXTURE_BYTES", size)
    lowered(driver)
    monkeypatch.setattr(gpu_decoder, "_MOST_MIXTURE_BYTES", size - 1)
    with pytest.raises(NotImplementedError, match="too large"):
        lowered(driver)


@pytest.mark.parametrize(("is_fp8", "most"), [(False, 1), (True, 2)])
def test_which_steps_of_a_mixture_it_takes(
    is_fp8: bool, most: int, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row reads experts of its own, in FP8 half the bytes."""
    folder, _ = checkpoint("qwen3_moe")
    driver = Driver(folder, dtype=torch.bfloat16)
    decoder = driver.model.model._gpu_decoder
    decoder._is_possible = True
    take_head_size(driver)
    if is_fp8:
        monkeypatch.setattr(Experts, "method", Fp8ExpertsAtLoad())
    taken = [decoder.applies_to(Batch(driver.pool, decode(rows))) for rows in (1, 2, 3)]
    assert taken == [rows <= most for rows in (1, 2, 3)]


def test_heads_of_another_size_run_layer_by_layer(checkpoint: Checkpoints) -> None:
    """The kernel refuses them as a mistake in the shapes."""
    folder, _ = checkpoint("qwen3")
    driver = Driver(folder, dtype=torch.bfloat16)
    decoder = driver.model.model._gpu_decoder
    decoder._is_possible = True
    StandIn.HEAD_DIM = 128
    assert not decoder.applies_to(Batch(driver.pool, decode(1)))
    with pytest.raises(NotImplementedError, match="heads have another size"):
        lower(list(driver.model.model.layers), driver.model.model.norm, driver.pool)


class Batch:
    """What the choice looks at."""

    def __init__(self, pool: Any, shape: StepShape | None) -> None:
        self.kv_pool = pool
        self.shape = shape


def decode(rows: int) -> StepShape:
    return StepShape(tokens=rows, entries=rows, samples=rows, has_chunks=False)


def test_which_steps_it_takes(checkpoint: Checkpoints) -> None:
    folder, _ = checkpoint("qwen3")
    driver = Driver(folder, dtype=torch.bfloat16)
    take_head_size(driver)
    model = driver.model.model
    decoder = model._gpu_decoder
    assert not decoder.applies_to(Batch(driver.pool, decode(1))), "the model is on a CPU"
    decoder._is_possible = True
    assert [decoder.applies_to(Batch(driver.pool, decode(rows))) for rows in range(1, 6)] == [
        True, True, True, False, False,
    ]  # fmt: skip
    chunks = StepShape(tokens=1, entries=1, samples=1, has_chunks=True)
    assert not decoder.applies_to(Batch(driver.pool, chunks))
    assert not decoder.applies_to(Batch(driver.pool, None)), "several tokens of a row, say"
    StandIn.max_tokens = 8
    try:
        assert decoder.applies_to(Batch(driver.pool, decode(4)))
        assert not decoder.applies_to(Batch(driver.pool, decode(5)))
    finally:
        StandIn.max_tokens = 3


def test_it_is_lowered_anew_for_another_pool(checkpoint: Checkpoints) -> None:
    folder, _ = checkpoint("qwen2")
    driver = Driver(folder, dtype=torch.bfloat16)
    take_head_size(driver)
    decoder = driver.model.model._gpu_decoder
    assert isinstance(decoder, GpuDecoder)
    decoder._is_possible = True
    assert decoder.applies_to(Batch(driver.pool, decode(1)))
    first = decoder._decoder
    assert decoder.applies_to(Batch(driver.pool, decode(2)))
    assert decoder._decoder is first
    other = Driver(folder, dtype=torch.bfloat16).pool
    assert decoder.applies_to(Batch(other, decode(1)))
    assert decoder._decoder is not first
