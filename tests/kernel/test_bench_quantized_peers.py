"""The forms in which `bench.kernels` gives vLLM weights of few bits: the shapes that its kernels
ask for, and peers of another version, which cost their own rows alone."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.kernels import peers
from bench.kernels.families.quantized_peers import ExpertSizes, Product

CPU = torch.device("cpu")
BITS = {"uint4b8": 4, "uint8b128": 8, "float4_e2m1f": 4}

pytestmark = pytest.mark.cpu_only


class Activation(Enum):
    SILU = "silu"
    SWIGLUOAI = "swigluoai"


class Vllm:
    """Stands in for vLLM's modules: notes calls, and checks sizes as vLLM 0.26 reads them off."""

    def __init__(self) -> None:
        types = {name: SimpleNamespace(id=name) for name in BITS}
        utils = "vllm.model_executor.layers.quantization.utils"
        moe = "vllm.model_executor.layers.fused_moe"
        self.modules = {
            "vllm.scalar_type": SimpleNamespace(scalar_types=SimpleNamespace(**types)),
            "vllm._custom_ops": SimpleNamespace(
                machete_prepack_B=self.prepack, machete_mm=self.machete
            ),
            f"{utils}.marlin_utils": SimpleNamespace(
                marlin_make_workspace_new=lambda device: torch.zeros(4),
                marlin_make_empty_g_idx=lambda device: torch.empty(0, dtype=torch.int32),
                apply_gptq_marlin_linear=self.integers,
            ),
            f"{utils}.marlin_utils_fp4": SimpleNamespace(apply_fp4_marlin_linear=self.mxfp4),
            moe: SimpleNamespace(MoEActivation=Activation),
            f"{moe}.experts.marlin_moe": SimpleNamespace(fused_marlin_moe=self.experts),
        }

    def prepack(
        self, words: torch.Tensor, *, a_type: Any, b_type: Any, group_scales_type: Any
    ) -> torch.Tensor:
        assert words.dtype == torch.int32 and words.stride(0) == 1
        return words

    def machete(self, *, a: Any, b_q: Any, b_type: Any, **scales: Any) -> torch.Tensor:
        k = b_q.shape[0] * 32 // BITS[b_type.id]
        assert a.shape[1] == k
        assert scales["b_group_scales"].shape == (k // scales["b_group_size"], b_q.shape[1])
        return torch.zeros(len(a), b_q.shape[1])

    def integers(self, **found: Any) -> torch.Tensor:
        return self._marlin(BITS[found["wtype"].id], found, found["output_size_per_partition"], 128)

    def mxfp4(self, **found: Any) -> torch.Tensor:
        assert found["weight_scale"].dtype == torch.float8_e8m0fnu
        return self._marlin(4, found, found["size_n"], 32)

    def _marlin(self, bits: int, found: dict[str, Any], n: int, group: int) -> torch.Tensor:
        weight = found["weight"]
        assert weight.dtype == torch.int32
        assert weight.shape[0] * 16 == found["input"].shape[1]
        assert weight.shape[1] * (32 // bits) // 16 == n
        assert found["weight_scale"].shape == (found["input"].shape[1] // group, n)
        return torch.zeros(len(found["input"]), n)

    def experts(
        self, x: Any, w1: Any, w2: Any, bias1: Any, bias2: Any, s1: Any, s2: Any, *chosen: Any,
        quant_type_id: str, global_num_experts: int, activation: Activation,
    ) -> torch.Tensor:  # fmt: skip
        bits = BITS[quant_type_id]
        hidden = x.shape[1]
        inter = w2.shape[1] * 16
        group = 32 if quant_type_id == "float4_e2m1f" else 128
        assert w1.shape == (global_num_experts, hidden // 16, 2 * inter * 16 * bits // 32)
        assert w2.shape[2] // (bits // 2) == hidden
        assert s1.shape == (global_num_experts, hidden // group, 2 * inter)
        assert s2.shape == (global_num_experts, inter // group, hidden)
        assert (bias1 is None) == (activation is Activation.SILU)
        if bias1 is not None:
            assert bias1.shape == (global_num_experts, 2 * inter)
            assert bias2.shape == (global_num_experts, hidden)
        assert chosen[0].dtype == torch.float32 and chosen[1].dtype == torch.int32
        return torch.zeros_like(x)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    found = Vllm()
    monkeypatch.setattr(peers, "load", found.modules.get)
    return found


def product(kind: str) -> Product:
    return Product(
        device=CPU,
        dtype=torch.bfloat16,
        kind=kind,
        n=384,
        k=256,
        group=32 if kind == "mxfp4" else 128,
    )


@pytest.mark.parametrize(
    ("kind", "names"),
    [("int4", 2), ("int8", 2), ("mxfp4", 1)],
)
def test_products(vllm: Vllm, kind: str, names: int) -> None:
    weights = product(kind).weights()
    assert list(weights) == ["vLLM Marlin", "vLLM Machete"][:names]
    for weight in weights.values():
        x = torch.randn(3, 256, dtype=torch.bfloat16)
        assert weight.multiply(x, weight.codes.clone(), weight.scales.clone()).shape == (3, 384)


@pytest.mark.parametrize("kind", ["int4", "int8", "mxfp4"])
def test_experts(vllm: Vllm, kind: str) -> None:
    """MXFP4 with sizes that vLLM rounds up for Marlin, x with them."""
    biases = kind == "mxfp4"
    sizes = ExpertSizes(
        device=CPU,
        dtype=torch.bfloat16,
        kind=kind,
        group=32 if biases else 128,
        experts=4,
        topk=2,
        hidden=320 if biases else 256,
        inter=96 if biases else 128,
        biases=biases,
    )
    (call,) = sizes.contenders().values()
    x = torch.randn(5, sizes.hidden, dtype=torch.bfloat16)
    logits = torch.randn(5, 4)
    weights, ids = logits.softmax(1).topk(2)
    assert call(x, weights, ids.int(), logits).shape[1] == (512 if biases else 256)


def test_a_peer_of_another_version_costs_itself_alone(
    vllm: Vllm, capsys: pytest.CaptureFixture[str]
) -> None:
    del vllm.modules["vllm._custom_ops"].machete_prepack_B
    assert list(product("int4").weights()) == ["vLLM Marlin"]
    assert "no peer vLLM Machete: AttributeError" in capsys.readouterr().out


def test_without_peers_there_are_none() -> None:
    assert product("int4").weights() == {}
