"""Random weights of another engine's model: valid for every kind of parameter, and such that rows
spread over the experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bench.gpu_runtime.experts import Spread, spreads
from bench.gpu_runtime.random_weights import fill_parameters
from radix_runtime.quantization.awq import AwqStorage
from radix_runtime.quantization.fp8 import Fp8Storage, Scales
from radix_runtime.quantization.gptq import GptqStorage
from radix_runtime.quantization.mxfp4 import Mxfp4Storage
from radix_runtime.quantization.packed_int import Int8Storage
from radix_runtime.quantization.storage import Storage

_GROUP = 128
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _holder(**tensors: torch.Tensor) -> nn.Module:
    """A module with these parameters, all bits of which are set: NaN where a type has it."""
    module = nn.Module()
    for name, tensor in tensors.items():
        tensor.view(torch.uint8).fill_(255)
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _fp8_channel() -> nn.Module:
    return _holder(
        weight=_empty(384, 512, dtype=torch.float8_e4m3fn),
        weight_scale=_empty(384, 1, dtype=torch.float32),
    )


def _fp8_blocks() -> nn.Module:
    return _holder(
        weight=_empty(384, 512, dtype=torch.float8_e4m3fn),
        weight_scale_inv=_empty(3, 4, dtype=torch.float32),
    )


def _int8() -> nn.Module:
    return _holder(
        weight=_empty(384, 512, dtype=torch.int8),
        weight_scale=_empty(384, 1, dtype=torch.float32),
    )


def _awq() -> nn.Module:
    return _holder(
        qweight=_empty(512, 48, dtype=torch.int32),
        qzeros=_empty(4, 48, dtype=torch.int32),
        scales=_empty(4, 384, dtype=torch.bfloat16),
    )


def _gptq() -> nn.Module:
    return _holder(
        qweight=_empty(64, 384, dtype=torch.int32),
        g_idx=_empty(512, dtype=torch.int32),
        scales=_empty(4, 384, dtype=torch.bfloat16),
        qzeros=_empty(4, 48, dtype=torch.int32),
    )


def _experts_fp8() -> nn.Module:
    return _holder(
        w13_weight=_empty(3, 256, 256, dtype=torch.float8_e4m3fn),
        w2_weight=_empty(3, 256, 128, dtype=torch.float8_e4m3fn),
        w13_weight_scale_inv=_empty(3, 2, 2, dtype=torch.float32),
        w2_weight_scale_inv=_empty(3, 2, 1, dtype=torch.float32),
    )


def _experts_mxfp4() -> nn.Module:
    return _holder(
        w13_weight=_empty(3, 256, 64, dtype=torch.uint8),
        w13_weight_scale=_empty(3, 256, 4, dtype=torch.uint8),
        w13_bias=_empty(3, 256, dtype=torch.bfloat16),
    )


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """The 4-bit numbers of these bytes, the low half of a byte first."""
    data = words.contiguous().view(torch.uint8).int()
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def _from_fp8(module: nn.Module, codes: str, scales: str) -> torch.Tensor:
    weight = getattr(module, codes).float()
    scale = getattr(module, scales)
    rows = weight.shape[-2] // scale.shape[-2]
    columns = weight.shape[-1] // scale.shape[-1]
    return weight * scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def _from_int4(module: nn.Module) -> torch.Tensor:
    """Codes by input: all have the same zero point and scale here, whatever their order is."""
    zeros = _nibbles(module.qzeros).unique()
    assert len(zeros) == 1
    one_less = hasattr(module, "g_idx")
    scale = module.scales.float().unique()
    assert len(scale) == 1
    return (_nibbles(module.qweight) - zeros - int(one_less)) * scale


def _from_mxfp4(module: nn.Module) -> torch.Tensor:
    codes = _nibbles(module.w13_weight)
    values = torch.tensor(_E2M1 + tuple(-value for value in _E2M1))[codes]
    powers = torch.exp2(module.w13_weight_scale.float() - 127)
    return values * powers.repeat_interleave(32, -1)


@pytest.mark.parametrize(
    ("make", "widen"),
    [
        (_fp8_channel, lambda module: _from_fp8(module, "weight", "weight_scale")),
        (_fp8_blocks, lambda module: _from_fp8(module, "weight", "weight_scale_inv")),
        (_experts_fp8, lambda module: _from_fp8(module, "w13_weight", "w13_weight_scale_inv")),
        (_experts_fp8, lambda module: _from_fp8(module, "w2_weight", "w2_weight_scale_inv")),
        (_int8, lambda module: module.weight * module.weight_scale),
        (_awq, _from_int4),
        (_gptq, _from_int4),
        (_experts_mxfp4, _from_mxfp4),
    ],
)
def test_quantized_weights_are_those_of_a_16_bit_model(
    make: Callable[[], nn.Module], widen: Callable[[Any], torch.Tensor]
) -> None:
    module = make()
    fill_parameters(module)
    weight = widen(module)
    assert bool(weight.isfinite().all())
    assert float(weight.std()) == pytest.approx(0.02, rel=0.15)
    assert abs(float(weight.mean())) < 0.003  # half a step of 4 bits
    assert len(weight.unique()) > 14


@pytest.mark.parametrize(
    ("storage", "ours", "make", "names"),
    [
        (Fp8Storage(scales=Scales.CHANNEL), ("weight", "weight_scale"), _fp8_channel, None),
        (
            Fp8Storage(scales=Scales.BLOCK),
            ("weight", "weight_scale"),
            _fp8_blocks,
            ("weight", "weight_scale_inv"),
        ),
        (Int8Storage(quantizes_x=True), ("weight", "weight_scale"), _int8, None),
        (AwqStorage(group=_GROUP), ("qweight", "qzeros", "scales"), _awq, None),
        (
            GptqStorage(bits=4, group=_GROUP, has_order=False, form="gptq"),
            ("qweight", "qzeros", "scales"),
            _gptq,
            None,
        ),
        (
            Mxfp4Storage(),
            ("blocks", "scales"),
            _experts_mxfp4,
            ("w13_weight", "w13_weight_scale"),
        ),
    ],
)
def test_codes_and_scales_are_drawn_as_ours(
    storage: Storage,
    ours: tuple[str, ...],
    make: Callable[[], nn.Module],
    names: tuple[str, ...] | None,
) -> None:
    module = make()
    fill_parameters(module)
    for name, other in zip(ours, names or ours, strict=True):
        found = getattr(module, other).data
        expected = torch.empty_like(found)
        storage.fill_random(None, name, expected, torch.Generator().manual_seed(5))
        assert float(found.float().mean()) == pytest.approx(
            float(expected.float().mean()), abs=0.03 * float(expected.float().std()) + 1e-9
        )
        assert float(found.float().std()) == pytest.approx(float(expected.float().std()), rel=0.05)
        assert found.float().min() <= expected.float().quantile(0.001)
        assert found.float().max() >= expected.float().quantile(0.999)


def test_groups_of_inputs_are_in_order() -> None:
    module = _gptq()
    fill_parameters(module)
    assert module.g_idx.tolist() == [i // _GROUP for i in range(512)]


class _Block(nn.Module):
    """What a decoder layer has in 16 bits, under the names that vLLM has for it."""

    def __init__(self, experts: int = 64, hidden: int = 256) -> None:
        super().__init__()
        half = {"dtype": torch.bfloat16}
        self.norm = _holder(weight=_empty(hidden, **half))
        self.gate = _holder(
            weight=_empty(experts, hidden, **half),
            bias=_empty(experts, **half),
            e_score_correction_bias=_empty(experts, dtype=torch.float32),
        )
        self.experts = _holder(
            w13_weight=_empty(4, 64, hidden, **half), w13_bias=_empty(4, 64, **half)
        )
        self.attn = _holder(sinks=_empty(1024, **half))
        for name in ("q_scale", "k_scale", "v_scale", "prob_scale", "k_zero_point"):
            self.attn.register_parameter(
                name, nn.Parameter(torch.tensor(-1.0), requires_grad=False)
            )
        self.attn.register_buffer("_k_scale", torch.tensor(1.0))


def test_16_bit_parameters() -> None:
    block = _Block()
    fill_parameters(block)
    assert bool((block.norm.weight == 1).all())
    wide = [block.gate.weight, block.gate.bias, block.gate.e_score_correction_bias]
    wide += [block.experts.w13_weight, block.experts.w13_bias, block.attn.sinks]
    for param in wide:
        assert float(param.float().std()) == pytest.approx(0.02, rel=0.35)
        assert abs(float(param.float().mean())) < 0.01
    assert float(block.gate.weight.float().std()) == pytest.approx(0.02, rel=0.05)
    kept = [block.attn.q_scale, block.attn.k_scale, block.attn.v_scale, block.attn.prob_scale]
    assert [float(scale) for scale in (*kept, block.attn.k_zero_point)] == [-1] * 5
    assert float(block.attn._k_scale) == 1


def test_values_follow_from_the_path() -> None:
    layers = nn.ModuleList([_Block(), _Block()])
    again = nn.ModuleList([_Block(), _Block(experts=32)])
    fill_parameters(layers)
    fill_parameters(again)
    assert torch.equal(layers[0].gate.weight, again[0].gate.weight)
    assert torch.equal(layers[1].experts.w13_weight, again[1].experts.w13_weight)
    assert not torch.equal(layers[0].gate.weight, layers[1].gate.weight)
    alike = layers[0].gate.weight.flatten()[:1024] == layers[0].attn.sinks
    assert float(alike.float().mean()) < 0.1


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (_holder(input_scale=_empty(1, dtype=torch.float32)), "input_scale: no random values"),
        (_holder(weight_packed=_empty(2, 2, dtype=torch.int32)), "weight_packed: no random"),
        (_holder(weight=_empty(2, 2, dtype=torch.float8_e5m2)), "weight: no random values"),
        (
            _holder(
                weight=_empty(2, 2, dtype=torch.bfloat16),
                weight_scale=_empty(2, 1, dtype=torch.float32),
            ),
            "no deviation is known of codes in torch.bfloat16",
        ),
        (
            _holder(
                scales=_empty(4, 384, dtype=torch.bfloat16),
                qzeros=_empty(4, 96, dtype=torch.int32),
            ),
            "of 4 bits alone",
        ),
        (nn.Linear(2, 2, device="meta"), "weight has no memory yet"),
    ],
)
def test_what_has_no_random_values(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill_parameters(module)


def _chosen(embedding: torch.Tensor, norm: torch.Tensor, gate: torch.Tensor) -> np.ndarray:
    """The experts of each row of `embedding`, by scores that are rounded to bfloat16, as vLLM's of
    DeepSeek-V2: [1, 1, rows, 6]."""
    x = embedding.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm.float()
    logits = x.bfloat16() @ gate.T
    return logits.softmax(-1).topk(6, dim=-1).indices.numpy()[None, None]


def test_rows_spread_over_the_experts() -> None:
    """256 rows of DeepSeek-V2-Lite's router; with weights from ±0.001 all of them tie."""
    model = nn.ModuleDict(
        {
            "embed_tokens": _holder(weight=_empty(256, 2048, dtype=torch.bfloat16)),
            "norm": _holder(weight=_empty(2048, dtype=torch.bfloat16)),
            "gate": _holder(weight=_empty(64, 2048, dtype=torch.bfloat16)),
        }
    )
    fill_parameters(model)
    params = [model[name].weight for name in ("embed_tokens", "norm", "gate")]
    (found,) = spreads(_chosen(*params))
    assert found.used == 64
    assert found.busiest < 60  # 24 on average

    small = [torch.empty_like(param).uniform_(-1e-3, 1e-3) for param in params]
    (tied,) = spreads(_chosen(*small))
    assert tied == Spread(layer=0, used=6, busiest=256)
