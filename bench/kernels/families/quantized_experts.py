"""Experts of 4 and 8 bits on Hopper, at the shapes of real models, beside our products of the same
in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

import radix_kernels as rk

from ..harness import Case, Contender
from .quantized_peers import ExpertSizes

_TILE = 64  # rows and k of a tile of Hopper's layout
_BITS = {"int4": 4, "int8": 8, "mxfp4": 4}
# How far codes are from 0, about.
_SPREAD = {"int4": 6, "int8": 96}


@dataclass(frozen=True)
class Layer:
    """A layer's experts; scale_dtype: of groups of `group`. biases: with the clamped SwiGLU, as
    gpt-oss has them."""

    name: str
    experts: int
    topk: int
    hidden: int
    inter: int
    kind: str
    group: int
    biases: bool
    tokens: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype

    @cached_property
    def packed(self) -> rk.PackedExperts:
        """Random codes in the layout itself."""
        return rk.PackedExperts(
            w1=tuple(self.weight(2 * self.inter, self.hidden) for _ in range(self.experts)),
            w2=tuple(self.weight(self.hidden, self.inter) for _ in range(self.experts)),
        )

    def weight(self, n: int, k: int) -> rk.PackedWeight:
        """[n, k] of random codes."""
        rows = -(-n // _TILE)
        codes = rows * -(-k // _TILE) * _TILE * _TILE * _BITS[self.kind] // 8
        groups = -(-k // self.group)
        if self.kind == "mxfp4":
            groups += groups % 2  # those of a tile of k are one number
        scales = rows * groups * _TILE
        data = torch.randint(256, (codes,), device=self.device, dtype=torch.uint8)
        if self.kind == "mxfp4":
            parts = torch.randint(116, 120, (scales,), device=self.device, dtype=torch.uint8)
        else:
            drawn = torch.rand(scales, device=self.device) / (_SPREAD[self.kind] * k**0.5)
            parts = drawn.to(torch.bfloat16).view(torch.uint8)
        return rk.PackedWeight(
            data=torch.cat((data, parts)),
            layout="fragments64",
            n=n,
            k=k,
            dtype=str(self.dtype).removeprefix("torch."),
            kind=self.kind,
            group=self.group,
            scale_dtype="uint8" if self.kind == "mxfp4" else "bfloat16",
        )

    @cached_property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Other weights of these shapes."""
        shapes = (
            (self.experts, 2 * self.inter, self.hidden),
            (self.experts, self.hidden, self.inter),
        )
        w1, w2 = (
            torch.randn(s, device=self.device, dtype=self.dtype) * s[2] ** -0.5 for s in shapes
        )
        return w1, w2

    @cached_property
    def peers(self) -> dict[str, Contender]:
        """What vLLM multiplies such experts by."""
        return ExpertSizes(
            device=self.device,
            dtype=self.dtype,
            kind=self.kind,
            group=self.group,
            experts=self.experts,
            topk=self.topk,
            hidden=self.hidden,
            inter=self.inter,
            biases=self.biases,
        ).contenders()

    @cached_property
    def bias(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.randn(self.experts, 2 * self.inter, device=self.device, dtype=self.dtype),
            torch.randn(self.experts, self.hidden, device=self.device, dtype=self.dtype),
        )


def quantized_experts(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """GPU only: Qwen3-30B-A3B in INT4 and INT8 (groups of 128), gpt-oss-20b in MXFP4."""
    if device.type != "cuda":
        return
    for kind in ("int4", "int8"):
        yield from cases(qwen_experts(kind, device, dtype))
    yield from cases(_gpt_oss_experts(device, dtype))


def qwen_experts(kind: str, device: torch.device, dtype: torch.dtype) -> Layer:
    """Qwen3-30B-A3B."""
    return Layer(
        name=f"{kind} g128",
        experts=128,
        topk=8,
        hidden=2048,
        inter=768,
        kind=kind,
        group=128,
        biases=False,
        tokens=(1, 16, 64, 512, 4096),
        device=device,
        dtype=dtype,
    )


def _gpt_oss_experts(device: torch.device, dtype: torch.dtype) -> Layer:
    """gpt-oss-20b."""
    return Layer(
        name="mxfp4",
        experts=32,
        topk=4,
        hidden=2880,
        inter=2880,
        kind="mxfp4",
        group=32,
        biases=True,
        tokens=(1, 16, 64, 512, 4096),
        device=device,
        dtype=dtype,
    )


def cases(layer: Layer) -> Iterator[Case]:
    """A row for each number of tokens."""
    for tokens in layer.tokens:
        yield _case(layer, tokens)


def _case(layer: Layer, tokens: int) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        x = torch.randn(tokens, layer.hidden, device=layer.device, dtype=layer.dtype)
        logits = torch.randn(tokens, layer.experts, device=layer.device)
        weights, ids = logits.softmax(1).topk(layer.topk, 1)
        return x, weights, ids.int(), logits.to(layer.dtype)

    # Each chosen expert is read once: how many of them random tokens name.
    named = layer.experts * (1 - (1 - layer.topk / layer.experts) ** tokens)
    of_one = layer.packed.nbytes / layer.experts
    return Case(
        op="fused_experts_packed",
        shape=f"{layer.name} {tokens}xE{layer.experts} k{layer.topk} "
        f"H{layer.hidden} I{layer.inter}",
        dtype=layer.dtype,
        bytes=named * of_one + 2 * tokens * layer.hidden * layer.dtype.itemsize,
        flops=6 * tokens * layer.topk * layer.hidden * layer.inter,
        make_inputs=make,
        contenders=_contenders(layer),
        limit="read",
    )


def _contenders(layer: Layer) -> dict[str, Contender]:
    def radix(
        x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        if not layer.biases:
            return rk.fused_experts_packed(x, layer.packed, weights, ids)
        bias1, bias2 = layer.bias
        return rk.fused_experts_packed(
            x,
            layer.packed,
            weights,
            ids,
            bias1=bias1,
            bias2=bias2,
            activation="swiglu_clamped",
        )

    def dense(
        x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        return rk.fused_experts(x, *layer.dense, weights, ids)

    return {"radix": radix, "our bf16, plain": dense, **layer.peers}
