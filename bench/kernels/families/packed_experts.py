"""Mixture of experts over packed weights on the CPU: a layer of Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import radix_kernels as rk

from ..harness import Case, randn

EXPERTS = 128
TOPK = 8
HIDDEN = 2048
INTER = 768
TOKENS = (1, 4, 32, 256)
INT4 = "w4a8"
MXFP4 = "mxfp4"
MXFP4_GROUP = 32
KINDS: dict[str, dict[str, int]] = {
    "dense": {},
    "fp8": {"group": 128},
    "w8a8": {"group": 0},
    INT4: {"group": 64},
}


def packed_experts(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """CPU only: the experts of a layer, dense and quantized; INT4 is a peer of MXFP4."""
    if device.type != "cpu":
        return
    shapes = (EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER)
    w1, w2 = (randn(*s, device=device, dtype=dtype) * s[2] ** -0.5 for s in shapes)
    for kind, options in KINDS.items():
        experts = rk.pack_experts(w1, w2, kind, **options)
        for tokens in TOKENS:
            yield _case(kind, experts, w1, w2, tokens)
    int4 = rk.pack_experts(w1, w2, INT4, **KINDS[INT4])
    w1_codes, w2_codes = (_random_mxfp4(*shape) for shape in shapes)
    experts = rk.PackedExperts(w1=w1_codes, w2=w2_codes)
    for tokens in TOKENS:
        case = _case(MXFP4, experts, w1, w2, tokens)
        case.contenders[INT4] = lambda x, weights, ids: rk.fused_experts_packed(
            x, int4, weights, ids
        )
        yield case


def _random_mxfp4(experts: int, outputs: int, inputs: int) -> tuple[rk.PackedWeight, ...]:
    """Random codes: floats are not quantized to MXFP4."""
    packed = []
    for _ in range(experts):
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
        scales = torch.randint(118, 122, (outputs, inputs // MXFP4_GROUP), dtype=torch.uint8)
        packed.append(rk.pack_weight(codes, scales, MXFP4, group=MXFP4_GROUP))
    return tuple(packed)


def _case(
    kind: str, experts: rk.PackedExperts, w1: torch.Tensor, w2: torch.Tensor, tokens: int
) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        ids = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(tokens)]).int()
        return (
            randn(tokens, HIDDEN, device=w1.device, dtype=w1.dtype),
            torch.rand(tokens, TOPK),
            ids,
        )

    def by_torch(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            rows, column = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[rows], w1[expert]).chunk(2, -1)
            result = F.linear(F.silu(gate) * up, w2[expert])
            out.index_add_(0, rows, result * weights[rows, column, None].to(x.dtype))
        return out

    # Experts that some token names, on average.
    named = EXPERTS * (1 - (1 - TOPK / EXPERTS) ** tokens)
    pairs = tokens * TOPK
    return Case(
        op="fused_experts_packed",
        shape=f"{kind} {tokens}xE{EXPERTS} k{TOPK} {HIDDEN}x{INTER}",
        dtype=w1.dtype,
        bytes=named * experts.nbytes / EXPERTS,
        flops=6 * pairs * HIDDEN * INTER,
        make_inputs=make,
        contenders={
            "radix": lambda x, weights, ids: rk.fused_experts_packed(x, experts, weights, ids),
            "torch": by_torch,
        },
        limit="read",
    )
