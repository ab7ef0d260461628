"""What vLLM offers for weights of 4 and 8 bits: Marlin, Machete and, for gpt-oss's experts, the
Triton kernels that it takes on Hopper. Codes are random, in each kernel's own layout: no value of
ours is repacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .. import peers
from ..harness import Contender

T = TypeVar("T")

_QUANTIZATION = "vllm.model_executor.layers.quantization.utils"
_MOE = "vllm.model_executor.layers.fused_moe"
_TILE = 16  # inputs of a row of Marlin's words
# vLLM's name of what codes of a kind stand for.
_TYPES = {"int4": "uint4b8", "int8": "uint8b128", "mxfp4": "float4_e2m1f"}
_BITS = {"int4": 4, "int8": 8, "mxfp4": 4}
# As vLLM rounds gpt-oss's sizes up for Marlin: outputs of an expert, hidden size.
_WIDTH_UNIT = 128
_HIDDEN_UNIT = 256


@dataclass(frozen=True)
class PeerWeight:
    """A weight of a peer. Each set of inputs has a copy of `codes` and `scales`; `multiply` takes
    x and them."""

    codes: torch.Tensor
    scales: torch.Tensor
    multiply: Contender


@dataclass(frozen=True)
class Product:
    """Weights [n, k] of `kind`, k in groups of `group`, times x of `dtype`."""

    device: torch.device
    dtype: torch.dtype
    kind: str
    n: int
    k: int
    group: int

    def weights(self) -> dict[str, PeerWeight]:
        """The peers' forms, by the peers' names."""
        makers = {"vLLM Marlin": self._marlin, "vLLM Machete": self._machete}
        found = {name: _made(name, make) for name, make in makers.items()}
        return {name: weight for name, weight in found.items() if weight is not None}

    def _marlin(self) -> PeerWeight | None:
        utils = peers.load(f"{_QUANTIZATION}.marlin_utils")
        floats = peers.load(f"{_QUANTIZATION}.marlin_utils_fp4")
        types = peers.load("vllm.scalar_type")
        if None in (utils, floats, types):
            return None
        workspace = utils.marlin_make_workspace_new(self.device)
        empty = utils.marlin_make_empty_g_idx(self.device)

        def integers(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> Any:
            return utils.apply_gptq_marlin_linear(
                input=x,
                weight=codes,
                weight_scale=scales,
                weight_zp=empty,
                g_idx=empty,
                g_idx_sort_indices=empty,
                workspace=workspace,
                wtype=getattr(types.scalar_types, _TYPES[self.kind]),
                output_size_per_partition=self.n,
                input_size_per_partition=self.k,
                is_k_full=True,
            )

        def mxfp4(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> Any:
            return floats.apply_fp4_marlin_linear(
                input=x,
                weight=codes,
                weight_scale=scales,
                weight_global_scale=None,
                workspace=workspace,
                size_n=self.n,
                size_k=self.k,
            )

        return PeerWeight(
            codes=_words(self.device, self.k // _TILE, self.n * _TILE * _BITS[self.kind] // 32),
            scales=_scales(self.kind, self.dtype, self.device, self.k // self.group, self.n),
            multiply=mxfp4 if self.kind == "mxfp4" else integers,
        )

    def _machete(self) -> PeerWeight | None:
        ops = peers.load("vllm._custom_ops")
        types = peers.load("vllm.scalar_type")
        if self.kind == "mxfp4" or None in (ops, types):
            return None
        kind = getattr(types.scalar_types, _TYPES[self.kind])
        words = _words(self.device, self.n, self.k * _BITS[self.kind] // 32)
        codes = ops.machete_prepack_B(
            words.t(), a_type=self.dtype, b_type=kind, group_scales_type=self.dtype
        )

        def multiply(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> Any:
            return ops.machete_mm(
                a=x, b_q=codes, b_type=kind, b_group_scales=scales, b_group_size=self.group
            )

        return PeerWeight(
            codes=codes,
            scales=_scales(self.kind, self.dtype, self.device, self.k // self.group, self.n),
            multiply=multiply,
        )


@dataclass(frozen=True)
class ExpertSizes:
    """A layer of experts; `biases`: with gpt-oss's clamped SwiGLU. Contenders take x [T, hidden],
    weights and ids [T, topk], and logits [T, experts]."""

    device: torch.device
    dtype: torch.dtype
    kind: str
    group: int
    experts: int
    topk: int
    hidden: int
    inter: int
    biases: bool

    def contenders(self) -> dict[str, Contender]:
        """vLLM's, by name."""
        found: dict[str, Contender | None] = {"vLLM Marlin": _made("vLLM Marlin", self._marlin)}
        if self.kind == "mxfp4" and self.dtype == torch.bfloat16:
            found["vLLM Triton, routing too"] = _made("vLLM Triton", self._triton)
        return {name: contender for name, contender in found.items() if contender is not None}

    def _marlin(self) -> Contender | None:
        module = peers.load(f"{_MOE}.experts.marlin_moe")
        moe = peers.load(_MOE)
        types = peers.load("vllm.scalar_type")
        if None in (module, moe, types):
            return None
        is_float = self.kind == "mxfp4"
        hidden = _rounded(self.hidden, _HIDDEN_UNIT) if is_float else self.hidden
        inter = _rounded(self.inter, _WIDTH_UNIT) if is_float else self.inter
        shapes = ((2 * inter, hidden), (hidden, inter))
        w1, w2 = (self._stacked_words(n, k) for n, k in shapes)
        s1, s2 = (self._stacked_scales(k // self.group, n) for n, k in shapes)
        bias1, bias2 = (self._bias(n, self.dtype) for n, _ in shapes)
        options = {
            "quant_type_id": getattr(types.scalar_types, _TYPES[self.kind]).id,
            "global_num_experts": self.experts,
            "activation": getattr(moe.MoEActivation, "SWIGLUOAI" if self.biases else "SILU"),
        }

        def call(
            x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor
        ) -> Any:
            if x.shape[1] < hidden:
                x = torch.nn.functional.pad(x, (0, hidden - x.shape[1]))
            return module.fused_marlin_moe(x, w1, w2, bias1, bias2, s1, s2, weights, ids, **options)

        return call

    def _triton(self) -> Contender | None:
        imports = peers.load("vllm.utils.import_utils")
        if imports is None or not imports.has_triton_kernels():
            return None
        module = peers.load(f"{_MOE}.experts.gpt_oss_triton_kernels_moe")
        config = peers.load(f"{_MOE}.config")
        swizzle = peers.load(f"{_QUANTIZATION}.mxfp4_utils")
        ogs = peers.load("triton_kernels.matmul_ogs")
        if None in (module, config, swizzle, ogs):
            return None
        weights = []
        precisions = []
        for n, k in ((2 * self.inter, self.hidden), (self.hidden, self.inter)):
            codes = torch.randint(
                256, (self.experts, n, k // 2), device=self.device, dtype=torch.uint8
            )
            scales = self._stacked_scales(n, k // self.group).view(torch.uint8)
            weight, flex, scale = swizzle._swizzle_mxfp4(codes, scales)
            weights.append(weight)
            precisions.append(
                ogs.PrecisionConfig(weight_scale=scale, flex_ctx=ogs.FlexCtx(rhs_data=flex))
            )
        quant = config.mxfp4_w4a16_moe_quant_config(
            w1_scale=precisions[0],
            w2_scale=precisions[1],
            w1_bias=self._bias(2 * self.inter, torch.float32),
            w2_bias=self._bias(self.hidden, torch.float32),
        )

        def call(x: torch.Tensor, _: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor) -> Any:
            return module.triton_kernel_moe_forward(
                x,
                *weights,
                logits,
                topk=self.topk,
                renormalize=True,
                global_num_experts=self.experts,
                quant_config=quant,
            )

        return call

    def _stacked_words(self, n: int, k: int) -> torch.Tensor:
        words = n * _TILE * _BITS[self.kind] // 32
        return _words(self.device, self.experts, k // _TILE, words)

    def _stacked_scales(self, *shape: int) -> torch.Tensor:
        return _scales(self.kind, self.dtype, self.device, self.experts, *shape)

    def _bias(self, n: int, dtype: torch.dtype) -> torch.Tensor | None:
        if not self.biases:
            return None
        return torch.randn(self.experts, n, device=self.device, dtype=dtype)


def _made(name: str, make: Callable[[], T | None]) -> T | None:
    """What `make` gives; None, and a line that says so, where another version of the peer
    raises."""
    try:
        return make()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        print(f"no peer {name}: {type(error).__name__}: {reason}")
        return None


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _words(device: torch.device, *shape: int) -> torch.Tensor:
    """Words of random codes."""
    codes = torch.randint(256, (*shape, 4), device=device, dtype=torch.uint8)
    return codes.view(torch.int32).squeeze(-1)


def _scales(kind: str, dtype: torch.dtype, device: torch.device, *shape: int) -> torch.Tensor:
    if kind == "mxfp4":
        exponents = torch.randint(116, 122, shape, device=device, dtype=torch.uint8)
        return exponents.view(torch.float8_e8m0fnu)
    return ((torch.rand(shape, device=device) + 0.5) / 2 ** _BITS[kind]).to(dtype)
