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
# The vocabulary matrix of Qwen3-0.6B, and the rows that draw from it.
VOCABULARY, DRAWS = (151_936, 1024), (1, 32)
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
    if device.type == "cpu":
        for m in DRAWS:
            yield from (_greedy_case(dtype, m, kind) for kind in (None, "w8a8"))


def _greedy_case(dtype: torch.dtype, m: int, kind: str | None) -> Case:
    """The greedy draw from the vocabulary beside the product that writes its logits and the draw from those."""
    n, k = VOCABULARY
    size = dtype.itemsize if kind is None else QUANTIZED[kind][1]

    def make() -> tuple[object, ...]:
        weight = rk.pack_weight(torch.randn(n, k, dtype=dtype) / k**0.5, kind=kind)
        zeros, position = torch.zeros(m), torch.zeros(m, dtype=torch.int64)
        return torch.randn(m, k, dtype=dtype), weight, (zeros, zeros.int() - 1, zeros + 1, zeros, position, position)

    def separate(x: torch.Tensor, weight: rk.PackedWeight, settings: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return rk.top_k_top_p_sampling(rk.linear(x, weight, out_dtype=torch.float32), *settings)

    return Case(
        f"linear_argmax {kind or ''}".strip(), f"{m}x{n}x{k}", dtype, n * k * size + m * k * dtype.itemsize,
        2 * m * n * k, make, {"radix": lambda x, weight, _: rk.linear_argmax(x, weight), "linear + draw": separate},
        limit="read",
    )  # fmt: skip


def _case(op: str, shape: str, dtype: torch.dtype, weight_bytes: float, m: int, n: int, k: int, make: object) -> Case:
    return Case(
        op, shape, dtype, weight_bytes + m * (n + k) * dtype.itemsize,
        2 * m * n * k, make,  # type: ignore[arg-type]
        {
            "radix": lambda x, w, p: rk.linear(x, p),
            "torch": lambda x, w, p: F.linear(x, w),
        },
    )  # fmt: skip
