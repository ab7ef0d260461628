"""Mixture of experts: routing, and the experts' products at the shapes of real models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import radix_kernels as rk

from .. import peers
from ..harness import Case, Contender

# (experts, topk, hidden, inter): Qwen3-30B-A3B, Mixtral-8x7B.
MODELS = ((128, 8, 2048, 768), (8, 2, 4096, 14336))
TOKENS = (1, 16, 64, 512, 4096)
FP8_TOKENS = (1, 64, 4096)


def moe(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """The products on a GPU, where there are kernels for them; routing everywhere."""
    for experts, topk, hidden, inter in MODELS:
        if device.type == "cuda":
            # One set of weights: other tokens name other experts, and a set is far beyond the L2.
            w1 = torch.randn(experts, 2 * inter, hidden, device=device, dtype=dtype) * hidden**-0.5
            w2 = torch.randn(experts, hidden, inter, device=device, dtype=dtype) * inter**-0.5
            for tokens in TOKENS:
                yield _products(w1, w2, topk, tokens, dtype.itemsize, _contenders(w1, w2))
            for tokens in FP8_TOKENS:
                yield _products(w1, w2, topk, tokens, 1, {"radix": _fp8(w1, w2)})
        for tokens in (1, 64, 4096):
            yield _routing(device, dtype, tokens, experts, topk)
            yield _align(device, tokens, experts, topk)


def _routing(device: torch.device, dtype: torch.dtype, tokens: int, experts: int, topk: int) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        logits = torch.randn(tokens, experts, device=device, dtype=dtype)
        weights = torch.empty(tokens, topk, device=device)
        return logits, weights, torch.empty(tokens, topk, dtype=torch.int32, device=device)

    def plain(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, chosen = x.float().softmax(1).topk(topk, 1)
        return best, chosen.int()

    contenders: dict[str, Contender] = {
        "radix": lambda x, weights, ids: rk.topk_softmax(x, topk, out=(weights, ids)),
        "torch": plain,
    }
    if vllm := peers.load("vllm._custom_ops"):
        order = torch.empty(tokens, topk, dtype=torch.int32, device=device)
        contenders["vllm"] = lambda x, weights, ids: vllm.topk_softmax(weights, ids, order, x)
    size = tokens * (experts * dtype.itemsize + topk * 8)
    return Case("topk_softmax", f"{tokens}xE{experts} k{topk}", dtype, size, 3 * tokens * experts, make, contenders)


def _align(device: torch.device, tokens: int, experts: int, topk: int) -> Case:
    def make() -> tuple[torch.Tensor]:
        return (torch.randint(0, experts, (tokens, topk), dtype=torch.int32, device=device),)

    contenders: dict[str, Contender] = {"radix": lambda ids: rk.moe_align_block_size(ids, experts, 16)}
    if vllm := peers.load("vllm.model_executor.layers.fused_moe.moe_align_block_size"):
        contenders["vllm"] = lambda ids: vllm.moe_align_block_size(ids, 16, experts)
    pairs = tokens * topk
    return Case("moe_align_block_size", f"{tokens}xE{experts} k{topk}", torch.int32, 8 * pairs, pairs, make, contenders)


def _products(
    w1: torch.Tensor, w2: torch.Tensor, topk: int, tokens: int, weight_size: int, contenders: dict[str, Contender]
) -> Case:
    experts, hidden, inter = w2.shape

    def make() -> tuple[torch.Tensor, ...]:
        x = torch.randn(tokens, hidden, device=w1.device, dtype=w1.dtype)
        weights, ids = torch.randn(tokens, experts, device=w1.device).softmax(1).topk(topk, 1)
        return x, weights, ids.int()

    # Each chosen expert is read once: how many of them random tokens name.
    named = experts * (1 - (1 - topk / experts) ** tokens)
    size = named * 3 * inter * hidden * weight_size + 2 * tokens * hidden * w1.element_size()
    shape = f"{tokens}xE{experts} k{topk} H{hidden} I{inter}{' fp8' if weight_size == 1 else ''}"
    flops = 6 * tokens * topk * hidden * inter
    return Case("fused_experts", shape, w1.dtype, size, flops, make, contenders, limit="read")


def _contenders(w1: torch.Tensor, w2: torch.Tensor) -> dict[str, Contender]:
    experts = w1.shape[0]

    def grouped(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.flatten().long()
        order = flat.argsort(stable=True)
        counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
        ends = counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(x[order // ids.shape[1]], w1.mT, offs=ends).chunk(2, 1)
        parts = F.grouped_mm(F.silu(gate) * up, w2.mT, offs=ends)
        out = torch.empty_like(parts).index_copy_(0, order, parts * weights.flatten()[order, None].to(x.dtype))
        return out.unflatten(0, ids.shape).sum(1)

    contenders: dict[str, Contender] = {"radix": lambda x, weights, ids: rk.fused_experts(x, w1, w2, weights, ids)}
    if hasattr(F, "grouped_mm"):
        contenders["torch grouped_mm"] = grouped
    if vllm := peers.load("vllm.model_executor.layers.fused_moe"):
        contenders["vllm"] = lambda x, weights, ids: vllm.fused_experts(x, w1, w2, weights, ids)
    return contenders


def _fp8(w1: torch.Tensor, w2: torch.Tensor) -> Contender:
    """The same weights as float8_e4m3fn with a scale a block of 128 x 128; activations stay as they are."""
    (q1, s1), (q2, s2) = _blocks(w1), _blocks(w2)
    return lambda x, weights, ids: rk.fused_experts(x, q1, q2, weights, ids, w1_scale=s1, w2_scale=s2)


def _blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised in blocks of 128 x 128, whose sizes divide the weights'."""
    tiled = w.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    scale = tiled.abs().amax((2, 4)).float() / 448
    scaled = tiled / scale[:, :, None, :, None]
    return scaled.to(torch.float8_e4m3fn).view(w.shape), scale
