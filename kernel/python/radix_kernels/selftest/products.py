"""Dense products, their lookups, and products of FP8 and INT8."""

from __future__ import annotations

import torch

from .bounds import EXACT, FP8_PRODUCT, GATED, LINEAR, ROUNDED_ONCE
from .packed_kinds import quantized_products
from .trial import Trial, case, reference, rk

_SHAPES = ((1, 64, 128), (5, 1000, 333), (70, 256, 512))  # rows, features, inputs
_BLOCK = 128


@case
def linear(t: Trial) -> None:
    for rows, features, inputs in _SHAPES:
        x = t.randn(rows, inputs)
        weight = t.randn(features, inputs)
        bias = t.randn(features)
        exact = reference.linear(x.double(), weight.double(), bias.double())
        there = t.there(weight)
        for given in (there, rk.pack_weight(there)):
            got = rk.linear(t.there(x), given, t.there(bias))
            t.near(got, exact, LINEAR[t.name])
    quantized_products(t)


@case
def linear_argmax(t: Trial) -> None:
    for rows, features, inputs in _SHAPES:
        x = t.randn(rows, inputs)
        weight = t.randn(features, inputs)
        ids, _ = rk.linear_argmax(t.there(x), rk.pack_weight(t.there(weight)))
        logits = reference.linear(x.double(), weight.double())
        chosen = logits.gather(1, ids.cpu().long()[:, None])
        # The largest, or so near to it that float32 cannot tell.
        t.near(chosen[:, 0], logits.amax(1), LINEAR["float32"])


@case
def linear_heads(t: Trial) -> None:
    for rows, features, inputs in _SHAPES:
        x = t.randn(rows, 3, inputs)
        weight = t.randn(3, features, inputs)
        heads = rk.PackedHeads(tuple(rk.pack_weight(t.there(head)) for head in weight))
        got = rk.linear_heads(t.there(x), heads, out=t.poisoned(rows, 3, features))
        t.near(got, reference.linear_heads(x.double(), weight.double()), LINEAR[t.name])


@case
def linear_silu_and_mul(t: Trial) -> None:
    for rows, features, inputs in ((1, 64, 128), (9, 48, 333), (70, 256, 512)):
        x = t.randn(rows, inputs) * inputs**-0.5
        x = x.to(t.dtype)
        weight = t.randn(2 * features, inputs)
        out = t.poisoned(rows, features)
        rk.linear_silu_and_mul(t.there(x), rk.pack_weight(t.there(weight)), out=out)
        exact = reference.linear_silu_and_mul(x.double(), weight.double())
        t.near(out, exact, GATED[t.name])


@case
def embedding(t: Trial) -> None:
    weight = t.randn(101, 200)
    ids = t.integers(0, 101, 13, dtype=torch.int64)
    packed = rk.pack_weight(t.there(weight))
    t.same(rk.embedding(t.there(ids), packed), weight[ids], EXACT)


@case
def fp8_scaled_mm(t: Trial) -> None:
    for rows, features, inputs in ((1, 64, 128), (17, 208, 256), (130, 256, 512)):
        a = t.randn(rows, inputs).to(t.dtype)
        b = t.randn(features, inputs).to(t.dtype)
        scales = [0.5 + t.rand(rows), 0.5 + t.rand(features)]
        out = t.poisoned(rows, features, dtype=torch.bfloat16)
        rk.fp8_scaled_mm(t.there(a), t.there(b).t(), *map(t.there, scales), out=out)
        exact = reference.fp8_scaled_mm(a, b.t(), *scales, torch.float64)
        t.near(out, exact, FP8_PRODUCT)


@case
def int8_scaled_mm(t: Trial) -> None:
    for rows, features, inputs in ((1, 64, 128), (17, 208, 256), (130, 256, 528)):
        a = t.integers(-128, 128, rows, inputs, dtype=torch.int8)
        b = t.integers(-128, 128, features, inputs, dtype=torch.int8)
        scales = [0.5 + t.rand(rows), 0.5 + t.rand(features)]
        azp = t.integers(-128, 128, rows)
        sums = b.sum(1, dtype=torch.int32)
        for zeros in ({}, {"azp": azp, "b_sums": sums}):
            there = {name: t.there(x) for name, x in zeros.items()}
            out = t.poisoned(rows, features, dtype=torch.bfloat16)
            rk.int8_scaled_mm(t.there(a), t.there(b).t(), *map(t.there, scales), out=out, **there)
            exact = reference.int8_scaled_mm(a, b.t(), *scales, torch.float64, **zeros)
            t.near(out, exact, ROUNDED_ONCE["bfloat16"])


@case
def fp8_blockwise_scaled_mm(t: Trial) -> None:
    for rows, features, inputs in ((1, 128, 128), (33, 256, 384)):
        a = t.randn(rows, inputs).to(t.dtype)
        b = t.randn(features, inputs).to(t.dtype)
        scales_a = 0.5 + t.rand(rows, inputs // _BLOCK)
        scales_b = 0.5 + t.rand(features // _BLOCK, inputs // _BLOCK)
        out = t.poisoned(rows, features, dtype=torch.bfloat16)
        there = [t.there(a), t.there(b).t(), t.there(scales_a), t.there(scales_b).t()]
        rk.fp8_blockwise_scaled_mm(*there, out=out)
        exact = reference.fp8_blockwise_scaled_mm(a, b.t(), scales_a, scales_b.t(), torch.float64)
        t.near(out, exact, FP8_PRODUCT)


@case
def bmm_fp8(t: Trial) -> None:
    for batch, rows, features, inputs in ((1, 16, 32, 64), (3, 33, 64, 128)):
        a = t.randn(batch, rows, inputs).to(t.dtype)
        b = t.randn(batch, features, inputs).to(t.dtype)
        scales = [torch.tensor([0.7]), torch.tensor([1.3])]
        out = t.poisoned(batch, rows, features, dtype=torch.bfloat16)
        there = [t.there(a), t.there(b).transpose(1, 2), *map(t.there, scales)]
        rk.bmm_fp8(*there, out=out)
        exact = reference.bmm_fp8(a, b.transpose(1, 2), *scales, torch.float64)
        t.near(out, exact, FP8_PRODUCT)
