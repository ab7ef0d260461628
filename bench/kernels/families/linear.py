"""Dense products of real models; on the CPU with quantized weights too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import radix_kernels as rk

from ..harness import Case

TOKENS = {"cpu": (1, 8, 32, 512), "cuda": (1, 64, 4096)}
# qkv, down, gate and up, o of Qwen3-0.6B.
SHAPES = ((4096, 1024), (1024, 3072), (6144, 1024), (1024, 2048))
# Bytes an element with its share of scales.
QUANTIZED = {
    "w8a8": (0, 1.0), "int8": (0, 1.0), "w4a8": (64, 0.5 + 2 / 64), "int4": (64, 0.5 + 2 / 64),
}  # fmt: skip


def linear(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for n, k in SHAPES:
        source = torch.randn(n, k, device=device, dtype=dtype) / k**0.5
        for m in TOKENS[device.type]:

            def make(
                m: int = m, k: int = k, source: torch.Tensor = source, kind: str | None = None
            ) -> tuple[object, ...]:
                weight = source.clone()
                x = torch.randn(m, k, device=device, dtype=dtype)
                group = None if kind is None else QUANTIZED[kind][0]
                return x, weight, rk.pack_weight(weight, kind=kind, group=group)

            yield _case("linear", f"{m}x{n}x{k}", dtype, n * k * dtype.itemsize, m, n, k, make)
            if device.type != "cpu":
                continue
            for kind, (_, size) in QUANTIZED.items():

                def quantized(kind: str = kind, make: object = make) -> tuple[object, ...]:
                    return make(kind=kind)  # type: ignore[operator, no-any-return]

                yield _case(f"linear {kind}", f"{m}x{n}x{k}", dtype, n * k * size, m, n, k, quantized)


def _case(op: str, shape: str, dtype: torch.dtype, weight_bytes: float, m: int, n: int, k: int, make: object) -> Case:
    return Case(
        op, shape, dtype, weight_bytes + m * (n + k) * dtype.itemsize,
        2 * m * n * k, make,  # type: ignore[arg-type]
        {
            "radix": lambda x, w, p: rk.linear(x, p),
            "torch": lambda x, w, p: F.linear(x, w),
        },
    )  # fmt: skip
