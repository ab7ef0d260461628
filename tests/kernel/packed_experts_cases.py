"""Inputs of experts over packed weights, and what their codes stand for."""

from __future__ import annotations

import torch

import radix_kernels as rk
from tests.kernel.helpers import spread

TOLERANCE = {torch.bfloat16: (8e-3, 4e-2), torch.float16: (1e-3, 6e-3), torch.float32: (2e-6, 2e-5)}


def make(tokens, experts, topk, hidden, inter, dtype, rng):
    x = spread((tokens, hidden), dtype, rng)
    w1 = spread((experts, 2 * inter, hidden), dtype, rng) * hidden**-0.5
    w2 = spread((experts, hidden, inter), dtype, rng) * inter**-0.5
    weights = torch.rand(tokens, topk, generator=rng)
    ids = torch.empty(tokens, topk, dtype=torch.int32)
    for token in range(tokens):
        ids[token] = torch.randperm(experts, generator=rng)[:topk]
    return x, w1, w2, weights, ids


def oracle(x, w1, w2, weights, ids, **options):
    wide = [t.double() for t in (x, w1, w2, weights)]
    return rk.reference.fused_experts(*wide, ids, **options)


def dequantized(packed):
    """The numbers that an expert's packed weight stands for."""
    if packed.kind == "dense":
        return rk.unpack_weight(packed).double()
    codes, scales, zeros = rk.unpack_weight(packed)
    if codes.dtype == torch.uint8:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, : packed.k].double() - 8
    assert zeros is None
    scales = scales.double().repeat_interleave(packed.group or packed.k, 1)
    return codes.double() * scales[:, : packed.k]
