"""Experts of codes for the tests: random ones, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import radix_kernels as rk
from tests.kernel.code_weights import FLOAT4
from tests.kernel.experts_cases import Experts
from tests.kernel.helpers import integers


@dataclass(frozen=True, kw_only=True)
class CodeKind:
    """What a weight of codes is."""

    kind: str
    group: int
    scale_dtype: torch.dtype = torch.bfloat16
    zeros: bool = False


@dataclass(frozen=True, kw_only=True)
class CodeWeight:
    """codes: uint8 or, of int8, int8 [N, K], one in a byte; scales [N, G]; zeros uint8 [N, G] or
    None."""

    form: CodeKind
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def values(self) -> torch.Tensor:
        """What they stand for, in float64: [N, K]."""
        k = self.codes.shape[1]

        def wide(numbers: torch.Tensor) -> torch.Tensor:
            return numbers.double().repeat_interleave(self.form.group or k, 1)[:, :k]

        if self.form.kind == "mxfp4":
            return FLOAT4[self.codes.long()] * torch.exp2(wide(self.scales) - 127)
        if self.zeros is not None:
            return (self.codes.double() - wide(self.zeros)) * wide(self.scales)
        return (self.codes.double() - (8 if self.form.kind == "int4" else 0)) * wide(self.scales)

    def pack(self, dtype: torch.dtype, device: str = "cpu") -> rk.PackedWeight:
        """By the library for the device, or where `pack_weight` is made to run."""
        stored = self.codes
        if self.form.kind != "int8":
            padded = torch.nn.functional.pad(stored, (0, stored.shape[1] % 2))
            stored = padded[:, ::2] | padded[:, 1::2] << 4
        return rk.pack_weight(
            stored.to(device),
            self.scales.to(device),
            self.form.kind,
            zeros=None if self.zeros is None else self.zeros.to(device),
            group=self.form.group,
            dtype=dtype,
        )


def random_weight(n: int, k: int, form: CodeKind, rng: torch.Generator) -> CodeWeight:
    """Values around 1 / sqrt(K)."""
    groups = -(-k // form.group) if form.group else 1
    if form.kind == "int8":
        codes = integers(-128, 128, (n, k), rng).to(torch.int8)
    else:
        codes = integers(0, 16, (n, k), rng).to(torch.uint8)
    zeros = integers(0, 17, (n, groups), rng).to(torch.uint8) if form.zeros else None
    if form.kind == "mxfp4":
        middle = 126 - round(torch.tensor(float(k)).log2().item() / 2)
        scales = (middle + integers(-3, 2, (n, groups), rng)).to(torch.uint8)
    else:
        spread = torch.rand(n, groups, generator=rng) + 0.2
        size = 100 if form.kind == "int8" else 6
        scales = (spread / (size * k**0.5)).to(form.scale_dtype)
    return CodeWeight(form=form, codes=codes, scales=scales, zeros=zeros)


@dataclass(frozen=True, kw_only=True)
class CodeExperts:
    """The weights of all experts, and a call on them."""

    w1: tuple[CodeWeight, ...]
    w2: tuple[CodeWeight, ...]
    case: Experts

    def pack(self, device: str = "cpu") -> rk.PackedExperts:
        """As CodeWeight.pack(), for the activation of the call."""
        dtype = self.case.x.dtype
        return rk.PackedExperts(
            w1=tuple(w.pack(dtype, device) for w in self.w1),
            w2=tuple(w.pack(dtype, device) for w in self.w2),
            activation=self.case.options.get("activation", "silu"),
        )


def random_experts(
    shape: tuple[int, int, int, int, int],
    form: CodeKind,
    x: torch.Tensor,
    rng: torch.Generator,
    named: int | None = None,
) -> CodeExperts:
    """shape: tokens, experts, topk, hidden, inter; x: [tokens, hidden]."""
    tokens, experts, topk, hidden, inter = shape
    w1 = tuple(random_weight(2 * inter, hidden, form, rng) for _ in range(experts))
    w2 = tuple(random_weight(hidden, inter, form, rng) for _ in range(experts))
    ids = torch.empty(tokens, topk, dtype=torch.int32)
    for token in range(tokens):
        ids[token] = torch.randperm(named or experts, generator=rng)[:topk]
    case = Experts(
        x=x,
        w1=torch.stack([w.values() for w in w1]),
        w2=torch.stack([w.values() for w in w2]),
        weights=torch.rand(tokens, topk, generator=rng),
        ids=ids,
        options={},
    )
    return CodeExperts(w1=w1, w2=w2, case=case)
