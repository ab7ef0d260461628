"""Inputs of the experts' products, and their float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import radix_kernels as rk

FP8 = torch.float8_e4m3fn
FNUZ = torch.float8_e4m3fnuz
# Two roundings to the dtype on the way, of the activation and of each expert's part.
TOLERANCE = {torch.float32: (2e-6, 2e-5), torch.float16: (1e-3, 6e-3), torch.bfloat16: (8e-3, 5e-2)}
# Quantised activations: here and there one falls on the other side of a border between two codes, 6
# % apart. Over few tokens such a one does not average out: of 600 inputs of 3 tokens the largest
# norm error was 0.026, its median 0.002. A kernel that rounds gate and up on the way sends more of
# them across: one more rounding in the oracle itself gives 40 tokens 0.011 at the median of 120
# inputs, 0.020 at most.
FP8_ACTIVATIONS = (3e-2, 0.3)
FP8_ACTIVATIONS_OF_FEW = (4e-2, 0.4)


def fp8_activations(tokens: int) -> tuple[float, float]:
    """The bounds of the norm and of the worst element."""
    return FP8_ACTIVATIONS_OF_FEW if tokens < 8 else FP8_ACTIVATIONS


@dataclass
class Experts:
    """Arguments of one call; weights around 1 / sqrt(row), so that results are around 1."""

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    options: dict[str, Any]

    def oracle(self) -> torch.Tensor:
        """Token by token in float64, without the reference's grouping. Activations quantised where
        asked for."""
        scales = [self.options.get(name) for name in ("w1_scale", "w2_scale")]
        w1, w2 = (widened(w, s) for w, s in zip((self.w1, self.w2), scales, strict=True))
        named = self.options.get("expert_map", torch.arange(self.w1.shape[0]))
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        fp8 = self.options.get("use_fp8_w8a8", False)
        code = self.w1.dtype
        for t, row in enumerate(requantized(self.x.double(), code) if fp8 else self.x.double()):
            for expert, weight in zip(self.ids[t].tolist(), self.weights[t].double(), strict=True):
                local = int(named[expert]) if 0 <= expert < len(named) else -1
                if 0 <= local < self.w1.shape[0]:
                    gate, up = (w1[local] @ row + self.bias("bias1", local)).chunk(2)
                    act = activated(self.options.get("activation", "silu"), gate, up)
                    if fp8:
                        act = requantized(act.to(self.x.dtype).double(), code)
                    out[t] += weight * (w2[local] @ act + self.bias("bias2", local))
        return out

    def rounded(self) -> Experts:
        """The same with weights rounded to x's dtype."""
        w1, w2 = (w.to(self.x.dtype).double() for w in (self.w1, self.w2))
        return replace(self, w1=w1, w2=w2)

    def bias(self, name: str, expert: int) -> torch.Tensor:
        bias = self.options.get(name)
        return torch.zeros((), dtype=torch.float64) if bias is None else bias[expert].double()

    def with_biases(self, rng: torch.Generator, dtype: torch.dtype) -> Experts:
        """The same with random biases of the size of the sums."""
        for name, w in (("bias1", self.w1), ("bias2", self.w2)):
            self.options[name] = torch.randn(w.shape[:2], generator=rng).to(dtype)
        return self


# The activations of experts: by name, and clamped where values of the tests are.
ACTIVATIONS = [
    "silu",
    "gelu",
    "gelu_tanh",
    "swiglu_clamped",
    rk.ClampedSwiGlu(alpha=0.9, limit=0.6),
]


def activated(
    activation: str | rk.ClampedSwiGlu, gate: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    """The gated activations, by their formulas."""
    if activation == "swiglu_clamped":
        activation = rk.ClampedSwiGlu(alpha=1.702, limit=7.0)
    if isinstance(activation, rk.ClampedSwiGlu):
        most = activation.limit
        gate = torch.where(gate > most, most, gate)
        up = torch.where(up > most, most, torch.where(up < -most, -most, up))
        return (up + 1) * gate / (1 + torch.exp(-activation.alpha * gate))
    if activation == "gelu":
        return gate / 2 * (1 + torch.erf(gate / 2**0.5)) * up
    if activation == "gelu_tanh":
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return gate / 2 * (1 + torch.tanh(inner)) * up
    return gate / (1 + torch.exp(-gate)) * up


def requantized(x: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """What FP8 codes of x with a scale for each 128 columns stand for."""
    groups = x.unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / torch.finfo(code).max
    return ((groups / scale).to(code).double() * scale).flatten(-2)


def widened(w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return w.double()
    if scale.ndim == 1:
        return w.double() * scale.double()[:, None, None]
    full = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    return w.double() * full[:, : w.shape[1], : w.shape[2]]


def make(
    tokens: int,
    experts: int,
    topk: int,
    hidden: int,
    inter: int,
    dtype: torch.dtype,
    rng: torch.Generator,
    *,
    scales: str = "",
    named: int | None = None,
    code: torch.dtype = FP8,
) -> Experts:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    w1 = normal(experts, 2 * inter, hidden) / hidden**0.5
    w2 = normal(experts, hidden, inter) / inter**0.5
    options = {}
    if scales:
        for name, w in (("w1_scale", w1), ("w2_scale", w2)):
            shape = [experts]
            if scales != "tensor":
                shape += [-(-n // 128) for n in w.shape[1:]]
            options[name] = torch.rand(shape, generator=rng) * 0.02 + 0.01
        most = torch.finfo(code).max
        w1, w2 = ((w * 50).clamp(-most, most).to(code) for w in (w1, w2))
    else:
        w1 = w1.to(dtype)
        w2 = w2.to(dtype)
    ids = torch.stack(
        [torch.randperm(named or experts, generator=rng)[:topk] for _ in range(tokens)]
    )
    weights = torch.rand(tokens, topk, generator=rng)
    return Experts(
        x=normal(tokens, hidden).to(dtype),
        w1=w1,
        w2=w2,
        weights=weights,
        ids=ids.int(),
        options=options,
    )
