"""Mixture of experts: routing, and the experts' products at the shapes of real models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

import radix_kernels as rk

from .. import peers
from ..harness import Case, Contender, randn
from .moe_peers import fp8_experts

# (experts, topk, hidden, inter): Qwen3-30B-A3B, Mixtral-8x7B.
MODELS = ((128, 8, 2048, 768), (8, 2, 4096, 14336))
TOKENS = (1, 16, 64, 512, 4096)
BLOCK = 16  # rows that the products of an expert take at a time


def moe(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """The products on a GPU, where there are kernels for them; routing everywhere."""
    for experts, topk, hidden, inter in MODELS:
        if device.type == "cuda":
            # One set of weights: other tokens name other experts, and a set is far beyond the L2.
            layer = _Layer(experts=experts, hidden=hidden, inter=inter, device=device, dtype=dtype)
            for tokens in TOKENS:
                yield _products(layer, topk, tokens, dtype.itemsize, _contenders(layer))
            for tokens in TOKENS:
                yield _products(layer, topk, tokens, 1, _fp8_contenders(layer, topk))
        for tokens in (1, 64, 4096):
            yield _routing(device, dtype, tokens, experts, topk)
            yield _align(device, tokens, experts, topk)


@dataclass(frozen=True)
class _Layer:
    """The weights of a layer, made when a case that is measured first asks for them."""

    experts: int
    hidden: int
    inter: int
    device: torch.device
    dtype: torch.dtype

    @cached_property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = (
            (self.experts, 2 * self.inter, self.hidden),
            (self.experts, self.hidden, self.inter),
        )
        w1, w2 = (
            torch.randn(s, device=self.device, dtype=self.dtype) * s[2] ** -0.5 for s in shapes
        )
        return w1, w2

    @cached_property
    def blocks(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """The same as float8_e4m3fn with a scale a block of 128 x 128: (weight, scale) of both."""
        return tuple(_blocks(w) for w in self.weights)


def _routing(
    device: torch.device, dtype: torch.dtype, tokens: int, experts: int, topk: int
) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        logits = randn(tokens, experts, device=device, dtype=dtype)
        weights = torch.zeros(tokens, topk, device=device)
        return logits, weights, torch.zeros(tokens, topk, dtype=torch.int32, device=device)

    def plain(
        x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
    return Case(
        op="topk_softmax",
        shape=f"{tokens}xE{experts} k{topk}",
        dtype=dtype,
        bytes=size,
        flops=3 * tokens * experts,
        make_inputs=make,
        contenders=contenders,
    )


def _align(device: torch.device, tokens: int, experts: int, topk: int) -> Case:
    pairs = tokens * topk

    def make() -> tuple[torch.Tensor]:
        return (torch.randint(0, experts, (tokens, topk), dtype=torch.int32, device=device),)

    def plain(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = ids.flatten().long()
        of, order = flat.sort(stable=True)
        counts = torch.zeros(experts, dtype=torch.int64, device=device).scatter_add_(
            0, flat, torch.ones_like(flat)
        )
        padded = (counts + BLOCK - 1) // BLOCK * BLOCK
        ends = padded.cumsum(0)
        # How far an expert's rows move: by the padding in front of them.
        shift = ends - padded - counts.cumsum(0) + counts
        rows = torch.full((pairs + experts * (BLOCK - 1),), pairs, device=device)
        rows[torch.arange(pairs, device=device) + shift[of]] = order
        owners = torch.searchsorted(
            ends, torch.arange(0, len(rows), BLOCK, device=device), right=True
        )
        return rows.int(), owners.int(), ends[-1:].int()

    contenders: dict[str, Contender] = {
        "radix": lambda ids: rk.moe_align_block_size(ids, experts, BLOCK),
        "torch": plain,
    }
    if vllm := peers.load("vllm.model_executor.layers.fused_moe.moe_align_block_size"):
        contenders["vllm"] = lambda ids: vllm.moe_align_block_size(ids, BLOCK, experts)
    return Case(
        op="moe_align_block_size",
        shape=f"{tokens}xE{experts} k{topk}",
        dtype=torch.int32,
        bytes=8 * pairs,
        flops=pairs,
        make_inputs=make,
        contenders=contenders,
    )


def _products(
    layer: _Layer, topk: int, tokens: int, weight_size: int, contenders: dict[str, Contender]
) -> Case:
    experts = layer.experts
    hidden = layer.hidden
    inter = layer.inter

    def make() -> tuple[torch.Tensor, ...]:
        x = torch.randn(tokens, hidden, device=layer.device, dtype=layer.dtype)
        weights, ids = torch.randn(tokens, experts, device=layer.device).softmax(1).topk(topk, 1)
        return x, weights, ids.int()

    # Each chosen expert is read once: how many of them random tokens name.
    named = experts * (1 - (1 - topk / experts) ** tokens)
    size = named * 3 * inter * hidden * weight_size + 2 * tokens * hidden * layer.dtype.itemsize
    shape = f"{tokens}xE{experts} k{topk} H{hidden} I{inter}{' fp8' if weight_size == 1 else ''}"
    flops = 6 * tokens * topk * hidden * inter
    dtype = torch.float8_e4m3fn if weight_size == 1 else layer.dtype
    return Case(
        op="fused_experts",
        shape=shape,
        dtype=dtype,
        bytes=size,
        flops=flops,
        make_inputs=make,
        contenders=contenders,
        limit="read",
    )


def _contenders(layer: _Layer) -> dict[str, Contender]:
    def radix(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return rk.fused_experts(x, *layer.weights, weights, ids)

    def triton(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        portable.fused_experts(
            x, *layer.weights, weights, ids, None, None, None, out, align=rk.moe_align_block_size
        )
        return out

    def grouped(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        w1, w2 = layer.weights
        flat = ids.flatten().long()
        order = flat.argsort(stable=True)
        counts = torch.zeros(layer.experts, dtype=torch.int32, device=x.device)
        ends = counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(
            0, dtype=torch.int32
        )
        gate, up = F.grouped_mm(x[order // ids.shape[1]], w1.mT, offs=ends).chunk(2, 1)
        part = F.grouped_mm(F.silu(gate) * up, w2.mT, offs=ends)
        out = torch.empty_like(part)
        out[order] = part
        return (out.unflatten(0, ids.shape) * weights[..., None]).sum(1)

    contenders: dict[str, Contender] = {"radix": radix}
    if rk.capabilities()["ops"]["fused_experts"]["bfloat16"]["impl"] not in ("triton", "reference"):
        from radix_kernels import triton as portable

        contenders["our Triton"] = triton
    if hasattr(F, "grouped_mm"):
        contenders["torch grouped_mm"] = grouped
    if vllm := peers.load("vllm.model_executor.layers.fused_moe"):
        contenders["vllm"] = lambda x, weights, ids: vllm.fused_experts(
            x, *layer.weights, weights, ids
        )
    return contenders


def _fp8_contenders(layer: _Layer, topk: int) -> dict[str, Contender]:
    """Activations quantised on the way, as the peers do it; beside it ours that leaves them as they
    are."""

    def radix(
        x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, quantised: bool = True
    ) -> torch.Tensor:
        (w1, s1), (w2, s2) = layer.blocks
        return rk.fused_experts(
            x, w1, w2, weights, ids, w1_scale=s1, w2_scale=s2, use_fp8_w8a8=quantised
        )

    return {
        "radix": radix,
        "16-bit activations": lambda x, weights, ids: radix(x, weights, ids, False),
        **fp8_experts(lambda: layer.blocks, topk, layer.dtype),
    }


def _blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised in blocks of 128 x 128, whose sizes divide the weights'."""
    tiled = w.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    scale = tiled.abs().amax((2, 4)).float() / 448
    scaled = tiled / scale[:, :, None, :, None]
    return scaled.to(torch.float8_e4m3fn).view(w.shape), scale
