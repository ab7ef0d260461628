"""Products with packed weights, packing, rows of them, and experts of such weights."""

from __future__ import annotations

from typing import Any

import torch

import radix_kernels as rk
from tests.gpu.sanitize.compare import HALF, compare, on_gpu
from tests.kernel.code_experts import CodeKind, random_experts
from tests.kernel.quantized_cases import FORMS, Form, random_weight


def quantized() -> None:
    """Every form; each shape of the kernel, slots and stages filled more than once, a last tile
    that is not full, a second tile for some blocks."""
    rng = torch.Generator().manual_seed(0)
    for form in FORMS:
        for n, k in ((40, 1000), (8500, 128), (17000, 64)):
            for tokens in (1, 9, 17, 40, 100):
                product(form, tokens, n, k, rng)
    for tokens in (3, 64):
        product(FORMS[0], tokens, 6144, 2048, rng)
        product(FORMS[0], tokens, 34000, 192, rng)
    product(FORMS[-1], 200, 9000, 1100, rng)
    int4 = CodeKind(kind="int4", group=128, zeros=True)
    mxfp4 = CodeKind(kind="mxfp4", group=32, scale_dtype=torch.uint8)
    for kind in (int4, mxfp4, CodeKind(kind="int4", group=32)):
        # Two warps or one on k, 8 or 16 pairs a tile, more tiles than blocks; the form for many.
        for shape in ((3, 16, 2, 200, 112), (64, 16, 2, 200, 112), (40, 40, 2, 520, 272)):
            experts(kind, shape, rng)
        experts(kind, (16, 16, 2, 2888, 144), rng)
        experts(kind, (60, 3, 2, 200, 112), rng)


def experts(kind: CodeKind, shape: tuple[int, int, int, int, int], rng: torch.Generator) -> None:
    x = torch.randn(shape[0], shape[3], generator=rng).to(HALF)
    made = random_experts(shape, kind, x, rng)
    case = made.case
    got = rk.fused_experts_packed(x.cuda(), made.pack("cuda"), case.weights.cuda(), case.ids.cuda())
    compare(f"fused_experts_packed {kind}, {shape}", got, case.oracle(), 1e-2)


def product(form: Form, tokens: int, n: int, k: int, rng: torch.Generator) -> None:
    weight = random_weight(form, n, k, rng)
    packed = rk.pack_weight(**on_gpu_by_name(weight.arguments))
    codes = rk.unpack_weight(packed)[0]
    if not torch.equal(codes.cpu(), weight.arguments["w"]):
        raise SystemExit(f"unpack_weight, {form}: other codes")
    x = torch.randn(tokens, k, generator=rng).to(HALF)
    expected = x.double() @ weight.value.T
    compare(f"linear {form}, {tokens} x {n} x {k}", rk.linear(x.cuda(), packed), expected, 5e-3)
    ids = torch.tensor([0, n - 1])
    rows = rk.embedding(ids.cuda(), packed)
    compare(f"embedding {form}", rows, weight.value[ids], 5e-3)


def on_gpu_by_name(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: on_gpu(value) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
