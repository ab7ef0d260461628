"""What vLLM offers for the experts' products in FP8, and DeepGEMM (within vLLM) for grouped
ones."""

from __future__ import annotations

from collections.abc import Callable
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
    """fused_experts of float8_e4m3fn weights in blocks and activations quantised on the way: its
    Triton kernels, and the modular kernel that takes DeepGEMM from 128 tokens on. `blocks` gives w1
    and w2 when the first call wants them.
    """
    vllm = peers.load(_MOE)
    config = peers.load(f"{_MOE}.config")
    if not vllm or not config:
        return {}

    def quantised() -> tuple[Blocks, Blocks, Any]:
        (w1, s1), (w2, s2) = blocks()
        return (
            (w1, s1),
            (w2, s2),
            config.fp8_w8a8_moe_quant_config(w1_scale=s1, w2_scale=s2, block_shape=BLOCK),
        )

    def triton(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        (w1, _), (w2, _), quant = quantised()
        return vllm.fused_experts(x, w1, w2, weights, ids, quant_config=quant)

    contenders: dict[str, Contender] = {"vllm": triton}
    kernels = peers.load(f"{_MOE}.modular_kernel"), peers.load(f"{_MOE}.prepare_finalize.no_dp_ep")
    workspace = peers.load("vllm.v1.worker.workspace")
    if not all(kernels) or not workspace:
        return contenders
    made: list[Any] = []

    def deep(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        (w1, _), (w2, _), quant = quantised()
        if not made:
            if not workspace.is_workspace_manager_initialized():
                workspace.init_workspace_manager(x.device)
            moe = config.FusedMoEConfig(
                num_experts=w1.shape[0],
                experts_per_token=topk,
                hidden_dim=w1.shape[2],
                intermediate_size=w2.shape[2],
                num_local_experts=w1.shape[0],
                num_logical_experts=w1.shape[0],
                activation=vllm.MoEActivation.SILU,
                device=x.device,
                routing_method=vllm.RoutingMethodType.Renormalize,
                moe_parallel_config=vllm.FusedMoEParallelConfig.make_no_parallel(),
                in_dtype=dtype,
            )
            modular, prepare = kernels
            made.append(
                modular.FusedMoEKernel(
                    prepare.make_moe_prepare_and_finalize_no_dp_ep(False),
                    vllm.TritonOrDeepGemmExperts(moe, quant),
                )
            )
        return made[0].apply(
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

    return {**contenders, "vllm DeepGEMM": deep}


def deep_gemm(name: str) -> Any:
    """A function of DeepGEMM as vLLM passes it on, or None."""
    module = peers.load("vllm.utils.deep_gemm")
    return getattr(module, name, None) if module and module.is_deep_gemm_supported() else None
