"""What vLLM offers for the experts' products in FP8, and DeepGEMM (within vLLM) for grouped
ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .. import peers
from ..harness import Contender

_MOE = "vllm.model_executor.layers.fused_moe"
BLOCK = [128, 128]

Blocks = tuple[torch.Tensor, torch.Tensor]  # weight, scales


def fp8_experts(
    blocks: Callable[[], tuple[Blocks, ...]], topk: int, dtype: torch.dtype
) -> dict[str, Contender]:
    """fused_experts of float8_e4m3fn weights in blocks and activations quantized on the way: its
    Triton kernels, and the modular kernel that takes DeepGEMM from 128 tokens on. `blocks` gives w1
    and w2 when the first call wants them.
    """
    vllm = peers.load(_MOE)
    config = peers.load(f"{_MOE}.config")
    if not vllm or not config:
        return {}

    def quant_config(s1: torch.Tensor, s2: torch.Tensor) -> Any:
        return config.fp8_w8a8_moe_quant_config(w1_scale=s1, w2_scale=s2, block_shape=BLOCK)

    def triton(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        (w1, s1), (w2, s2) = blocks()
        return vllm.fused_experts(x, w1, w2, weights, ids, quant_config=quant_config(s1, s2))

    contenders: dict[str, Contender] = {"vllm": triton}
    modular = peers.load(f"{_MOE}.modular_kernel")
    prepare = peers.load(f"{_MOE}.prepare_finalize.no_dp_ep")
    workspace = peers.load("vllm.v1.worker.workspace")
    if not modular or not prepare or not workspace:
        return contenders

    @cache
    def kernel(device: torch.device) -> Any:
        if not workspace.is_workspace_manager_initialized():
            workspace.init_workspace_manager(device)
        (w1, s1), (_, s2) = blocks()
        shape = _moe_config(vllm, config, w1.shape, topk, device, dtype)
        return modular.FusedMoEKernel(
            prepare.make_moe_prepare_and_finalize_no_dp_ep(False),
            vllm.TritonOrDeepGemmExperts(shape, quant_config(s1, s2)),
        )

    def deep(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        (w1, _), (w2, _) = blocks()
        return kernel(x.device).apply(
            x,
            w1,
            w2,
            weights,
            ids,
            activation=vllm.MoEActivation.SILU,
            global_num_experts=w1.shape[0],
            expert_map=None,
            apply_router_weight_on_input=False,
        )

    contenders["vllm DeepGEMM"] = deep
    return contenders


def _moe_config(
    vllm: Any,
    config: Any,
    w1_shape: torch.Size,
    topk: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """w1_shape: [experts, 2 * intermediate, hidden]."""
    experts, gate_up, hidden = w1_shape
    return config.FusedMoEConfig(
        num_experts=experts,
        experts_per_token=topk,
        hidden_dim=hidden,
        intermediate_size=gate_up // 2,
        num_local_experts=experts,
        num_logical_experts=experts,
        activation=vllm.MoEActivation.SILU,
        device=device,
        routing_method=vllm.RoutingMethodType.Renormalize,
        moe_parallel_config=vllm.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=dtype,
    )


def deep_gemm(name: str) -> Any:
    """A function of DeepGEMM as vLLM passes it on, or None."""
    module = peers.load("vllm.utils.deep_gemm")
    return getattr(module, name, None) if module and module.is_deep_gemm_supported() else None
